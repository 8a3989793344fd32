"""Masks and scores written on the command line: a small grammar of the library's own names, never evaluated as Python.

Allowed: the names of `tilewise.formula.library`, `grids` and `scores`; calls of them with numbers, words in quotes,
None, True, False, lists and tuples; `&`, `|` and `~` on masks; `>>` between scores; a minus sign; `+` and `*`
to build lists (`[0] * 512 + [1] * 512`). A list stands for a tensor where the function wants one.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch

from tilewise.core.errors import FormulaError
from tilewise.formula import grids, library, scores
from tilewise.formula.formula import Mask, Score

MAX_TEXT = 10_000
MAX_LIST = 1 << 20
EXAMPLES = "for example causal & window(1024), softcap(30.0) >> alibi([0.5, 0.25])"
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.RShift: operator.rshift,
}


def _library() -> dict[str, Any]:
    """Public masks, scores and the functions that make them."""
    names: dict[str, Any] = {}
    for module in (library, grids, scores):
        for name, value in vars(module).items():
            made_here = inspect.isfunction(value) and value.__module__ == module.__name__
            if not name.startswith("_") and (isinstance(value, Mask | Score) or made_here):
                names[name] = value
    del names["tree_times"]  # makes no mask
    return names


NAMES = _library()


class _Numbers(list[Any]):
    """A list that knows how many numbers it holds, those of a list that is repeated counted each time."""

    held = 1


def _held(value: Any) -> int:
    return value.held if isinstance(value, _Numbers) else 1


class Reader:
    """Reads one expression; tensors are put on `device`. Every refusal is a FormulaError that names the place."""

    def __init__(self, text: str, device: torch.device) -> None:
        self.text, self.device = text, device

    def read(self) -> Any:
        """The value of the whole text: a Mask, a Score, or what the grammar allows inside them."""
        if len(self.text) > MAX_TEXT:
            expected = f"at most {MAX_TEXT}"
            raise FormulaError("expression", got=f"{len(self.text)} characters", expected=expected, hint=EXAMPLES)
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError) as error:
            expected = f"an expression ({error})"
            raise FormulaError("expression", got=repr(self.text), expected=expected, hint=EXAMPLES) from error
        try:
            return self.value(tree.body)
        except RecursionError as error:
            got, expected = "nested too deeply", "a shorter expression"
            raise FormulaError("expression", got=got, expected=expected, hint=EXAMPLES) from error

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if node.id not in NAMES:
                raise self.refuse(node, f"one of {', '.join(sorted(NAMES))}")
            return NAMES[node.id]
        if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (int, float, bool, str)):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.value(item) for item in node.elts]
            if isinstance(node, ast.Tuple):
                return tuple(items)
            return self.limited(node, sum(map(_held, items)), lambda: items)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.UnaryOp):
            return self.unary(node)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        raise self.refuse(node, "names of the library, numbers, lists, calls and & | ~ >>")

    def unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Invert) and isinstance(value, Mask):
            return ~value
        if isinstance(node.op, ast.USub) and type(value) in (int, float):
            return -value
        raise self.refuse(node, "~ before a mask or - before a number")

    def binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        for kind in (Mask, Score):
            if isinstance(left, kind) and isinstance(right, kind) and type(node.op) in _OPERATORS:
                if isinstance(node.op, ast.RShift) != (kind is Score):
                    break
                return _OPERATORS[type(node.op)](left, right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return self.limited(node, _held(left) + _held(right), lambda: left + right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and type(right) is int:
            return self.limited(node, _held(left) * max(right, 0), lambda: left * right)
        raise self.refuse(node, "& or | between masks, >> between scores, [..] + [..], [..] * number")

    def limited(self, node: ast.expr, length: int, make: Callable[[], list[Any]]) -> list[Any]:
        if length > MAX_LIST:
            raise self.refuse(node, f"lists of at most {MAX_LIST:,} items, those of lists in them counted")
        made = _Numbers(make())
        made.held = max(length, 1)
        return made

    def call(self, node: ast.Call) -> Any:
        function = self.value(node.func) if isinstance(node.func, ast.Name) else None
        if not inspect.isfunction(function):
            raise self.refuse(node, "a call of one of the library's functions")
        arguments = [self.value(argument) for argument in node.args]
        keywords = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        signature = inspect.signature(function)
        try:
            if len(keywords) != len(node.keywords):
                raise TypeError("** is not allowed")
            bound = signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise self.refuse(node, f"{function.__name__}{signature}: {error}") from error
        for name, value in bound.arguments.items():
            if isinstance(value, list) and "Tensor" in str(signature.parameters[name].annotation):
                bound.arguments[name] = self.tensor(node, value)
        if "device" in signature.parameters:
            bound.arguments.setdefault("device", self.device)
        return function(*bound.args, **bound.kwargs)

    def tensor(self, node: ast.expr, value: list[Any]) -> torch.Tensor:
        try:
            return torch.tensor(value, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self.refuse(node, "lists of numbers, all rows of one length") from error

    def refuse(self, node: ast.expr, expected: str) -> FormulaError:
        piece = ast.get_source_segment(self.text.strip(), node) or self.text
        return FormulaError(f"expression {self.text!r}", got=repr(piece), expected=expected, hint=EXAMPLES)


def read_mask(text: str | None, device: torch.device | str = "cpu") -> Mask | None:
    """The mask that `text` describes ("causal & window(1024)"); None for None. Raises FormulaError."""
    return None if text is None else _of_kind(Mask, text, device)


def read_score(text: str | None, device: torch.device | str = "cpu") -> Score | None:
    """The score that `text` describes ("softcap(30) >> alibi([0.5, 0.25])"); None for None. Raises FormulaError."""
    return None if text is None else _of_kind(Score, text, device)


def _of_kind(kind: type[Any], text: str, device: torch.device | str) -> Any:
    value = Reader(text, torch.device(device)).read()
    if not isinstance(value, kind):
        example = "causal & window(1024)" if kind is Mask else "softcap(30.0)"
        what = "a function without its arguments" if inspect.isfunction(value) else type(value).__name__
        raise FormulaError(
            f"expression {text!r}", got=what, expected=f"a {kind.__name__.lower()}", hint=f"such as {example}"
        )
    return value
