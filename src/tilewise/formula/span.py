"""Masks whose visible keys are one run: solve the mask for j (or, for the backward pass, for i).

`solve(mask, "j")` gives two expressions over (b, h, i), the first and the last visible key, when every query sees one
contiguous run; None otherwise. Kernels then need no tile lists: `span_bounds` gives, for a whole tile of queries, the
run that any of them sees and the run that all of them see.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.formula.expr import Expr, binary, lit, negate, unary, where
from tilewise.formula.interval import Bounds
from tilewise.formula.walk import reads, symbols

FAR = 2**30  # beyond any position
_WIDE = 2**61  # sums of a few such are within 64 bits


class Span(NamedTuple):
    """First and last visible position, inclusive; empty when first > last."""

    first: Expr
    last: Expr


def solve(mask: Expr, axis: str) -> Span | None:
    """The visible run along `axis` ('i' or 'j') in the other symbols, or None if it need not be one run."""
    if axis not in symbols(mask):
        return Span(where(mask, lit(-FAR), lit(FAR)), where(mask, lit(FAR), lit(-FAR)))
    if mask.op == "and":
        spans = [solve(arg, axis) for arg in mask.args]
        if spans[0] is None or spans[1] is None:
            return None
        return Span(_later(spans[0].first, spans[1].first), _earlier(spans[0].last, spans[1].last))
    if mask.op == "alike":
        return next((span for span in (solve(arg, axis) for arg in mask.args) if span is not None), None)
    if mask.op == "or":
        return _union(mask, axis)
    if mask.op == "not":
        return _complement(mask.args[0], axis)
    if mask.op in ("lt", "le"):
        return _comparison(mask, axis)
    return None


def _later(a: Expr, b: Expr) -> Expr:
    """The larger of two ends, where the lowest end leaves the other as it is."""
    for x, y in ((a, b), (b, a)):
        if x.op == "lit" and x.value == -FAR:
            return y
    return binary("max", a, b)


def _earlier(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if x.op == "lit" and x.value == FAR:
            return y
    return binary("min", a, b)


def _complement(inner: Expr, axis: str) -> Span | None:
    if inner.op in ("lt", "le"):
        return solve(Expr("le" if inner.op == "lt" else "lt", (inner.args[1], inner.args[0]), "bool"), axis)
    if inner.op in ("and", "or"):
        flipped = Expr("or" if inner.op == "and" else "and", tuple(negate(a) for a in inner.args), "bool")
        return solve(flipped, axis)
    return None


def _unbounded(span: Span) -> tuple[bool, bool]:
    """Whether the run surely starts before, or ends after, every position."""
    return span.first.op == "lit" and span.first.value == -FAR, span.last.op == "lit" and span.last.value == FAR


def _union(mask: Expr, axis: str) -> Span | None:
    for condition, other in (mask.args, mask.args[::-1]):
        if axis not in symbols(condition):
            span = solve(other, axis)
            if span is None:
                return None
            return Span(where(condition, lit(-FAR), span.first), where(condition, lit(FAR), span.last))
    a, b = solve(mask.args[0], axis), solve(mask.args[1], axis)
    if a is None or b is None:
        return None
    (a_left, a_right), (b_left, b_right) = _unbounded(a), _unbounded(b)
    if a_left and b_left:
        return Span(lit(-FAR), binary("max", a.last, b.last))
    if a_right and b_right:
        return Span(binary("min", a.first, b.first), lit(FAR))
    return None


def _linear(expr: Expr, axis: str) -> tuple[int, Expr] | None:
    """Write an integer expression as coefficient * axis + rest, with coefficient -1, 0 or 1."""
    if axis not in symbols(expr):
        return 0, _summable(expr)
    if expr.op == "sym":
        return 1, lit(0)
    if expr.op == "neg":
        inner = _linear(expr.args[0], axis)
        return None if inner is None else (-inner[0], unary("neg", inner[1]))
    if expr.op in ("add", "sub"):
        a, b = _linear(expr.args[0], axis), _linear(expr.args[1], axis)
        if a is None or b is None:
            return None
        coefficient = a[0] + b[0] if expr.op == "add" else a[0] - b[0]
        return (coefficient, binary(expr.op, a[1], b[1])) if abs(coefficient) <= 1 else None
    return None


def _summable(expr: Expr) -> Expr:
    """An integer whose sums with positions stay within 64 bits: tensors hold any ("no limit": the largest there is)."""
    return binary("max", binary("min", expr, lit(_WIDE)), lit(-_WIDE)) if reads(expr) else expr


def _comparison(mask: Expr, axis: str) -> Span | None:
    left, right = mask.args
    if left.kind != "int":
        return None
    difference = _linear(binary("sub", left, right), axis)
    if difference is None or difference[0] == 0:
        return None
    coefficient, rest = difference
    strict = lit(1 if mask.op == "lt" else 0)
    if coefficient > 0:  # x + rest <(=) 0
        return Span(lit(-FAR), unary("neg", rest) - strict)
    return Span(rest + strict, lit(FAR))


def span_bounds(span: Span) -> list[Expr] | None:
    """[first any, last any, first all, last all] over a tile: what any row sees, and what every row sees.

    None where an end is read from a tensor along the tile, or is unbounded: such a mask needs tile lists.
    """
    bounds = Bounds()
    first, last = bounds.of(span.first), bounds.of(span.last)
    ends = [first.low, last.high, first.high, last.low]
    known = [end for end in ends if end is not None]
    return known if len(known) == 4 and not bounds.tables else None
