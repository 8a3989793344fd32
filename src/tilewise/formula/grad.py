"""Reverse-mode derivative of a score formula: what backward kernels multiply into the incoming gradient."""

from __future__ import annotations

from tilewise.formula.expr import Expr, compare, lit, negate, sym, unary, where
from tilewise.formula.walk import postorder

UPSTREAM = "g"  # the symbol for the gradient that reaches the formula's result


def _add(a: Expr | None, b: Expr) -> Expr:
    return b if a is None else a + b


def gradients(root: Expr, wanted: list[Expr]) -> list[Expr]:
    """Gradient expressions of `wanted` nodes, for the upstream gradient symbol `g`.

    Zero where `root` does not depend on one. Follows PyTorch's conventions at kinks: abs at 0 gives 0, minimum and
    maximum split ties evenly.
    """
    adjoint: dict[int, Expr] = {id(root): sym(UPSTREAM, "float")}
    for node in reversed(postorder([root])):
        g = adjoint.get(id(node))
        if g is None or node.kind != "float":
            continue
        for arg, local in _local(node, g):
            if arg.kind == "float":
                adjoint[id(arg)] = _add(adjoint.get(id(arg)), local)
    return [adjoint.get(id(node), lit(0.0)) for node in wanted]


def _half_at_ties(a: Expr, b: Expr, first_wins: Expr) -> Expr:
    return where(compare("eq", a, b), lit(0.5), where(first_wins, lit(1.0), lit(0.0)))


def _local(node: Expr, g: Expr) -> list[tuple[Expr, Expr]]:
    op, args = node.op, node.args
    if op in ("sym", "num", "lit", "load", "floor", "floordiv") or op.startswith("to_"):
        return []
    x = args[0]
    if op == "add":
        return [(x, g), (args[1], g)]
    if op == "sub":
        return [(x, g), (args[1], unary("neg", g))]
    if op == "mul":
        return [(x, g * args[1]), (args[1], g * x)]
    if op == "div":
        return [(x, g / args[1]), (args[1], unary("neg", g * node / args[1]))]
    if op == "mod":
        return [(x, g), (args[1], unary("neg", g * (x // args[1])))]
    if op == "neg":
        return [(x, unary("neg", g))]
    if op == "abs":
        sign = where(x > lit(0.0), lit(1.0), where(x < lit(0.0), lit(-1.0), lit(0.0)))
        return [(x, g * sign)]
    if op == "where":
        zero = lit(0.0)
        return [(args[1], where(x, g, zero)), (args[2], where(negate(x), g, zero))]
    if op in ("min", "max"):
        a, b = args
        first = compare("lt", a, b) if op == "min" else compare("lt", b, a)
        second = compare("lt", b, a) if op == "min" else compare("lt", a, b)
        return [(a, g * _half_at_ties(a, b, first)), (b, g * _half_at_ties(a, b, second))]
    return [(x, g * _unary_slope(op, x, node))]


def _unary_slope(op: str, x: Expr, y: Expr) -> Expr:
    one = lit(1.0)
    if op == "tanh":
        return one - y * y
    if op == "sigmoid":
        return y * (one - y)
    if op == "exp":
        return y
    if op == "exp2":
        return y * lit(0.6931471805599453)
    if op == "log":
        return one / x
    if op == "log2":
        return lit(1.4426950408889634) / x
    if op == "sqrt":
        return lit(0.5) / y
    if op == "sin":
        return unary("cos", x)
    if op == "cos":
        return unary("neg", unary("sin", x))
    raise AssertionError(f"no derivative rule for {op}")
