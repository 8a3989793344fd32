"""How large a score can become, whatever the problem's scores are: plain numbers, where `interval` has expressions."""

from __future__ import annotations

import functools
import math
from typing import Any

from tilewise.formula.expr import Expr
from tilewise.formula.structure import Bound, parse
from tilewise.formula.walk import postorder

Range = tuple[float, float]
_ANY: Range = (-math.inf, math.inf)
MOST = 2.358e38  # times log2(e) still within float32: what a formula makes of a score counts as hidden below -MOST
_NEAR = 55.0  # its exponential and the reciprocal are within 2**-80 and 2**80: sums of many are no trouble in float32


def stays_near_zero(score: Bound | None) -> bool:
    """Whether a softmax of this score needs no maximum: no exponential of it overflows, nor do all of a row vanish."""
    return score is not None and largest_size(score.text, score.numbers) <= _NEAR


@functools.lru_cache(maxsize=4096)
def largest_size(text: str, numbers: tuple[Any, ...]) -> float:
    """The largest absolute value that a score can have (`softcap(30.0)`: 30), infinity where nothing limits it."""
    root = parse(text).root
    found: dict[int, Range] = {}
    for node in postorder([root]):
        low, high = _range(node, [found[id(arg)] for arg in node.args], numbers)
        found[id(node)] = _ANY if math.isnan(low) or math.isnan(high) else (low, high)
    return max(map(abs, found[id(root)]))


def _range(node: Expr, args: list[Range], numbers: tuple[Any, ...]) -> Range:
    if node.op in ("num", "lit"):
        value = float(numbers[node.value] if node.op == "num" else node.value)
        return value, value
    if node.op == "tanh":
        return -1.0, 1.0
    if node.op == "sigmoid":
        return 0.0, 1.0
    if node.op == "neg":
        return -args[0][1], -args[0][0]
    if node.op == "add":
        return args[0][0] + args[1][0], args[0][1] + args[1][1]
    if node.op == "sub":
        return args[0][0] - args[1][1], args[0][1] - args[1][0]
    if node.op == "mul" or (
        node.op == "div" and node.kind == "float" and 0.0 not in args[1] and args[1][0] == args[1][1]
    ):
        other = args[1] if node.op == "mul" else (1.0 / args[1][0],) * 2
        ends = [x * y for x in args[0] for y in other]
        return (min(ends), max(ends)) if not any(map(math.isnan, ends)) else _ANY
    return _ANY
