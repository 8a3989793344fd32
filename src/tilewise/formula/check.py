"""Proof, before anything runs, that a formula's indices stay inside the tensors it captures, and that no integer is
divided by 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilewise.core.errors import FormulaError
from tilewise.core.readback import being_captured, being_traced, host_range
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr, as_expr
from tilewise.formula.interval import Bounds, Extremum
from tilewise.formula.structure import Bound, parse
from tilewise.formula.walk import postorder, render, transform


@functools.lru_cache(maxsize=1024)
def _index_bounds(text: str) -> tuple[tuple[int, int, Expr, Expr | None, Expr | None, tuple[Extremum, ...]], ...]:
    """For every index of every load: slot, dimension, index, lowest, highest, extrema of the tensors that enter."""
    result = []
    for node in parse(text).loads:
        for dim, index in enumerate(node.args):
            bounds = Bounds(whole_tensors=True)
            low, high = bounds.of(index)
            result.append((node.value, dim, index, low, high, tuple(bounds.tables)))
    return tuple(result)


@functools.lru_cache(maxsize=1024)
def _divisor_bounds(text: str) -> tuple[tuple[Expr, Expr | None, Expr | None, tuple[Extremum, ...]], ...]:
    """For every integer division by more than a number: divisor, lowest, highest, extrema of the tensors that enter."""
    result = []
    for node in postorder([parse(text).root]):
        if node.op in ("floordiv", "mod") and node.kind == "int" and node.args[1].op not in ("num", "lit"):
            bounds = Bounds(whole_tensors=True)
            low, high = bounds.of(node.args[1])
            result.append((node.args[1], low, high, tuple(bounds.tables)))
    return tuple(result)


def to_be_proved(bound: Bound | None) -> bool:
    """Whether a formula reads tensors or divides by what may be 0."""
    return bound is not None and (len(bound.tensors) > 0 or len(_divisor_bounds(bound.text)) > 0)


def prove(bound: Bound, what: str, sizes: tuple[int, int, int, int]) -> None:
    """Raise FormulaError if an index of `bound` can leave its tensor, or a divisor be 0, for `sizes` = (batch, heads,
    first i, seqlen_k).

    Where an index or a divisor is itself read from a tensor, and the tensor's type alone proves nothing, its values are
    read each time.
    """
    if being_traced() or provable(bound, sizes):
        return
    slots = _read_slots(bound.text)
    ranges = tuple(host_range(t) if slot in slots else (0, 0) for slot, t in enumerate(bound.tensors))
    if None not in ranges:
        _check(*_given(bound, ranges), what, sizes)
    elif being_captured(bound.tensors[0].device):
        raise FormulaError(
            what,
            got="an index or a divisor read from a captured tensor, while a CUDA graph is captured",
            expected="one that stays in range for any values at replay",
            hint="clamp it with .clamp(min, max)",
        )


def provable(bound: Bound, sizes: tuple[int, int, int, int]) -> bool:
    """Whether sizes and types alone prove it, whatever values captured tensors hold."""
    if not to_be_proved(bound):
        return True
    slots = _read_slots(bound.text)
    ranges = tuple(_range_of(t.dtype) if slot in slots else (0, 0) for slot, t in enumerate(bound.tensors))
    return None not in ranges and _holds(*_given(bound, ranges), "", sizes)


def _given(bound: Bound, ranges: tuple[Any, ...]) -> tuple[Any, ...]:
    return bound.text, tuple(bound.numbers), tuple(t.shape for t in bound.tensors), ranges


def _range_of(dtype: torch.dtype) -> tuple[int, int] | None:
    """The values that a type has; None for numbers with fractions."""
    if dtype == torch.bool:
        return (0, 1)
    if dtype.is_floating_point:
        return None
    limits = torch.iinfo(dtype)
    return (limits.min, limits.max)


@functools.lru_cache(maxsize=4096)
def _holds(*given: Any) -> bool:
    try:
        _check(*given)
    except FormulaError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _read_slots(text: str) -> frozenset[int]:
    """The tensors whose values decide over an index or a divisor."""
    of_indices = [table for *_, entering in _index_bounds(text) for table in entering]
    of_divisors = [table for *_, entering in _divisor_bounds(text) for table in entering]
    return frozenset(table.slot for table in of_indices + of_divisors)


def reads_values(text: str) -> bool:
    """Whether an index or a divisor is itself read from a tensor."""
    return len(_read_slots(text)) > 0


@functools.lru_cache(maxsize=4096)
def _check(
    text: str,
    numbers: tuple[Any, ...],
    shapes: tuple[torch.Size, ...],
    ranges: tuple[tuple[int, int], ...],
    what: str,
    sizes: tuple[int, int, int, int],
) -> None:
    batch, heads, first, seqlen_k = sizes
    ends = {"i0": first, "i1": seqlen_k - 1, "j0": 0, "j1": seqlen_k - 1, "block_i": 1, "block_j": 1}
    symbols = {name: torch.tensor(value, device="cpu") for name, value in ends.items()}
    # every b and h: an index need not be monotone in them
    symbols |= {"b": torch.arange(batch, device="cpu")[:, None], "h": torch.arange(heads, device="cpu")}
    for slot, dim, index, low, high, entering in _index_bounds(text):
        limit = shapes[slot][dim]
        shown = _shown(index, numbers)
        if low is None or high is None:
            raise FormulaError(
                f"{what}: index {dim} into captured tensor {slot}",
                got=f"{shown}, unbounded",
                expected=f"0 to {limit - 1}",
                hint="clamp the index",
            )
        reach = _reach(low, high, symbols, numbers, ranges, entering)
        if min(reach) < 0 or max(reach) >= limit:
            raise FormulaError(
                f"{what}: index {dim} into captured tensor {slot} of shape {tuple(shapes[slot])}",
                got=f"{shown}, which reaches {min(reach)} to {max(reach)}",
                expected=f"0 to {limit - 1}",
                hint="clamp the index with .clamp(min, max), or capture a larger tensor; "
                "i counts from seqlen_k - seqlen_q",
            )
    for divisor, low, high, entering in _divisor_bounds(text):
        reach = [0] if low is None or high is None else _reach(low, high, symbols, numbers, ranges, entering)
        if min(reach) <= 0 <= max(reach):
            raise FormulaError(
                f"{what}: divisor of // or %",
                got=f"{_shown(divisor, numbers)}, which may be 0",
                expected="an integer that is never 0",
                hint="clamp it with .clamp(min=1), also where the quotient is not used",
            )


def _shown(expr: Expr, numbers: tuple[Any, ...]) -> str:
    return render(transform(expr, lambda node, _: as_expr(numbers[node.value]) if node.op == "num" else None))


def _reach(low: Expr, high: Expr, *given: Any) -> list[int]:
    return [int(end) for bound in (low, high) for end in _values(bound, *given).aminmax()]


def _values(
    bound: Expr,
    symbols: dict[str, torch.Tensor],
    numbers: tuple[Any, ...],
    ranges: tuple[tuple[int, int], ...],
    entering: tuple[Extremum, ...],
) -> torch.Tensor:
    """One bound for every batch element and head; a table of captured values is the tensor's whole range."""
    ends = [ranges[t.slot][t.kind == "max"] for t in entering]
    tables = [torch.tensor(end, device="cpu").reshape([1] * len(t.dims)) for end, t in zip(ends, entering, strict=True)]
    return evaluate([bound], symbols, (), numbers, torch.float64, tables)[0]
