"""Masks whose visible keys are one run: solve the mask for j (or, for the backward pass, for i).

Integers beyond any position end somewhere there, and sums with positions are exact: neither wraps.

`solve(mask, "j")` gives two expressions over (b, h, i), the first and the last visible key, when every query sees one
contiguous run; None otherwise. Kernels then need no tile lists: `span_bounds` gives, for a whole tile of queries, the
run that any of them sees and the run that all of them see.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.formula.expr import Expr, binary, lit, negate, unary, where
from tilewise.formula.interval import Bounds
from tilewise.formula.reach import IN_64_BITS, INT64, reaches, within
from tilewise.formula.walk import postorder

FAR = 2**30  # beyond any position
_WIDE = (2**61, 2**62)  # where the one term of a sum that may be any integer ends
_MARGIN = 2**31  # by how much it is larger than the others together where it ends: more than any position


class Span(NamedTuple):
    """First and last visible position, inclusive; empty when first > last."""

    first: Expr
    last: Expr


def solve(mask: Expr, axis: str) -> Span | None:
    """The visible run along `axis` ('i' or 'j') in the other symbols, or None if it need not be one run."""
    return _Solver(mask, axis).run(mask, True)


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


def _unbounded(span: Span) -> tuple[bool, bool]:
    """Whether the run surely starts before, or ends after, every position."""
    return span.first.op == "lit" and span.first.value == -FAR, span.last.op == "lit" and span.last.value == FAR


class _Linear(NamedTuple):
    """coefficient * axis + rest, whose terms are within +-size together, but for one where it `ends` somewhere."""

    coefficient: int
    rest: Expr
    size: int
    ends: bool


class _Solver:
    """Solves conditions of one mask, each once, however many paths of the graph lead there."""

    def __init__(self, mask: Expr, axis: str) -> None:
        self._axis = axis
        self._reach = reaches([mask], IN_64_BITS)
        self._moving, self._placed = (_with(mask, names) for names in ((axis,), ("i", "j")))
        self._runs: dict[tuple[int, bool], Span | None] = {}
        self._forms: dict[tuple[int, int], _Linear | None] = {}

    def run(self, mask: Expr, holds: bool) -> Span | None:
        """Where a condition of the mask holds, or where it does not."""
        key = (id(mask), holds)
        if key not in self._runs:
            self._runs[key] = self._run(mask, holds)
        return self._runs[key]

    def _run(self, mask: Expr, holds: bool) -> Span | None:
        if id(mask) not in self._moving:
            seen = mask if holds else negate(mask)
            return Span(where(seen, lit(-FAR), lit(FAR)), where(seen, lit(FAR), lit(-FAR)))
        if mask.op == "not":
            return self.run(mask.args[0], not holds)
        if mask.op == "alike" and holds:
            return next((span for span in (self.run(arg, True) for arg in mask.args) if span is not None), None)
        if mask.op == ("and" if holds else "or"):
            a, b = (self.run(arg, holds) for arg in mask.args)
            return None if a is None or b is None else Span(_later(a.first, b.first), _earlier(a.last, b.last))
        if mask.op == ("or" if holds else "and"):
            return self._union(mask, holds)
        if mask.op in ("lt", "le"):
            left, right = mask.args if holds else mask.args[::-1]
            return self._comparison(left, right, (mask.op == "lt") is holds)
        return None

    def _union(self, mask: Expr, holds: bool) -> Span | None:
        for condition, other in (mask.args, mask.args[::-1]):
            if id(condition) not in self._moving:
                span, seen = self.run(other, holds), condition if holds else negate(condition)
                if span is None:
                    return None
                return Span(where(seen, lit(-FAR), span.first), where(seen, lit(FAR), span.last))
        a, b = (self.run(arg, holds) for arg in mask.args)
        if a is None or b is None:
            return None
        (a_left, a_right), (b_left, b_right) = _unbounded(a), _unbounded(b)
        if a_left and b_left:
            return Span(lit(-FAR), binary("max", a.last, b.last))
        if a_right and b_right:
            return Span(binary("min", a.first, b.first), lit(FAR))
        return None

    def _comparison(self, left: Expr, right: Expr, strictly: bool) -> Span | None:
        """Where left < right, or left <= right."""
        if left.kind != "int":
            return None
        found = (self._sum("sub", left, right, wide) for wide in _WIDE)
        difference = next((linear for linear in found if linear is not None), None)
        if difference is None or difference.coefficient == 0:
            return None
        strict, rest = lit(1 if strictly else 0), difference.rest
        if difference.coefficient > 0:  # x + rest <(=) 0
            return Span(lit(-FAR), unary("neg", rest) - strict)
        return Span(rest + strict, lit(FAR))

    def _sum(self, op: str, left: Expr, right: Expr, wide: int) -> _Linear | None:
        a, b = self._linear(left, wide), self._linear(right, wide)
        if a is None or b is None or (a.ends and b.ends):
            return None
        coefficient = a.coefficient + b.coefficient if op == "add" else a.coefficient - b.coefficient
        size, ends = a.size + b.size, a.ends or b.ends
        if abs(coefficient) > 1 or size + _MARGIN > (wide if ends else INT64[1]):
            return None
        return _Linear(coefficient, binary(op, a.rest, b.rest), size, ends)

    def _linear(self, expr: Expr, wide: int) -> _Linear | None:
        """Write an integer expression so, with a coefficient of -1, 0 or 1."""
        key = (id(expr), wide)
        if key not in self._forms:
            self._forms[key] = self._form(expr, wide)
        return self._forms[key]

    def _form(self, expr: Expr, wide: int) -> _Linear | None:
        low, high = self._reach[id(expr)]
        if id(expr) not in self._moving:
            if within((low, high), (-wide, wide)):
                return _Linear(0, expr, max(abs(low), abs(high)), False)
            # a sum with a position may wrap for some of them; its terms do not, of which one may be any integer
            if id(expr) not in self._placed or (low, high) != INT64 or expr.op not in ("add", "sub", "neg"):
                return _Linear(0, binary("max", binary("min", expr, lit(wide)), lit(-wide)), 0, True)
        if expr.op == "sym":
            return _Linear(1, lit(0), 0, False)
        if expr.op == "neg":
            inner = self._linear(expr.args[0], wide)
            return inner and inner._replace(coefficient=-inner.coefficient, rest=unary("neg", inner.rest))
        return self._sum(expr.op, expr.args[0], expr.args[1], wide) if expr.op in ("add", "sub") else None


def _with(root: Expr, names: tuple[str, ...]) -> set[int]:
    """The nodes, by their ids, that look at one of these symbols."""
    found: set[int] = set()
    for node in postorder([root]):
        if (node.op == "sym" and node.value in names) or any(id(arg) in found for arg in node.args):
            found.add(id(node))
    return found


def span_bounds(span: Span) -> list[Expr] | None:
    """[first any, last any, first all, last all] over a tile: what any row sees, and what every row sees.

    None where an end is read from a tensor along the tile, or is unbounded: such a mask needs tile lists.
    """
    bounds = Bounds()
    first, last = bounds.of(span.first), bounds.of(span.last)
    ends = [first.low, last.high, first.high, last.low]
    known = [end for end in ends if end is not None]
    return known if len(known) == 4 and not bounds.tables else None
