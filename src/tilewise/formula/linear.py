"""Scores that add something linear in the positions, as ALiBi does: kernels fold it into the scaling of the score."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.formula.expr import Expr, cast, lit
from tilewise.formula.walk import postorder, symbols

_MOVING = {"s", "i", "j"}


class Linear(NamedTuple):
    """s + i * of_i + j * of_j + rest, with floats over b and h."""

    of_i: Expr
    of_j: Expr
    rest: Expr


def linear(score: Expr, mask: Expr | None) -> Linear | None:
    """The parts of a score that is s plus something linear in i and j wherever `mask` shows a pair; else None."""
    past = mask is not None and _shows_only_the_past(mask)
    found: dict[int, dict[str, Expr] | None] = {}
    for node in postorder([score]):
        found[id(node)] = _parts(node, [found[id(arg)] for arg in node.args], past)
    parts = found[id(score)]
    if parts is None or not _is(parts.get("s"), 1):
        return None
    return Linear(*(cast(parts.get(name, lit(0.0)), float) for name in ("i", "j", "")))


def _shows_only_the_past(mask: Expr) -> bool:
    """Whether j <= i is a condition of the mask."""
    stack, seen = [mask], set()
    while stack:
        node = stack.pop()
        if node.op == "le" and [arg.op == "sym" and arg.value for arg in node.args] == ["j", "i"]:
            return True
        if node.op == "and" and id(node) not in seen:
            seen.add(id(node))
            stack.extend(node.args)
    return False


def _parts(node: Expr, parts: list[dict[str, Expr] | None], past: bool) -> dict[str, Expr] | None:
    """Coefficients of "s", "i" and "j", and under "" what is left, of those of operands; None where that is not all."""
    if node.op == "sym" and node.value in _MOVING:
        return {node.value: lit(1)}
    if not symbols(node) & _MOVING:
        return {"": node}
    if any(part is None for part in parts):
        return None
    first, *others = (part for part in parts if part is not None)
    if node.op in ("add", "sub"):
        second = others[0] if node.op == "add" else {name: -value for name, value in others[0].items()}
        return first | {name: first[name] + value if name in first else value for name, value in second.items()}
    if node.op == "neg":
        return {name: -value for name, value in first.items()}
    if node.op == "to_float" and "s" not in first:
        return {name: cast(value, float) for name, value in first.items()}
    if node.op == "mul" and ({*first} == {""} or {*others[0]} == {""}):
        factor, moving = (first, others[0]) if {*first} == {""} else (others[0], first)
        return {name: factor[""] * value for name, value in moving.items()}
    if node.op == "abs" and past and {*first} == {"i", "j"}:
        signs = first["i"], first["j"]
        if (_is(signs[0], 1) and _is(signs[1], -1)) or (_is(signs[0], -1) and _is(signs[1], 1)):
            return {"i": lit(1), "j": lit(-1)}  # the key is not after the query
    return None


def _is(value: Expr | None, number: int) -> bool:
    """Whether an expression is this number, written down or negated."""
    if value is not None and value.op == "neg":
        return _is(value.args[0], -number)
    return value is not None and value.op == "lit" and value.value == number
