"""Interval arithmetic on formulas, done symbolically.

`Bounds.of` turns an expression over (b, h, i, j) into two expressions over (b, h, i0, i1, j0, j1): the least and the
greatest value it can take while i runs over [i0, i1] and j over [j0, j1]. For a mask, the lower one says "visible
everywhere" (FULL) and the negated upper one "visible nowhere" (EMPTY). Being expressions themselves they are evaluated
by PyTorch or emitted into a kernel like any other formula. Sound by construction: every rule may widen, none may
narrow (float rules that round widen by `_WIDEN`, since kernels round differently). Where an integer may leave 64 bits
somewhere in the tile, and wrap, it may be any (`overflow`). Where a float value may be NaN somewhere in the tile, an
end is NaN or missing, and such a comparison is undecided.

A captured tensor enters through tables of minima and maxima (`Extremum`), which `Bounds.tables` lists and the caller
builds. A dimension indexed by i or j, plus or minus something exact, is reduced in blocks of `block_i` or `block_j`
elements (a tile then meets two at most); one whose index moves in another way is read at the index's two ends where
they are neighbours, and reduced as a whole where not (a boolean one counts as both then). Where values never fall along
an index (`expr.rising`) those at its ends are the extrema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.formula.bits import LEAST, MOST, bit_bounds
from tilewise.formula.expr import FALSE, TRUE, Expr, binary, cast, compare, lit, logic, negate, sym, unary, where
from tilewise.formula.overflow import WRAPPING, fits
from tilewise.formula.reach import IN_64_BITS, INT64, Range, reach, within, wrapped
from tilewise.formula.walk import postorder

_WIDEN = 2.0**-18  # slack of float bounds, relative and absolute: far above float32 rounding, too little to matter


class Interval(NamedTuple):
    """Least and greatest value; None is unbounded. `low is high` marks an exact value."""

    low: Expr | None
    high: Expr | None

    @property
    def exact(self) -> bool:
        return self.low is not None and self.low is self.high


@dataclass(frozen=True)
class Extremum:
    """A table of minima or maxima of captured tensor `slot`: a dimension is kept, blocked along i or j, or reduced."""

    slot: int
    kind: str  # "min" or "max"
    dims: tuple[str, ...]  # "keep", "i", "j" or "all"


class Bounds:
    """Builds interval expressions and collects the extremum tables they read.

    With `whole_tensors` every captured value counts as anything between its tensor's minimum and maximum.
    """

    def __init__(self, *, whole_tensors: bool = False) -> None:
        self.tables: list[Extremum] = []
        self._whole_tensors = whole_tensors
        self._done: dict[int, Interval] = {}
        self._reach: dict[int, Range] = {}

    def of(self, root: Expr) -> Interval:
        for node in postorder([root]):
            if id(node) not in self._done:
                wraps = node.kind == "int" and self._may_wrap(node)
                self._done[id(node)] = self._rule(node, [self._done[id(a)] for a in node.args], wraps)
        return self._done[id(root)]

    def _may_wrap(self, node: Expr) -> bool:
        """Whether an integer may leave 64 bits, by what its operands can be at all."""
        values = reach(node, [self._reach.get(id(arg), (0, 1)) for arg in node.args], IN_64_BITS)
        self._reach[id(node)] = wrapped(values)
        if node.op == "to_int":
            return node.args[0].kind == "float"
        return node.op in WRAPPING and not within(values, INT64)

    def _rule(self, node: Expr, args: list[Interval], wraps: bool) -> Interval:
        if node.op == "sym":
            if node.value in ("i", "j"):
                return Interval(sym(node.value + "0"), sym(node.value + "1"))
            return Interval(node, node) if node.value != "s" else Interval(None, None)
        if node.op in ("num", "lit"):
            return Interval(node, node)
        if node.op == "rising":
            return args[0]
        if node.op == "load":
            return self._load(node, args)
        if all(a.exact for a in args):
            exact = Expr(node.op, tuple(_low(a) for a in args), node.kind, node.value)
            return Interval(exact, exact)
        result = _apply(node, args)
        if wraps:
            return _unless_wrapped(node.op, args, result)
        if node.kind != "float" or node.op in _EXACT_FLOAT:
            return result
        return _widen(result, node.op in _NAN_OF_INFINITY)

    def _load(self, node: Expr, indices: list[Interval]) -> Interval:
        if self._whole_tensors:
            nowhere = [[lit(0)] for _ in indices]
            return Interval(*(self._extreme(node, ["all"] * len(indices), nowhere, kind) for kind in ("min", "max")))
        if all(index.exact for index in indices):
            return Interval(node, node)
        if all(index.exact or arg.op == "rising" for arg, index in zip(node.args, indices, strict=True)):
            kept = ["keep"] * len(indices)
            first, last = ([[_low(index) if at == 0 else _high(index)] for index in indices] for at in (0, 1))
            return Interval(self._extreme(node, kept, first, "min"), self._extreme(node, kept, last, "max"))
        dims: list[str] = []
        choices: list[list[Expr]] = []
        narrow = TRUE  # whether every other moving index takes at most two neighbouring values over the tile
        for position, index in enumerate(indices):
            axis = None if index.exact else _moves_with(node.args[position])
            if index.exact:
                dims.append("keep")
                choices.append([_low(index)])
            elif index.low is None or index.high is None:
                dims.append("all")
                choices.append([lit(0)])
            elif axis is not None:
                block = sym("block_" + axis)
                dims.append(axis)
                choices.append([index.low // block, index.high // block])
            else:
                dims.append("ends")
                choices.append([index.low, index.high])
                narrow = logic("and", narrow, compare("le", index.high, index.low + lit(1)))
        kept = ["keep" if dim == "ends" else dim for dim in dims]
        close = Interval(*(self._extreme(node, kept, choices, kind) for kind in ("min", "max")))
        if "ends" not in dims:
            return close
        if node.kind == "bool":  # over many entries it is nearly always both
            return Interval(where(narrow, close.low, FALSE), where(narrow, close.high, TRUE))
        whole = ["all" if dim == "ends" else dim for dim in dims]
        anywhere = [[lit(0)] if dim == "ends" else choice for dim, choice in zip(dims, choices, strict=True)]
        wide = [self._extreme(node, whole, anywhere, kind) for kind in ("min", "max")]
        return Interval(where(narrow, close.low, wide[0]), where(narrow, close.high, wide[1]))

    def _extreme(self, node: Expr, dims: list[str], choices: list[list[Expr]], kind: str) -> Expr:
        alone = not self._whole_tensors and set(dims) <= {"keep"}  # such an entry is both
        table = Extremum(node.value, "min" if alone else kind, tuple(dims))
        if table not in self.tables:
            self.tables.append(table)
        slot = self.tables.index(table)
        combos: list[tuple[Expr, ...]] = [()]
        for options in choices:
            combos = [(*combo, option) for combo in combos for option in options]
        result: Expr | None = None
        for combo in combos:
            value: Expr = Expr("table", combo, node.kind, slot)
            if result is None:
                result = value
            elif node.kind == "bool":
                result = logic("and" if kind == "min" else "or", result, value)
            else:
                result = binary(kind, result, value)
        assert result is not None
        return result


_EXACT_FLOAT = ("neg", "abs", "min", "max", "where", "to_float", "floor", "load")
_NAN_OF_INFINITY = ("add", "sub", "mul", "div", "floordiv", "mod", "sin", "cos")  # inf - inf, 0 * inf, 1 / 0 % 1, ...


def _low(interval: Interval) -> Expr:
    assert interval.low is not None
    return interval.low


def _high(interval: Interval) -> Expr:
    assert interval.high is not None
    return interval.high


def _moves_with(index: Expr) -> str | None:
    """'i' or 'j' if the index is that position plus or minus something exact: it spans one tile's width at most."""
    if index.op == "sym" and index.value in ("i", "j"):
        return str(index.value)
    if index.op in ("add", "sub"):
        a, b = index.args
        if not _has_position(b):
            return _moves_with(a)
        if index.op == "add" and not _has_position(a):
            return _moves_with(b)
    return None


