"""`tilewise demo`: train a small language model through tilewise and through PyTorch, and compare the two."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import shapes
from tilewise.cli.output import FAILED, as_text, check_writable, console, guarded, say, say_json, table
from tilewise.demo import SIZES, Options, Result, run
from tilewise.demo.options import PROMPT
from tilewise.demo.view import Live, Plain

DATA, LEARNING, TEXT = "Training text", "Training", "Generation"
NEXT = (
    ('tilewise why --mask "causal & window(256)"', "which implementation runs a call"),
    ('tilewise explain mask --mask "causal & window(256)"', "which tiles of it are skipped"),
    ('tilewise bench --mask "causal & window(256)"', "times beside PyTorch, here"),
)

SizeName = Enum("SizeName", {name: name for name in SIZES}, type=str)  # type: ignore[misc]


class Precision(str, Enum):
    """Dtypes of the demo."""

    fp32 = "fp32"
    bf16 = "bf16"


@guarded
def demo(
    size: Annotated[
        SizeName | None,
        typer.Option(help="Model and length of training. Default: small; on a GPU medium.", rich_help_panel=LEARNING),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.", rich_help_panel=LEARNING)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per step.", rich_help_panel=LEARNING)] = None,
    seqlen: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence.", rich_help_panel=LEARNING)] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A UTF-8 file or directory to train on instead of the standard library; may be repeated.",
            rich_help_panel=DATA,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and sampling.", rich_help_panel=LEARNING)] = 0,
    prompt: Annotated[str, typer.Option(help="What the generated text starts with.", rich_help_panel=TEXT)] = PROMPT,
    new_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens to generate at most.", rich_help_panel=TEXT)
    ] = Options.new_tokens,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest token.", rich_help_panel=TEXT)
    ] = Options.temperature,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Also train a model through PyTorch's operators.", rich_help_panel=LEARNING
        ),
    ] = True,
    dtype: Annotated[
        Precision | None, typer.Option(help="Default: fp32; on a GPU bf16 (autocast).", rich_help_panel=shapes.MACHINE)
    ] = None,
    device: shapes.Device = None,
    impl: shapes.Impl = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Write result.json, losses.csv and generated.py into this folder.")
    ] = None,
    as_json: shapes.Json = False,
) -> None:
    """Train a small Llama on Python's standard library through tilewise, then let it write code.

    A second model with the same initial weights trains on the same batches through PyTorch's operators. The two loss
    curves must agree (within 0.002 nats in fp32, 0.1 in bf16), else the exit code is 1. The last table also has what
    attention keeps in memory for its backward pass. About a minute on two CPU cores.

    Example: tilewise demo --prompt "def parse(" --text ~/src/project
    """
    out = console(stderr=as_json)
    options = Options(
        size=None if size is None else str(size.value),
        steps=steps,
        batch=batch,
        seqlen=seqlen,
        text=tuple(text or ()),
        device=device,
        dtype=None if dtype is None else dtype.value,
        seed=seed,
        prompt=prompt,
        new_tokens=new_tokens,
        temperature=temperature,
        impl=impl,
        compare=compare,
    )
    if folder is not None:
        check_writable("--out", folder, make=True)
    result = run(options, Live(out) if out.is_terminal else Plain(out))
    written = [] if folder is None else _write(folder, result)
    if as_json:
        say_json(result.as_dict())
    else:
        _show(result, written)
    if not result.passed:
        raise typer.Exit(FAILED)


def _show(result: Result, written: list[Path]) -> None:
    _show_code(result.options.prompt, result.generated)
    for title, columns, rows in result.tables():
        say("")
        table(title, columns, rows, left=len(columns))
    for line in ["", *result.notes()]:
        say(line)
    names = ", ".join(path.name for path in written)
    say(f"written: {written[0].parent}/: {names}" if written else "written: nothing (--out FOLDER writes the results)")
    width = max(len(command) for command, _ in NEXT)
    say("\nnext:\n" + "\n".join(f"  {command:<{width}}  {what}" for command, what in NEXT))


def _show_code(prompt: str, generated: str) -> None:
    out = console()
    if out.is_terminal:
        from rich.console import Console
        from rich.panel import Panel
        from rich.syntax import Syntax

        Console().print(Panel(Syntax(prompt + generated, "python"), title="generated, after the prompt"))
    else:
        say(f"\ngenerated, after the prompt:\n{prompt}{generated}")


def _write(folder: Path, result: Result) -> list[Path]:
    """Write result.json, losses.csv and generated.py into `folder`; returns their paths."""
    losses = result.curves.losses
    lines = [",".join(["step", *losses])]
    for step in range(max(map(len, losses.values()))):
        lines.append(",".join([str(step + 1), *(str(x[step]) if step < len(x) else "" for x in losses.values())]))
    contents = {
        "result.json": as_text(result.as_dict()),
        "losses.csv": "\n".join(lines),
        "generated.py": result.options.prompt + result.generated,
    }
    for name, content in contents.items():
        (folder / name).write_text(content + "\n", encoding="utf-8")
    return [folder / name for name in contents]
