"""Masks that cut no tile: all pairs of a tile are seen, or none is. Known from a mask's structure and its numbers."""

from __future__ import annotations

import functools
from typing import Any

from tilewise.formula.expr import Expr
from tilewise.formula.optimize import first_forms
from tilewise.formula.structure import parse
from tilewise.formula.walk import postorder

TILE = 128  # queries and keys of a tile, which begins at a multiple of that; smaller ones that divide it lie in one
_KNOWN = {
    "sym", "num", "lit", "load", "add", "sub", "mul", "floordiv", "mod", "neg", "abs", "min", "max", "where",
    "lt", "le", "eq", "ne", "and", "or", "not",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def is_whole_in_tiles(text: str, numbers: tuple[Any, ...], shift: int) -> bool:
    """Whether a mask is the same for all pairs of a tile, where the first query has position `shift`, and its bounds
    (`formula.interval.Bounds`) say so: positions are divided by multiples of a tile's size, or compared with them,
    before anything else is done, and all is done in integers, whose bounds are then exact.
    """
    nodes = postorder([first_forms(parse(text).root)])
    constant: dict[int, bool] = {}
    moved: dict[int, int] = {}  # a number of a query or key plus so much
    for node in nodes:
        if node.op not in _KNOWN or node.kind == "float":
            return False
        is_constant = all(constant[id(arg)] for arg in node.args)
        if node.op == "sym" and node.value in ("i", "j"):
            is_constant, moved[id(node)] = False, shift if node.value == "i" else 0
        elif node.op in ("floordiv", "mod") and _integer(node.args[1], numbers) is None:
            is_constant = False
        elif len(node.args) == 2:
            place, number = (moved.get(id(node.args[0])), _integer(node.args[1], numbers))
            other, left = (moved.get(id(node.args[1])), _integer(node.args[0], numbers))
            if place is not None and number is not None:
                if node.op in ("add", "sub"):
                    moved[id(node)] = place + (number if node.op == "add" else -number)
                elif node.op == "floordiv":
                    is_constant = number > 0 and number % TILE == 0 and place % TILE == 0
                elif node.op in ("lt", "le"):
                    is_constant = (number - place + (node.op == "le")) % TILE == 0
            elif other is not None and left is not None:
                if node.op == "add":
                    moved[id(node)] = left + other
                elif node.op in ("lt", "le"):
                    is_constant = (left - other + (node.op == "lt")) % TILE == 0
        constant[id(node)] = is_constant
    return constant[id(nodes[-1])]


def _integer(node: Expr, numbers: tuple[Any, ...]) -> int | None:
    """The value of an integer that is the same in every call of a plan, or of this one."""
    if node.op not in ("num", "lit") or node.kind != "int":
        return None
    return int(numbers[node.value] if node.op == "num" else node.value)
