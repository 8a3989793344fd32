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


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
_INFIX |= {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "alike": "&"}
_INFIX |= {"bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>"}


_LONGEST = 400  # characters of an expression in a message
_DEEPEST = 20


def render(root: Expr) -> str:
    """Readable infix text of an expression, "..." for what is too deep or too long for a message."""
    parts: list[str] = []
    length = 0
    stack: list[tuple[Expr | str, int]] = [(root, 0)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, str):
            stack.extend((part, depth + 1) for part in reversed(_pieces(item) if depth < _DEEPEST else ["..."]))
            continue
        parts.append(item)
        length += len(item)
        if length > _LONGEST and stack:
            return "".join(parts)[:_LONGEST] + "..."
    return "".join(parts)


def _pieces(node: Expr) -> list[Expr | str]:
    """The text of a node, with its operands in it."""
    if node.op in ("sym", "num", "lit"):
        return [str(node.value)]
    if node.op in _INFIX:
        return ["(", node.args[0], f" {_INFIX[node.op]} ", node.args[1], ")"]
    operands = [piece for arg in node.args for piece in (arg, ", ")][:-1]
    if node.op == "load":
        return [f"t{node.value}" if isinstance(node.value, int) else "tensor", "[", *operands, "]"]
    return [{"neg": "-", "not": "~"}.get(node.op, node.op), "(", *operands, ")"]
