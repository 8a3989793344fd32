"""How far integers of a formula can be from 0, whatever positions, numbers and tensors it meets: plain Python integers,
where `interval` has expressions. Emitted code takes 32 bits where these bounds say that they hold the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise.formula.expr import Expr
from tilewise.formula.walk import postorder

Range = tuple[int, int]
POSITION = 2**29 - 1  # of a token, and one for each element of a batch or head
INT32: Range = (-(2**31), 2**31 - 1)
INT64: Range = (-(2**63), 2**63 - 1)


class Limits(NamedTuple):
    """What leaves can be: a position, a number of a formula, an entry of a captured tensor."""

    position: int
    number: int
    captured: Range


IN_64_BITS = Limits(POSITION, 2**61, INT64)
NARROW = Limits(POSITION, 2**29, INT32)
"""Of what kernels hold in 32 bits: a larger number travels in 64 (`emit.encoded`), which all that meets it is then."""


def reaches(roots: Sequence[Expr], limits: Limits) -> dict[int, Range]:
    """Least and greatest value of each integer node, by its id, in 64 bits, which wrap; leaves as `limits` says."""
    found: dict[int, Range] = {}
    for node in postorder(roots):
        if node.kind == "int":
            found[id(node)] = wrapped(reach(node, [found.get(id(arg), (0, 1)) for arg in node.args], limits))
    return found


def reach(node: Expr, args: Sequence[Range], limits: Limits) -> Range:
    """That of one integer node whose operands reach so far, as if integers had no end."""
    op = node.op
    if op == "sym":
        return _of_symbol(node, limits)
    if op == "lit":
        return node.value, node.value
    if op == "num":
        return -limits.number, limits.number - 1
    if op in ("load", "table"):
        return limits.captured
    if op == "to_int":
        return (0, 1) if node.args[0].kind == "bool" else INT64
    if op == "rising":
        return args[0]
    if op == "where":
        return min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
    if len(args) == 1:
        (low, high) = args[0]
        far = max(abs(low), abs(high))
        return (-high, -low) if op == "neg" else (0 if low <= 0 <= high else min(abs(low), abs(high)), far)
    return _of_two(op, *args)


def _of_symbol(node: Expr, limits: Limits) -> Range:
    if isinstance(node, Once):
        return reaches([node.stands_for], limits)[id(node.stands_for)]
    return (-limits.position if str(node.value).startswith("i") else 0), limits.position


def _of_two(op: str, a: Range, b: Range) -> Range:
    if op == "add":
        return a[0] + b[0], a[1] + b[1]
    if op == "sub":
        return a[0] - b[1], a[1] - b[0]
    if op in ("min", "max"):
        of = min if op == "min" else max
        return of(a[0], b[0]), of(a[1], b[1])
    if op == "mul":
        ends = [x * y for x in a for y in b]
        return min(ends), max(ends)
    if op == "mod":  # of the divisor's sign, and nearer to 0 than it
        return min(b[0] + 1, 0), max(b[1] - 1, 0)
    if op == "floordiv":
        return (-max(a[1], -a[0], 0), max(a[1], -a[0])) if b[0] < 0 else (min(a[0], 0), max(a[1], 0))
    if op == "shr":
        return min(a[0], -1 if a[0] < 0 else 0), max(a[1], 0)
    if op == "shl":
        return INT64
    bits = max(*(-end - 1 for end in (*a, *b)), *a, *b).bit_length()
    if min(a[0], b[0]) >= 0 or (op == "bitand" and max(a[0], b[0]) >= 0):
        return 0, 2**bits - 1
    return -(2 ** (bits + 1)), 2**bits - 1  # of `bits.bit_bounds`, whose least is one bit lower


def wrapped(values: Range) -> Range:
    """What 64 bits make of integers that reach so far: any, where one wraps."""
    return values if within(values, INT64) else INT64


def within(values: Range, bits: Range) -> bool:
    """Whether integers of so many bits hold all of them."""
    return bits[0] <= values[0] and values[1] <= bits[1]


class Once(Expr):
    """A symbol for what a program computes once (`optimize.hoist`)."""

    stands_for: Expr

    @staticmethod
    def of(node: Expr, name: str) -> Once:
        """The symbol of this name."""
        symbol = Once("sym", (), node.kind, name)
        symbol.stands_for = node
        return symbol
