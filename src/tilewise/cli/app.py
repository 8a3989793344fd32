"""The typer application: its commands, and plain help where stdout is not a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import tilewise
from tilewise.cli import bench, demo, explain, generate, roofline, tune_quant, tune_sparse, tune_windows, why
from tilewise.cli.output import say

HELP = """Write attention as a formula; get a fused kernel for training, serving, quantized and sparse attention.

Exit codes: 0 done, 1 the check failed, 2 wrong usage or a missing extra."""


def build(*, rich: bool) -> typer.Typer:
    """The application; `rich` chooses boxed help over plain help."""
    options = {"rich_markup_mode": "rich" if rich else None, "pretty_exceptions_enable": False}
    made = typer.Typer(name="tilewise", help=HELP, no_args_is_help=True, **options)  # type: ignore[arg-type]
    made.callback()(version)
    made.command("demo", short_help="Train a small Llama through tilewise and PyTorch; compare.")(demo.demo)
    made.command("why", short_help="Which implementation runs a call, and why.")(why.why)
    made.command("generate", short_help="Continue a text with a language model.")(generate.generate)
    made.command("chat", short_help="Talk to a language model.")(generate.chat)
    made.command("convert", short_help="Convert a GGUF file to Hugging Face's format.")(generate.convert)
    group = typer.Typer(**options)  # type: ignore[arg-type]
    explain.register(group)
    made.add_typer(
        group, name="explain", short_help="Small programs that count traffic or forwards; pictures of masks and plans."
    )
    timed = typer.Typer(**options)  # type: ignore[arg-type]
    bench.register(timed)
    made.add_typer(timed, name="bench", short_help="Time tilewise against PyTorch on this machine.")
    made.command("roofline", short_help="FLOPs, bytes and least time of a call on a GPU.")(roofline.roofline)
    made.command("tune-quant", short_help="Which quantized attention is accurate enough for your data.")(
        tune_quant.tune_quant
    )
    made.command("tune-sparse", short_help="Block-sparse thresholds per head, from your q, k and v.")(
        tune_sparse.tune_sparse
    )
    made.command("tune-windows", short_help="Sliding-tile windows per head, from your q and k.")(
        tune_windows.tune_windows
    )
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"tilewise {tilewise.__version__}")
        raise typer.Exit


def version(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


app = build(rich=sys.stdout.isatty())
