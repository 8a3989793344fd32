"""`tilewise roofline`: the work, the traffic and the least time of an attention problem on a GPU."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from tilewise.cli import shapes
from tilewise.cli.output import guarded, say, say_json, table
from tilewise.core import device
from tilewise.core.errors import InputError
from tilewise.explain.roofline import Problem, Roofline, estimate


class Direction(str, Enum):
    """What is computed."""

    forward = "forward"
    backward = "backward"
    decode = "decode"


@guarded
def roofline(
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="A GPU of the table. Default: the one here, else H100-SXM."),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="List the GPUs of the table and stop.")] = False,
    direction: Annotated[Direction, typer.Option(help="Decode is a forward with few queries.")] = Direction.forward,
    batch: shapes.Batch = 1,
    seqlen_q: Annotated[
        int | None,
        typer.Option(min=1, help="Number of queries. Default: 4096, or 1 to decode.", rich_help_panel=shapes.SHAPE),
    ] = None,
    seqlen_k: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of keys. Default: as many as queries, or 4096 to decode.", rich_help_panel=shapes.SHAPE
        ),
    ] = None,
    heads_q: shapes.HeadsQ = 32,
    heads_kv: shapes.HeadsKV = None,
    head_dim: shapes.HeadDim = 128,
    causal: shapes.Causal = False,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Causal sliding window: keys a query sees.", rich_help_panel=shapes.FORMULA),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help=f"Type of the operands: {', '.join(device.ITEMSIZE)}.")
    ] = "bf16",
    measured: Annotated[
        float | None,
        typer.Option("--measured-ms", help="A time of yours in milliseconds: how close to the floor it comes."),
    ] = None,
    as_json: shapes.Json = False,
) -> None:
    """Print FLOPs, compulsory bytes, intensity, bound and floor time of a problem on a GPU.

    No kernel is faster than the floor: the larger of the work at the dense peak and the traffic at the memory's rate.

    Example: tilewise roofline --gpu H100-SXM --seqlen-q 8192 --heads-q 32 --heads-kv 8 --causal
    """
    if gpus:
        _list(as_json)
        return
    if measured is not None and not measured > 0:
        raise InputError(
            "--measured-ms", got=measured, expected="a time above 0", hint="in milliseconds; tilewise bench"
        )
    row = device.find(gpu) if gpu is not None else device.current() or device.find("H100-SXM")
    decode = direction is Direction.decode
    queries = seqlen_q or (1 if decode else 4096)
    problem = Problem(
        queries,
        seqlen_k or (4096 if decode else queries),
        batch,
        heads_q,
        heads_kv or heads_q,
        head_dim,
        head_dim,
        causal=causal or decode or window is not None,
        window=(window, None),
        dtype=dtype,
        direction=direction.value,
    )
    found = estimate(problem, row)
    seconds = None if measured is None else measured / 1e3
    if as_json:
        say_json(_data(problem, found, seconds))
        return
    say(str(found))
    if seconds is not None:
        say(f"{'measured':<24}{seconds * 1e6:,.2f} µs: {found.efficiency(seconds):.1%} of what is possible")


def _data(problem: Problem, found: Roofline, seconds: float | None) -> dict[str, object]:
    names = (
        "batch",
        "seqlen_q",
        "seqlen_k",
        "num_heads_q",
        "num_heads_kv",
        "head_dim",
        "head_dim_v",
        "dtype",
        "direction",
    )
    return {
        "gpu": found.gpu.name,
        "problem": {
            **{name: getattr(problem, name) for name in names},
            "causal": problem.causal,
            "window": problem.window,
        },
        "flops": found.flops,
        "bytes": found.bytes,
        "intensity": found.intensity,
        "ridge": found.gpu.ridge(problem.dtype),
        "bound": found.bound,
        "compute_seconds": found.compute_seconds,
        "memory_seconds": found.memory_seconds,
        "floor_seconds": found.floor_seconds,
        "attainable_flops": found.attainable,
        "measured_seconds": seconds,
        "efficiency": None if seconds is None else found.efficiency(seconds),
    }


def _list(as_json: bool) -> None:
    if as_json:
        keys = ("name", "num_sms", "memory_bytes", "memory_bandwidth", "source")
        say_json([{"architecture": row.architecture.name, **{k: getattr(row, k) for k in keys}} for row in device.GPUS])
        return
    rows = [
        (
            row.name,
            row.architecture.name,
            str(row.num_sms),
            f"{row.memory_bytes / 1e9:.0f}",
            f"{row.memory_bandwidth / 1e12:.2f}",
            *(
                "-" if (peak := getattr(row.peaks, kind)) is None else f"{peak / 1e12:,.0f}"
                for kind in ("bf16", "fp16", "fp8")
            ),
        )
        for row in device.GPUS
    ]
    columns = ("GPU", "architecture", "SMs", "GB", "TB/s", "bf16", "fp16", "fp8")
    table("dense peaks in TFLOP/s; sources: tilewise.core.device", columns, rows, left=2)
