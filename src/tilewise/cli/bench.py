"""`tilewise bench`: `tilewise.attention` against PyTorch's own on this machine, and a command for its neighbours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import torch
import typer

from tilewise.cli import neighbours, shapes
from tilewise.cli.expression import read_mask
from tilewise.cli.output import guarded, machine, say_json, table
from tilewise.cli.timing import Cell, Shape, measure
from tilewise.core.errors import InputError


class What(str, Enum):
    """What is timed."""

    forward = "forward"
    backward = "backward"
    both = "both"


@guarded
def bench(
    batch: shapes.Batch = 1,
    seqlen: Annotated[
        list[int] | None,
        typer.Option(
            "--seqlen",
            min=1,
            help="Queries and keys; give it again for more rows. Default: 512 1024 2048, on a GPU 1024 4096 16384.",
        ),
    ] = None,
    seqlen_k: shapes.SeqlenK = None,
    heads_q: shapes.HeadsQ = 8,
    heads_kv: shapes.HeadsKV = None,
    head_dim: shapes.HeadDim = 64,
    mask: shapes.MaskText = None,
    what: Annotated[What, typer.Option("--direction", help="What to time.")] = What.both,
    dtype: Annotated[shapes.Dtype | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    device: shapes.Device = None,
    impl: shapes.Impl = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on one cell of the table, about.", min=0.01)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the random tensors.")] = 0,
    as_json: shapes.Json = False,
) -> None:
    """Time tilewise.attention against torch.nn.functional.scaled_dot_product_attention, forward and backward.

    Median, 20th and 80th percentile of many calls after a warm-up; on a GPU by CUDA events with a cold L2 cache, on a
    CPU by the clock. TFLOP/s count visible pairs only (4 · pairs · head_dim forward, 2.5 times that backward). PyTorch
    gets a dense boolean mask wherever it has no flag for the mask. The last column is the largest difference of the two
    results. `tilewise bench neighbours` times what stands beside attention.

    Example: tilewise bench --seqlen 4096 --heads-q 16 --heads-kv 4 --mask "causal & window(512)"
    """
    where = shapes.device(device)
    gpu = where.type == "cuda"
    kind = dtype or (shapes.Dtype.bf16 if gpu else shapes.Dtype.fp32)
    formula = read_mask(mask, where)
    directions = [what.value] if what is not What.both else ["forward", "backward"]
    cells: list[Cell] = []
    for length in seqlen or ([1024, 4096, 16384] if gpu else [512, 1024, 2048]):
        shape = Shape(batch, length, seqlen_k or length, heads_q, heads_kv or heads_q, head_dim)
        generator = torch.Generator(where).manual_seed(seed)
        cells += measure(
            shape, formula, directions, dtype=kind.torch, device=where, impl=impl, seconds=seconds, generator=generator
        )
    if as_json:
        head = {
            "device": machine(where),
            "torch": torch.__version__,
            "dtype": kind.value,
            "mask": None if formula is None else repr(formula),
        }
        say_json({**head, "rows": [cell.as_dict() for cell in cells]})
        return
    columns = (
        "direction",
        "seqlen_q",
        "seqlen_k",
        "implementation",
        "p20 ms",
        "median ms",
        "p80 ms",
        "TFLOP/s",
        "vs torch",
        "max diff",
    )
    rows = [
        (
            cell.direction,
            str(cell.shape.seqlen_q),
            str(cell.shape.seqlen_k),
            cell.impl,
            *(f"{ms:.3f}" for ms in (cell.p20_ms, cell.p50_ms, cell.p80_ms)),
            f"{cell.tflops:.3f}" if cell.tflops < 10 else f"{cell.tflops:.0f}",
            f"{cell.speedup:.2f}×",
            "" if cell.difference is None else f"{cell.difference:.1e}",
        )
        for cell in cells
    ]
    heads = f"{heads_q} query heads" + (f", {heads_kv} key heads" if heads_kv else "")
    masked = "" if formula is None else f", mask {formula!r}"
    table(f"batch {batch}, {heads} of {head_dim}, {kind.value} on {where}{masked}", columns, rows, left=4)


def register(app: typer.Typer) -> None:
    """Add the command, which is attention's unless another follows, and those others."""
    app.callback(invoke_without_command=True)(_alone())
    app.command("neighbours")(neighbours.neighbours)


def _alone() -> Callable[..., None]:
    """`bench` with typer's context before its own parameters: nothing where a command follows, and InputError for
    options before that command, which would not hear of them.
    """

    @guarded
    @functools.wraps(bench)
    def run(context: typer.Context, **options: Any) -> None:
        following = context.invoked_subcommand
        if following is None:
            bench(**options)
            return
        for name in options:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                expected = f"options of {following} behind its name"
                hint = f"tilewise bench {following} --help lists them"
                raise InputError(f"bench {name}", got="an option of attention", expected=expected, hint=hint)

    own = inspect.signature(bench, eval_str=True)
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    run.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {"context": typer.Context} | {name: p.annotation for name, p in own.parameters.items()}
    return run
