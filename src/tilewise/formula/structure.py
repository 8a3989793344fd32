"""From a traced expression to structure plus slots: text that names the operations, and lists of tensors and numbers.

The text is the identity of a kernel: numbers and tensors are numbered slots in it, so their values never recompile
anything. Text names what occurs twice once, and is parsed back into shared nodes, once per process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import FormulaError
from tilewise.formula.expr import Expr
from tilewise.formula.walk import postorder, rebuild, transform

MAX_NODES = 4000
MAX_DEPTH = 250  # well within Python's recursion limit, for what pickles an expression or solves it for an axis
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
    """Collects the tensors and numbers of expressions while they are written as text.

    What occurs twice is written once: `%n` stands for the n-th operation that ended before it. So the text is as long
    as the graph is large, however many paths lead through it.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []

    def text(self, root: Expr) -> str:
        """Prefix text of an expression; a leaf's value goes to its slot."""
        heads = self._heads(root)
        found: dict[str, int] = {}  # equal subexpressions have one number
        number: dict[int, int] = {}
        depth: dict[int, int] = {}
        written: list[str] = []
        operands: list[tuple[int, ...]] = []
        for node in postorder([root]):
            args = tuple(number[id(arg)] for arg in node.args)
            depth[id(node)] = 1 + max([depth[id(arg)] for arg in node.args], default=-1)
            key = f"{heads[id(node)]} {args}"
            if key not in found:
                found[key] = len(written)
                written.append(heads[id(node)])
                operands.append(args)
            number[id(node)] = found[key]
        if len(written) > MAX_NODES or depth[id(root)] > MAX_DEPTH:
            raise FormulaError(
                "formula",
                got=f"{len(written)} different operations, {depth[id(root)]} in a chain",
                expected=f"at most {MAX_NODES} operations, and {MAX_DEPTH} in a chain",
                hint="capture a table of the values and index it",
            )
        return _in_a_line(number[id(root)], written, operands)

    def _heads(self, root: Expr) -> dict[int, str]:
        """What each node is without its operands; slots are given in the order in which they are read."""
        heads: dict[int, str] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            if id(node) not in heads:
                heads[id(node)] = self._head(node)
                stack.extend(reversed(node.args))
        return heads

    def _head(self, node: Expr) -> str:
        if node.op == "sym":
            return str(node.value)
        if node.op == "lit":
            return repr(node.value)
        if node.op == "num":
            self.numbers.append(node.value)
            return f"#{len(self.numbers) - 1}:{node.kind}"
        return f"(@{self._slot(node.value)}:{node.kind}" if node.op == "load" else f"({node.op}"

    def _slot(self, tensor: torch.Tensor) -> int:
        for slot, known in enumerate(self.tensors):
            if known is tensor:
                return slot
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _in_a_line(root: int, written: list[str], operands: list[tuple[int, ...]]) -> str:
    tokens: list[str] = []
    ended: dict[int, int] = {}
    stack = [(root, False)]
    while stack:
        at, ends = stack.pop()
        if ends:
            ended[at] = len(ended)
            tokens.append(")")
        elif at in ended:
            tokens.append(f"%{ended[at]}")
        else:
            tokens.append(written[at])
            if written[at].startswith("("):
                stack.append((at, True))
                stack.extend((arg, False) for arg in reversed(operands[at]))
    return " ".join(tokens).replace(" )", ")")


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
    pool = Pool()
    loads: dict[int, Expr] = {}
    numbers: dict[int, str] = {}
    ended: list[Expr] = []
    open_heads: list[str] = []
    operands: list[list[Expr]] = [[]]

    def leaf(token: str) -> Expr:
        if token.startswith("%"):
            return ended[int(token[1:])]
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

    def operation(head: str, args: tuple[Expr, ...]) -> Expr:
        if not head.startswith("@"):
            return pool.share(Expr(head, args, _kind(head, args)), args)
        slot, kind = head[1:].split(":")
        made = pool.share(Expr("load", args, kind, int(slot)), args)
        loads[id(made)] = made
        return made

    for token in text.replace(")", " )").split():
        if token.startswith("("):
            open_heads.append(token[1:])
            operands.append([])
        elif token == ")":
            ended.append(operation(open_heads.pop(), tuple(operands.pop())))
            operands[-1].append(ended[-1])
        else:
            operands[-1].append(leaf(token))
    kinds = tuple(numbers[slot] for slot in sorted(numbers))
    return Structure(text, operands[0][0], tuple(loads.values()), kinds)


_OF_ITS_ARGUMENT = ("neg", "rising", "abs", "floor", "add", "sub", "mul", "floordiv", "mod", "min", "max",
                    "bitand", "bitor", "bitxor", "shl", "shr")  # fmt: skip


def _kind(op: str, args: tuple[Expr, ...]) -> str:
    if op.startswith("to_"):
        return op[3:]
    if op in ("lt", "le", "eq", "ne", "and", "or", "not", "alike"):
        return "bool"
    if op == "where":
        return args[1].kind
    return args[0].kind if op in _OF_ITS_ARGUMENT else "float"
