"""Walking and printing expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # expr prints nodes in its messages
    from tilewise.formula.expr import Expr


def postorder(roots: Iterable[Expr]) -> list[Expr]:
    """Every node once, operands before their users."""
    seen: set[int] = set()
    order: list[Expr] = []
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))
    return order


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other operands."""
    same = all(x is y for x, y in zip(args, node.args, strict=True)) if args else True
    return node if same else type(node)(node.op, args, node.kind, node.value)


def transform(root: Expr, replace: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Expr:
    """Rewrite bottom-up; `replace(node, new_args)` returns the new node, or None to keep the operation."""
    done: dict[int, Expr] = {}
    for node in postorder([root]):
        args = tuple(done[id(arg)] for arg in node.args)
        new = replace(node, args)
        done[id(node)] = rebuild(node, args) if new is None else new
    return done[id(root)]


def symbols(root: Expr) -> set[str]:
    """Names of the symbols that an expression depends on."""
    return {node.value for node in postorder([root]) if node.op == "sym"}


def reads(root: Expr) -> bool:
    """Whether a captured value enters, which may be as large as its type holds."""
    return any(node.op in ("load", "table") for node in postorder([root]))


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
_INFIX |= {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "alike": "&"}


def render(root: Expr) -> str:
    """Readable infix text of an expression."""
    if root.op in ("sym", "num", "lit"):
        return str(root.value)
    if root.op == "load":
        shape = f"t{root.value}" if isinstance(root.value, int) else "tensor"
        return f"{shape}[{', '.join(render(a) for a in root.args)}]"
    parts = [render(a) for a in root.args]
    if root.op in _INFIX:
        return f"({parts[0]} {_INFIX[root.op]} {parts[1]})"
    return f"{ {'neg': '-', 'not': '~'}.get(root.op, root.op) }({', '.join(parts)})"
