"""Proof, before anything runs, that a formula's indices stay inside the tensors it captures."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from tilewise.core.errors import FormulaError
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr, render
from tilewise.formula.interval import Bounds, Extremum
from tilewise.formula.structure import Bound, parse

_ranges: weakref.WeakKeyDictionary[torch.Tensor, tuple[int, int, int]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=1024)
def _index_bounds(text: str) -> tuple[tuple[int, int, Expr, Expr | None, Expr | None, tuple[Extremum, ...]], ...]:
    """(slot, dimension, index, lowest, highest, extrema of the tensors whose values enter) for every index of every load."""
    result = []
    for node in parse(text).loads:
        for dim, index in enumerate(node.args):
            bounds = Bounds(whole_tensors=True)
            low, high = bounds.of(index)
            result.append((node.value, dim, index, low, high, tuple(bounds.tables)))
    return tuple(result)


def _value_range(tensor: torch.Tensor) -> tuple[int, int]:
    known = _ranges.get(tensor)
    if known is None or known[0] != tensor._version:
        low, high = torch.aminmax(tensor.detach()) if tensor.numel() else (torch.tensor(0), torch.tensor(0))
        known = _ranges[tensor] = (tensor._version, int(low), int(high))
    return known[1], known[2]


def check_indices(bound: Bound, what: str, sizes: tuple[int, int, int, int]) -> None:
    """Raise FormulaError if an index of `bound` can leave its tensor for `sizes` = (batch, heads, seqlen_q, seqlen_k).

    Where an index is itself read from a tensor, that tensor's values are looked at (once a version).
    """
    if not bound.tensors or not all(sizes):
        return
    value_ranges: list[tuple[int, int]] = []
    slots = {table.slot for *_, entering in _index_bounds(bound.text) for table in entering}
    for slot, tensor in enumerate(bound.tensors):
        readable = slot in slots and not torch.compiler.is_compiling()
        value_ranges.append(_value_range(tensor) if readable else (0, 0))
    if torch.compiler.is_compiling() and slots:
        return
    _check(bound.text, tuple(bound.numbers), tuple(t.shape for t in bound.tensors), tuple(value_ranges), what, sizes)


@functools.lru_cache(maxsize=4096)
def _check(
    text: str,
    numbers: tuple[Any, ...],
    shapes: tuple[torch.Size, ...],
    ranges: tuple[tuple[int, int], ...],
    what: str,
    sizes: tuple[int, int, int, int],
) -> None:
    batch, heads, seqlen_q, seqlen_k = sizes
    ends = {"i0": seqlen_k - seqlen_q, "i1": seqlen_k - 1, "j0": 0, "j1": seqlen_k - 1, "block_i": 1, "block_j": 1}
    for slot, dim, index, low, high, entering in _index_bounds(text):
        limit = shapes[slot][dim]
        reach = []
        for bound in (low, high):
            if bound is None:
                raise FormulaError(
                    f"{what}: index {dim} into captured tensor {slot}", got=f"{render(index)}, unbounded",
                    expected=f"0 to {limit - 1}", hint="clamp the index",
                )
            for b in (0, batch - 1):
                for h in (0, heads - 1):
                    symbols = {name: torch.tensor(value) for name, value in {**ends, "b": b, "h": h}.items()}
                    reach.append(_scalar(bound, symbols, numbers, ranges, entering))
        if min(reach) < 0 or max(reach) >= limit:
            raise FormulaError(
                f"{what}: index {dim} into captured tensor {slot} of shape {tuple(shapes[slot])}",
                got=f"{render(index)}, which reaches {min(reach)} to {max(reach)}",
                expected=f"0 to {limit - 1}",
                hint="clamp the index with .clamp(min, max), or capture a larger tensor; i counts from seqlen_k - seqlen_q",
            )


def _scalar(
    bound: Expr,
    symbols: dict[str, torch.Tensor],
    numbers: tuple[Any, ...],
    ranges: tuple[tuple[int, int], ...],
    entering: tuple[Extremum, ...],
) -> int:
    """Value of one bound; tables of captured values are replaced by the tensor's whole range."""
    tables = [torch.tensor(ranges[t.slot][t.kind == "max"]).reshape([1] * len(t.dims)) for t in entering]
    return int(evaluate([bound], symbols, (), numbers, torch.float64, tables)[0])