def _has_position(expr: Expr) -> bool:
    return any(node.op == "sym" and node.value in ("i", "j", "s") for node in postorder([expr]))


def _widen(x: Interval, infinite_is_nan: bool) -> Interval:
    if x.low is None or x.high is None:
        return Interval(None, None)
    slack = lit(_WIDEN)
    low = x.low - unary("abs", x.low) * slack - slack
    high = x.high + unary("abs", x.high) * slack + slack
    if infinite_is_nan:  # each end is poisoned by the other; an end that is finite adds 0
        low, high = low + (x.high - x.high), high + (x.low - x.low)
    return Interval(low, high)


def _unless_wrapped(op: str, args: list[Interval], result: Interval) -> Interval:
    """What was found where no integer between the ends wraps; any where one may."""
    ends = [(arg.low, arg.high) for arg in args]
    if any(end is None for pair in (*ends, result) for end in pair):
        return Interval(None, None)
    fit = fits(op, ends[0], ends[-1])  # type: ignore[arg-type]
    return Interval(where(fit, result.low, lit(LEAST)), where(fit, result.high, lit(MOST)))


def _hull(values: list[Expr]) -> Interval:
    low, high = values[0], values[0]
    for value in values[1:]:
        low, high = binary("min", low, value), binary("max", high, value)
    return Interval(low, high)


