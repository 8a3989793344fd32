"""Whether an operation on integers fits into 64 bits everywhere between the ends of its operands.

Integers wrap there, as PyTorch's do: where one can, its ends say nothing of what lies between.
"""

from __future__ import annotations

import functools

from tilewise.formula.bits import LEAST
from tilewise.formula.expr import TRUE, Expr, binary, cast, compare, lit, logic, unary

Ends = tuple[Expr, Expr]
WRAPPING = ("add", "sub", "neg", "abs", "floordiv", "mul")


def fits(op: str, a: Ends, b: Ends) -> Expr:
    """A condition over the ends of an operation's operands (of one operand, twice)."""
    if op in ("add", "sub"):
        pairs = zip(a, b if op == "add" else b[::-1], strict=True)
        return functools.reduce(lambda seen, pair: logic("and", seen, _sums(op, *pair)), pairs, TRUE)
    if op in ("neg", "abs", "floordiv"):  # the least number has no counterpart
        return compare("ne", a[0], lit(LEAST))
    if op == "mul":
        return compare("lt", _far(a) * _far(b), lit(2.0**62))
    if op == "to_int":  # of a float, which may be NaN
        return logic("and", compare("le", lit(-(2.0**62)), a[0]), compare("le", a[1], lit(2.0**62)))
    raise AssertionError(f"no rule for {op}, which may leave 64 bits")


def _sums(op: str, x: Expr, y: Expr) -> Expr:
    """Whether x + y, or x - y, is on the side of x that y says."""
    result = binary(op, x, y)
    fell = compare("lt", result, x) if op == "add" else compare("lt", x, result)
    return compare("eq", fell, compare("lt", y, lit(0)))


def _far(ends: Ends) -> Expr:
    return binary("max", *(unary("abs", cast(end, float)) for end in ends))
