"""Rewrites that make emitted code cheap: what is constant over a tile, or over a program, is computed once."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.formula.expr import Expr, cast, lit, sym
from tilewise.formula.structure import share
from tilewise.formula.walk import postorder, symbols, transform

_EXACT_IN_FLOAT = ("add", "sub", "neg", "abs", "min", "max", "where")
_SMALL = 2**20
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


def cheaper(root: Expr) -> Expr:
    """The same value by cheaper element operations.

    Integer-to-float conversions, which run at a quarter of the rate of arithmetic, move from pairs (i, j) to
    positions: float32 holds positions, their sums and differences exactly up to 2**24. A score divided by what is
    constant over a tile is multiplied by its reciprocal; positions are not, since a mask may round the quotient.
    """
    return transform(root, _cheaper_node)


def _cheaper_node(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
    if node.op == "to_float":
        return _as_float(args[0])
    if node.op == "div" and symbols(args[0]) & {"s", "g"} and not symbols(args[1]) & {"i", "j", "s", "g"}:
        return args[0] * Expr("div", (lit(1.0), args[1]), "float")
    return None


def _as_float(node: Expr) -> Expr:
    if {"i", "j"} <= symbols(node) and _of_positions(node):
        return _converted(node)
    return cast(node, float)


def _of_positions(node: Expr) -> bool:
    """Whether an integer is made of positions and small numbers alone, by operations that float32 does exactly."""
    if node.op == "lit":
        return bool(abs(node.value) <= _SMALL)
    if node.op in _EXACT_IN_FLOAT:
        return all(arg.kind == "bool" or _of_positions(arg) for arg in node.args)
    return node.op == "sym"


def _converted(node: Expr) -> Expr:
    if node.op in _EXACT_IN_FLOAT:
        args = tuple(arg if arg.kind == "bool" else _converted(arg) for arg in node.args)
        return Expr(node.op, args, "float")
    return cast(node, float)


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
    replaced = {id(node): sym(f"once[{k}]", node.kind) for k, node in enumerate(hoisted, first)}
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
