"""From a traced expression to structure plus slots: text that names the operations, and lists of tensors and numbers.

The text is the identity of a kernel: numbers and tensors are numbered slots in it, so their values never recompile
anything. Text is parsed back into shared nodes (equal subexpressions become one), once per process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import FormulaError
from tilewise.formula.expr import Expr
from tilewise.formula.walk import rebuild, transform

MAX_NODES = 4000
MAX_DEPTH = 250  # well within Python's recursion limit
SYMBOL_KINDS = {"b": "int", "h": "int", "i": "int", "j": "int", "s": "float"}


class Bound(NamedTuple):
    """A formula as operators pass it on: structure text, captured tensors, numbers."""

    text: str
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[Any, ...]

    @property
    def structure(self) -> Structure:
        return parse(self.text)


class Binding:
    """Collects the tensors and numbers of expressions while they are written as text."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self.nodes = 0

    def text(self, expr: Expr, depth: int = 0) -> str:
        """Prefix text of an expression; a leaf's value goes to its slot."""
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise FormulaError(
                "formula",
                got=f"more than {MAX_NODES} operations, or {MAX_DEPTH} in a chain",
                expected="a smaller expression",
                hint="capture a table of the values and index it",
            )
        if expr.op == "sym":
            return str(expr.value)
        if expr.op == "lit":
            return repr(expr.value)
        if expr.op == "num":
            self.numbers.append(expr.value)
            return f"#{len(self.numbers) - 1}:{expr.kind}"
        head = expr.op
        if expr.op == "load":
            head = f"@{self._slot(expr.value)}:{expr.kind}"
        return f"({' '.join([head] + [self.text(arg, depth + 1) for arg in expr.args])})"

    def _slot(self, tensor: torch.Tensor) -> int:
        for slot, known in enumerate(self.tensors):
            if known is tensor:
                return slot
        self.tensors.append(tensor)
        return len(self.tensors) - 1


@dataclass(frozen=True)
class Structure:
    """A parsed formula: nodes are shared, leaves name slots. Compare and hash by `text`."""

    text: str
    root: Expr
    loads: tuple[Expr, ...]
    number_kinds: tuple[str, ...]

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and other.text == self.text

    @property
    def num_tensors(self) -> int:
        return 1 + max((load.value for load in self.loads), default=-1)


class Pool:
    """Builds expressions with equal subexpressions shared."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Expr] = {}

    def share(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        value = node.value if not isinstance(node.value, float) else repr(node.value)
        key = (node.op, node.kind, type(value), value, *map(id, args))
        return self._known.setdefault(key, rebuild(node, args))

    def simplify(self, root: Expr) -> Expr:
        return transform(root, self.share)


def share(*roots: Expr) -> list[Expr]:
    """The same expressions with equal subexpressions made one node."""
    pool = Pool()
    return [pool.simplify(root) for root in roots]


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Structure:
    """Text written by `Binding.text`, back into nodes."""
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()
    pool = Pool()
    loads: dict[int, Expr] = {}
    numbers: dict[int, str] = {}
    position = 0

    def leaf(token: str) -> Expr:
        if token.startswith("#"):
            slot, kind = token[1:].split(":")
            numbers[int(slot)] = kind
            return pool.share(Expr("num", (), kind, int(slot)), ())
        if token in SYMBOL_KINDS:
            return pool.share(Expr("sym", (), SYMBOL_KINDS[token], token), ())
        if token in ("True", "False"):
            return pool.share(Expr("lit", (), "bool", token == "True"), ())
        number: int | float = float(token) if any(c in token for c in ".einf") else int(token)
        return pool.share(Expr("lit", (), "int" if isinstance(number, int) else "float", number), ())

    def node() -> Expr:
        nonlocal position
        token = tokens[position]
        position += 1
        if token != "(":
            return leaf(token)
        head = tokens[position]
        position += 1
        args = []
        while tokens[position] != ")":
            args.append(node())
        position += 1
        if head.startswith("@"):
            slot, kind = head[1:].split(":")
            made = pool.share(Expr("load", tuple(args), kind, int(slot)), tuple(args))
            loads[id(made)] = made
        else:
            made = pool.share(Expr(head, tuple(args), _kind(head, args)), tuple(args))
        return made

    root = node()
    kinds = tuple(numbers[slot] for slot in sorted(numbers))
    return Structure(text, root, tuple(loads.values()), kinds)


_OF_ITS_ARGUMENT = ("neg", "rising", "abs", "floor", "add", "sub", "mul", "floordiv", "mod", "min", "max")


def _kind(op: str, args: list[Expr]) -> str:
    if op.startswith("to_"):
        return op[3:]
    if op in ("lt", "le", "eq", "ne", "and", "or", "not", "alike"):
        return "bool"
    if op == "where":
        return args[1].kind
    return args[0].kind if op in _OF_ITS_ARGUMENT else "float"
