"""How the tiles of a mask are classified: derived once from its structure, whatever its numbers, tensors and sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewise.formula.expr import Expr
from tilewise.formula.interval import Bounds, Extremum
from tilewise.formula.optimize import first_forms
from tilewise.formula.span import Span, solve, span_bounds
from tilewise.formula.structure import Structure, parse, share
from tilewise.formula.walk import symbols


@dataclass(frozen=True)
class TileRule:
    """What a mask's structure says about tiles.

    `spans` is for masks whose visible keys are one run for every query, and whose visible queries are one run for every
    key: by the axis ('i' or 'j') whose positions a program owns, the ends of the other axis' run for a tile, over (b,
    h, i0, i1): first and last that any of its rows sees, first and last that all of them see. `rows` are the ends for a
    row, over (b, h, i), by the axes that have them, also of masks whose tiles want lists. `sure` and `maybe` are
    expressions over (b, h, i0, i1, j0, j1): the tile is FULL where `sure` holds, and EMPTY where `maybe` does not; they
    read the `tables`.
    """

    structure: Structure
    spans: dict[str, tuple[Expr, ...]] | None
    rows: dict[str, tuple[Expr, ...]]
    sure: Expr
    maybe: Expr
    tables: tuple[Extremum, ...]
    by_batch: bool
    by_head: bool


@functools.lru_cache(maxsize=1024)
def tile_rule(text: str) -> TileRule:
    """The rule of a mask with structure `text`."""
    structure = parse(text)
    bounds = Bounds()
    interval = bounds.of(first_forms(structure.root))
    assert interval.low is not None
    assert interval.high is not None
    sure, maybe = share(interval.low, interval.high)
    names = symbols(structure.root)
    runs = {owned: solve(structure.root, other) for owned, other in (("i", "j"), ("j", "i"))}
    rows = {owned: tuple(share(*run)) for owned, run in runs.items() if run is not None}
    return TileRule(structure, _spans(runs), rows, sure, maybe, tuple(bounds.tables), "b" in names, "h" in names)


def _spans(runs: Mapping[str, Span | None]) -> dict[str, tuple[Expr, ...]] | None:
    found = {}
    for owned, run in runs.items():
        ends = None if run is None else span_bounds(run)
        if ends is None:
            return None
        found[owned] = tuple(share(*ends))
    return found


def build_tables(
    tables: Sequence[Extremum], tensors: Sequence[torch.Tensor], block_i: int, block_j: int
) -> tuple[torch.Tensor, ...]:
    """Block minima and maxima of captured tensors, one for each entry of `tables`.

    No value is read on the host. A table has as many dimensions as its tensor: kept, blocked (ceil(n / block)) or
    reduced to 1.
    """
    done: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[torch.Tensor, torch.Tensor]] = {}
    result = []
    for table in tables:
        spec = tuple(
            ("keep", 0)
            if dim == "keep"
            else ("all", 0)
            if dim == "all"
            else ("block", block_i if dim == "i" else block_j)
            for dim in table.dims
        )
        key = (table.slot, spec)
        if key not in done:
            done[key] = _extrema(tensors[table.slot], spec)
        result.append(done[key][0 if table.kind == "min" else 1])
    return tuple(result)


def _extrema(tensor: torch.Tensor, spec: Sequence[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = tensor.detach()
    if all(mode == "keep" for mode, _ in spec):
        return values, values
    low = high = values.to(torch.uint8) if values.dtype == torch.bool else values
    for dim, (mode, block) in enumerate(spec):
        if mode == "all":
            low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
        elif mode == "block":
            shared = low is high
            low = _blocked(low, dim, block)
            high = low if shared else _blocked(high, dim, block)
            low, high = torch.aminmax(low, dim=dim + 1) if shared else (low.amin(dim + 1), high.amax(dim + 1))
    if values.dtype == torch.bool:
        return low.bool(), high.bool()
    return low, high


def _blocked(x: torch.Tensor, dim: int, block: int) -> torch.Tensor:
    """Split `dim` into (blocks, block), the last block filled up with its last element."""
    size = x.shape[dim]
    short = -size % block
    if short:
        moved = x.movedim(dim, -1)
        shape = moved.shape
        flat = moved.reshape(1, -1, size)
        filled = torch.cat([flat, flat[..., -1:].expand(*flat.shape[:-1], short)], -1)
        x = filled.reshape(*shape[:-1], size + short).movedim(-1, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])
