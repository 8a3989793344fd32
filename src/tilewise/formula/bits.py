"""Operations on the bits of 64-bit integers: what they give between two ends.

Negative numbers are in two's complement: as many bits as it takes for the largest x, or -1 - x of a negative one, say
how large a result can be.
"""

from __future__ import annotations

from tilewise.formula.expr import Expr, binary, bits, cast, compare, lit, logic, unary, where

Ends = tuple[Expr, Expr]
LEAST, MOST = -(2**63), 2**63 - 1


def bit_bounds(op: str, a: Ends, b: Ends) -> Ends:
    """Least and greatest of bitand, bitor, bitxor, shl or shr for operands between these ends."""
    if op == "shl":
        return _shifted_left(a, b)
    if op == "shr":
        return _shifted_right(a, b)
    (a_low, a_high), (b_low, b_high) = a, b
    zero, below = lit(0), lit(-1)
    a_not_below, b_not_below = compare("le", zero, a_low), compare("le", zero, b_low)
    a_below, b_below = compare("lt", a_high, zero), compare("lt", b_high, zero)
    neither, both = logic("and", a_not_below, b_not_below), logic("and", a_below, b_below)
    if op == "bitand":
        least = lit(2) * binary("max", binary("min", a_low, b_low), lit(-(2**62)))  # a power of 2 is between
        any_high = where(a_not_below, a_high, where(b_not_below, b_high, binary("max", a_high, b_high)))
        return (
            where(logic("or", a_not_below, b_not_below), zero, least),
            where(neither, binary("min", a_high, b_high), any_high),
        )
    if op == "bitor":
        any_low = where(a_below, a_low, where(b_below, b_low, binary("min", a_low, b_low)))
        top = _ones(binary("max", a_high, zero), binary("max", b_high, zero))
        return (
            where(logic("or", neither, both), binary("max", a_low, b_low), any_low),
            where(logic("or", a_below, b_below), below, top),
        )
    top = _ones(binary("max", a_high, below - a_low), binary("max", b_high, below - b_low))
    apart = logic("or", logic("and", a_not_below, b_below), logic("and", a_below, b_not_below))
    return where(logic("or", neither, both), zero, below - top), where(apart, below, top)


def _ones(a: Expr, b: Expr) -> Expr:
    """What a | b is at most, of numbers from 0 to these: their sum, or all ones below the highest."""
    top = bits("bitor", a, b)
    for by in (1, 2, 4, 8, 16, 32):
        top = bits("bitor", top, bits("shr", top, lit(by)))
    total = a + b  # below 0 where it does not fit
    return where(logic("and", compare("le", lit(0), total), compare("lt", total, top)), total, top)


def _shifted_left(a: Ends, b: Ends) -> Ends:
    far = binary("max", *(unary("abs", cast(end, float)) for end in a)) * unary("exp2", cast(b[1], float))
    fits = logic("and", compare("le", lit(0), b[0]), compare("lt", far, lit(2.0**62)))
    fits = logic("and", fits, compare("lt", b[1], lit(64)))
    ends = [bits("shl", x, y) for x in a for y in b]
    low, high = ends[0], ends[0]
    for end in ends[1:]:
        low, high = binary("min", low, end), binary("max", high, end)
    return where(fits, low, lit(LEAST)), where(fits, high, lit(MOST))


def _shifted_right(a: Ends, b: Ends) -> Ends:
    """Towards 0, or -1, the further the more; by less than nothing is all the way."""
    known = compare("le", lit(0), b[0])
    least = where(known, bits("shr", a[0], b[0]), a[0])
    most = where(known, bits("shr", a[1], b[0]), a[1])
    low = binary("min", least, where(known, bits("shr", a[0], b[1]), lit(-1)))
    high = binary("max", most, where(known, bits("shr", a[1], b[1]), lit(0)))
    return low, high