def _lt(a: Interval, b: Interval, strict: str, negated: str, kind: str) -> Interval:
    """Bounds of a < b (strict='lt', negated='le') or a <= b (strict='le', negated='lt'); NaN bounds stay undecided."""
    sure = compare(strict, a.high, b.low) if a.high is not None and b.low is not None else FALSE
    for end in (a.low, b.high) if kind == "float" else ():
        sure = FALSE if end is None else logic("and", sure, compare("eq", end, end))
    maybe = negate(compare(negated, b.high, a.low)) if a.low is not None and b.high is not None else TRUE
    return Interval(sure, maybe)


def _equal(a: Interval, b: Interval, kind: str) -> Interval:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        first, second = _lt(a, b, "le", "lt", kind), _lt(b, a, "le", "lt", kind)
        return Interval(FALSE, logic("and", first.high, second.high))
    if a.low is not None and a.low.kind == "bool":
        same = logic("and", compare("eq", a.low, a.high), compare("eq", b.low, b.high))
        return Interval(
            logic("and", same, compare("eq", a.low, b.low)), negate(logic("and", same, compare("ne", a.low, b.low)))
        )
    point = TRUE  # an exact side that is NaN is equal to nothing anyway
    for side in (a, b):
        point = point if side.exact else logic("and", point, compare("eq", side.low, side.high))
    apart = logic("or", compare("lt", a.high, b.low), compare("lt", b.high, a.low))
    return Interval(logic("and", point, compare("eq", a.low, b.low)), negate(apart))


def _apply(node: Expr, args: list[Interval]) -> Interval:
    op = node.op
    if op in ("and", "or"):
        return Interval(logic(op, args[0].low, args[1].low), logic(op, args[0].high, args[1].high))
    if op == "not":
        assert args[0].low is not None
        assert args[0].high is not None
        return Interval(negate(args[0].high), negate(args[0].low))
    if op == "lt":
        return _lt(args[0], args[1], "lt", "le", node.args[0].kind)
    if op == "le":
        return _lt(args[0], args[1], "le", "lt", node.args[0].kind)
    if op in ("eq", "ne"):
        equal = _equal(args[0], args[1], node.args[0].kind)
        assert equal.low is not None
        assert equal.high is not None
        return equal if op == "eq" else Interval(negate(equal.high), negate(equal.low))
    if op == "where":
        return _where(args)
    if op.startswith("to_"):
        return _cast(node, args[0])
    return _arithmetic(op, args, node.kind)


def _where(args: list[Interval]) -> Interval:
    c, a, b = args
    assert c.low is not None
    assert c.high is not None
    if _is_bool(a):
        both = Interval(logic("and", a.low, b.low), logic("or", a.high, b.high))
    else:
        low = binary("min", a.low, b.low) if a.low is not None and b.low is not None else None
        high = binary("max", a.high, b.high) if a.high is not None and b.high is not None else None
        both = Interval(low, high)

    def pick(x: Expr | None, y: Expr | None, hull: Expr | None) -> Expr | None:
        if hull is None or x is None or y is None:
            return None
        return where(c.low, x, where(c.high, hull, y))

    return Interval(pick(a.low, b.low, both.low), pick(a.high, b.high, both.high))


