"""`tilewise bench neighbours`: what stands beside attention against PyTorch's own on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any

import torch
import typer

from tilewise.cli import shapes
from tilewise.cli.output import guarded, say_json, table
from tilewise.cli.timing import machine, repeat
from tilewise.explain.neighbours import NEIGHBOURS, Function, Neighbour, backward_of, forward_of, placed

DIRECTIONS = {"forward": forward_of, "backward": backward_of}
Operation = Enum("Operation", {name: name for name in NEIGHBOURS}, type=str)  # type: ignore[misc]


@dataclass(frozen=True)
class Cell:
    """One row of the table. `gbps` counts the fewest bytes, `of_copy` is its share of a copy, `speedup`
    eager PyTorch's median over this one's, `difference` the largest from PyTorch's result.
    """

    operation: str
    rows: int
    width: int
    direction: str
    impl: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    repeats: int
    gbps: float
    of_copy: float
    speedup: float
    difference: float | None


@guarded
def neighbours(
    operation: Annotated[
        list[Operation] | None, typer.Option("--operation", "-o", help="Which; give it again for more. Default: all.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows. Default: 1024, on a GPU 16384.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Numbers of a row; of rope, heads of 128.")] = 4096,
    classes: Annotated[
        int, typer.Option(min=1, help="Classes of cross_entropy, whose logits are as many numbers as the others.")
    ] = 131_072,
    dtype: Annotated[shapes.Dtype | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    device: shapes.Device = None,
    impl: shapes.Impl = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile of PyTorch's own as well.")] = False,
    seconds: Annotated[float, typer.Option(help="Time to spend on one cell of the table, about.", min=0.01)] = 0.5,
    as_json: shapes.Json = False,
) -> None:
    """Time norms, softmax, gated units, rotation and loss against PyTorch's own, forward and backward.

    Each of them is bound by memory, so GB/s count the bytes that it must move at least, what it reads once and what it
    writes once, beside what a plain copy moves here. Times as in `tilewise bench`.

    Example: tilewise bench neighbours --operation swiglu --operation rope --width 8192
    """
    where = shapes.device(device)
    gpu = where.type == "cuda"
    kind = dtype or (shapes.Dtype.bf16 if gpu else shapes.Dtype.fp32)
    rows = rows or (16_384 if gpu else 1024)
    names = [chosen.value for chosen in operation] if operation else list(NEIGHBOURS)
    copy = _copy_rate(where, seconds)
    cells: list[Cell] = []
    for name in names:
        shape = (rows, width) if name != "cross_entropy" else (max(1, rows * width // classes), classes)
        torch.manual_seed(0)
        cells += _measure(name, shape, kind.torch, where, impl, compiled, seconds, copy)
    if as_json:
        head = {"device": machine(where), "torch": torch.__version__, "dtype": kind.value, "copy_gbps": copy}
        say_json({**head, "rows": [asdict(cell) for cell in cells]})
        return
    columns = (
        "operation", "shape", "direction", "implementation", "p20 ms", "median ms", "p80 ms", "GB/s", "of a copy",
        "vs torch", "max diff",
    )  # fmt: skip
    lines = [
        (
            cell.operation, f"{cell.rows} × {cell.width}", cell.direction, cell.impl,
            *(f"{ms:.3f}" for ms in (cell.p20_ms, cell.p50_ms, cell.p80_ms)), f"{cell.gbps:,.0f}",
            f"{cell.of_copy:.0%}", f"{cell.speedup:.2f}×",
            "" if cell.difference is None else f"{cell.difference:.1e}",
        )
        for cell in cells
    ]  # fmt: skip
    table(f"{kind.value} on {where}, where a copy moves {copy:,.0f} GB/s", columns, lines, left=4)


def _copy_rate(where: torch.device, seconds: float) -> float:
    """GB/s of a copy of 2 GiB, on a CPU of 256 MiB, read and written."""
    source = torch.ones((2**31 if where.type == "cuda" else 2**28) // 4, device=where)
    target = torch.empty_like(source)
    times = repeat(lambda: target.copy_(source), where, seconds)
    return 2 * source.nbytes / times[len(times) // 2] / 1e6


def _measure(
    name: str, shape: tuple[int, int], dtype: torch.dtype, where: torch.device, impl: str | None, compiled: bool,
    seconds: float, copy: float,
) -> list[Cell]:  # fmt: skip
    neighbour = NEIGHBOURS[name]
    inputs = placed(neighbour.make(*shape), where, dtype)
    nbytes = inputs["x"].nbytes
    contenders = _contenders(neighbour, impl, compiled)
    cells = []
    for direction, made in DIRECTIONS.items():
        calls: dict[str, Callable[[], Any]] = {key: made(function, inputs) for key, function in contenders.items()}
        results = {key: [x.detach().float() for x in call()] for key, call in calls.items()}
        times = {key: repeat(call, where, seconds) for key, call in calls.items()}
        for key, ms in times.items():
            p20, p50, p80 = (ms[min(len(ms) - 1, int(share * len(ms)))] for share in (0.2, 0.5, 0.8))
            gbps = getattr(neighbour, direction) * nbytes / p50 / 1e6
            apart = max(float((a - b).abs().max()) for a, b in zip(results[key], results["torch"], strict=True))
            speedup = times["torch"][len(times["torch"]) // 2] / p50
            difference = None if key == "torch" else apart
            cells.append(
                Cell(name, *shape, direction, key, p20, p50, p80, len(ms), gbps, gbps / copy, speedup, difference)
            )
    return cells


def _contenders(neighbour: Neighbour, impl: str | None, compiled: bool) -> dict[str, Function]:
    """By name: ours, PyTorch's own, and that compiled."""
    found: dict[str, Function] = {
        "tilewise" if impl is None else f"tilewise.{impl}": lambda **inputs: neighbour.ours(**inputs, impl=impl),
        "torch": lambda **inputs: neighbour.plain(*inputs.values()),
    }
    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(neighbour.plain, dynamic=False)
        found["torch.compile"] = lambda **inputs: fused(*inputs.values())
    return found
