"""Rewrites that make emitted code cheap: what is constant over a tile, or over a program, is computed once."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

from tilewise.formula.expr import Expr, cast, lit
from tilewise.formula.reach import INT32, Limits, Once, reaches, within
from tilewise.formula.structure import share
from tilewise.formula.walk import postorder, symbols, transform

_EXACT_IN_FLOAT = ("add", "sub", "neg", "abs", "min", "max", "where")
_SHORT = Limits(2**20, 2**20, INT32)  # positions whose sums, a dozen of them, float32 holds
_MANY = 64  # factors
_SCORES = {"s", "g"}
_MOVING = {"i", "j", "s", "g"}
_LOG2E = math.log2(math.e)
_DEAR = {
    "load",
    "table",
    "floordiv",
    "mod",
    "div",
    "sqrt",
    "exp",
    "exp2",
    "log",
    "log2",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
}


def written_once(root: Expr) -> Expr:
    """Of each condition that is written twice (`expr.alike`) the first form; what is said of indices, left out."""
    return transform(root, lambda node, args: args[0] if node.op in ("alike", "rising") else None)


def first_forms(root: Expr) -> Expr:
    """Of each condition that is written twice the first form."""
    return transform(root, lambda node, args: args[0] if node.op == "alike" else None)


def cheaper(root: Expr) -> Expr:
    """The same value by cheaper element operations.

    Integer-to-float conversions, which run at a quarter of the rate of arithmetic, move from pairs (i, j) to
    positions: float32 holds positions, their sums and differences exactly up to 2**24. A score divided by what is
    constant over a tile is multiplied by its reciprocal; positions are not, since a mask may round the quotient. What a
    score is multiplied by that is constant over a tile is multiplied first.
    """
    return transform(root, _cheaper_node)


def _cheaper_node(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
    if node.op == "to_float":
        return _as_float(args[0])
    if node.op == "div" and symbols(args[0]) & _SCORES and not symbols(args[1]) & _MOVING:
        return _product((args[0], Expr("div", (lit(1.0), args[1]), "float")))
    if node.op == "mul" and symbols(node) & _SCORES:
        return _product(args)
    return None


def _product(args: tuple[Expr, ...]) -> Expr:
    """The product of what moves inside a tile, times that of what does not."""
    factors = [factor for arg in args for factor in _factors(arg)]
    moving, fixed = ([x for x in factors if bool(symbols(x) & _MOVING) is moves] for moves in (True, False))
    return functools.reduce(operator.mul, [*moving, *([functools.reduce(operator.mul, fixed)] if fixed else [])])


def _factors(root: Expr) -> list[Expr]:
    """What is multiplied; a product of too many, such as a power by squares, is one factor."""
    factors: list[Expr] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if node.op == "mul":
            stack.extend(reversed(node.args))
        else:
            factors.append(node)
        if len(stack) + len(factors) > _MANY:
            return [root]
    return factors


def base_2(score: Expr, scale: Expr) -> tuple[Expr, bool]:
    """(The score as the forward computes it from what q and k give, cheaper; whether in base 2). It is in base 2, times
    log2(e), where that costs nothing: where it is a product with something constant over a tile.
    """
    root = cheaper(
        transform(score, lambda node, args: node * scale if node.op == "sym" and node.value == "s" else None)
    )
    product = any(not symbols(factor) & _MOVING for factor in _factors(root))
    return (cheaper(root * lit(_LOG2E)) if product else root), product


def _as_float(root: Expr) -> Expr:
    """A whole number as a float: converted by its positions where they, and all that is made of them, are exact."""
    reach = reaches([root], _SHORT)
    exact = all(
        node.op in (*_EXACT_IN_FLOAT, "sym", "lit") and within(reach[id(node)], (-(2**24), 2**24))
        for node in _whole_parts(root)
    )
    if not exact or not {"i", "j"} <= symbols(root):
        return cast(root, float)
    done: dict[int, Expr] = {}
    for node in postorder([root]):
        if node.kind != "int":
            done[id(node)] = node
        elif node.op in _EXACT_IN_FLOAT:
            done[id(node)] = Expr(node.op, tuple(done[id(arg)] for arg in node.args), "float")
        else:
            done[id(node)] = cast(node, float)
    return done[id(root)]


def _whole_parts(root: Expr) -> list[Expr]:
    """The nodes that a whole number is made of, without what its conditions are made of."""
    seen: dict[int, Expr] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) not in seen and node.kind == "int":
            seen[id(node)] = node
            stack.extend(node.args)
    return [*seen.values()]


def hoist(roots: Sequence[Expr], fixed: str, first: int = 0, dear: bool = False) -> tuple[list[Expr], list[Expr]]:
    """Split expressions by what moves inside a program, which owns the positions `fixed` ('i' or 'j').

    Returns the subexpressions over b, h and `fixed` that the rest uses, and the rest, which reads them as symbols
    `once[k]`, k from `first` on. With `dear`, only those that cost more than bringing a number to where it is used.
    """
    roots = share(*roots)
    still = {"b", "h", fixed}
    uses_moving = {id(node): bool(symbols(node) - still) for node in postorder(roots)}
    hoisted: list[Expr] = []

    def wants_hoisting(node: Expr) -> bool:
        if uses_moving[id(node)] or node.op in ("sym", "lit", "num"):
            return False
        return not dear or any(part.op in _DEAR for part in postorder([node]))

    for node in [*postorder(roots)]:
        children = node.args if uses_moving[id(node)] else ()
        for child in (*children, *([node] if any(node is root for root in roots) else ())):
            if wants_hoisting(child) and all(child is not known for known in hoisted):
                hoisted.append(child)
    replaced = {id(node): Once.of(node, f"once[{k}]") for k, node in enumerate(hoisted, first)}
    rest = []
    for root in roots:
        done: dict[int, Expr] = {}
        for node in postorder([root]):
            if id(node) in replaced:
                done[id(node)] = replaced[id(node)]
            else:
                done[id(node)] = (
                    Expr(node.op, tuple(done[id(a)] for a in node.args), node.kind, node.value) if node.args else node
                )
        rest.append(done[id(root)])
    return hoisted, rest