def _is_bool(interval: Interval) -> bool:
    """Whether an interval is over booleans."""
    return interval.low is not None and interval.low.kind == "bool"


def _cast(node: Expr, x: Interval) -> Interval:
    if node.kind == "bool":  # nonzero
        zero = _equal(x, Interval(lit(0), lit(0)), node.args[0].kind)
        assert zero.low is not None
        assert zero.high is not None
        return Interval(negate(zero.high), negate(zero.low))
    to = torch.int64 if node.kind == "int" else torch.float32
    return Interval(None if x.low is None else cast(x.low, to), None if x.high is None else cast(x.high, to))


def _arithmetic(op: str, args: list[Interval], kind: str) -> Interval:
    a = args[0]
    b = args[1] if len(args) > 1 else a
    if op == "add":
        return Interval(_both(op, a.low, b.low), _both(op, a.high, b.high))
    if op == "sub":
        return Interval(_both(op, a.low, b.high), _both(op, a.high, b.low))
    if op == "neg":
        return Interval(
            None if a.high is None else unary("neg", a.high), None if a.low is None else unary("neg", a.low)
        )
    if kind == "float" and any(end is None for end in (*a, *b)):  # what is not known may be NaN
        return Interval(None, None)
    if op == "min":
        high = (
            _both(op, a.high, b.high)
            if a.high is not None and b.high is not None
            else (b.high if a.high is None else a.high)
        )
        return Interval(_both(op, a.low, b.low), high)
    if op == "max":
        low = (
            _both(op, a.low, b.low) if a.low is not None and b.low is not None else (b.low if a.low is None else a.low)
        )
        return Interval(low, _both(op, a.high, b.high))
    if op == "abs":
        return _abs(a)
    if op in ("tanh", "sigmoid", "exp", "exp2", "floor", "sqrt", "log", "log2"):
        return Interval(None if a.low is None else unary(op, a.low), None if a.high is None else unary(op, a.high))
    if op in ("sin", "cos"):
        assert a.low is not None
        assert a.high is not None
        nothing = (a.low - a.low) + (a.high - a.high)  # 0, or NaN where an end is infinite
        return Interval(nothing - lit(1.0), nothing + lit(1.0))
    if op in ("mul", "div", "floordiv"):
        return _scaled(op, a, b)
    if op in ("bitand", "bitor", "bitxor", "shl", "shr"):
        if any(end is None for end in (*a, *b)):
            return Interval(None, None)
        return Interval(*bit_bounds(op, (_low(a), _high(a)), (_low(b), _high(b))))
    if op == "mod" and b.exact and a.low is not None and a.high is not None:
        return _mod(a.low, a.high, _low(b))
    return Interval(None, None)


def _both(op: str, x: Expr | None, y: Expr | None) -> Expr | None:
    return None if x is None or y is None else binary(op, x, y)


def _abs(a: Interval) -> Interval:
    if a.low is None or a.high is None:
        return Interval(lit(0), None)
    zero = lit(0) if a.low.kind == "int" else lit(0.0)
    low = binary("max", zero, binary("max", a.low, unary("neg", a.high)))
    return Interval(low, binary("max", unary("abs", a.low), unary("abs", a.high)))


def _scaled(op: str, a: Interval, b: Interval) -> Interval:
    """mul, div, floordiv: monotone in each operand, so extremes are at corners (division only by exact values)."""
    ends = [a.low, a.high, b.low, b.high]
    if any(end is None for end in ends) or (op != "mul" and not b.exact):
        return Interval(None, None)
    lefts = [a.low] if a.exact else [a.low, a.high]
    rights = [b.low] if b.exact else [b.low, b.high]
    return _hull([binary(op, x, y) for x in lefts for y in rights])


def _mod(low: Expr, high: Expr, modulus: Expr) -> Interval:
    if modulus.kind == "float":
        nothing = (low % modulus - low % modulus) + (high % modulus - high % modulus)  # 0, or NaN
        zero = lit(0.0)
        return Interval(binary("min", zero, modulus) + nothing, binary("max", zero, modulus) + nothing)
    same = compare("eq", low // modulus, high // modulus)
    return Interval(
        where(same, low % modulus, binary("min", lit(0), modulus + lit(1))),
        where(same, high % modulus, binary("max", lit(0), modulus - lit(1))),
    )
