"""Symbols as torch.compile's tracer wants them: tensors of its own, each with an expression.

Of an object and an integer that became symbolic Dynamo (PyTorch 2.13) does not ask the object how they compare, and it
does not trace ~ of an object. Of tensors with `__torch_function__` it does both.
But the builtin abs() goes past them: then `trace` calls the function again, with objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.formula.expr import Expr
from tilewise.formula.functions import apply_torch_function, getitem, operator_of


class Traced(torch.Tensor):
    """A tensor that stands for `expr`. It has no element, nor has what is computed of it past this class."""

    expr: Expr

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = tuple(_expr_of(arg) for arg in args)
        named = {name: _expr_of(arg) for name, arg in (kwargs or {}).items()}
        if any(_escaped(arg) for arg in (*operands, *named.values())):
            return torch.zeros(0)
        # by name: Dynamo does not find methods that are written in Python
        of_two = None if named else operator_of(func.__name__)
        found = apply_torch_function(func, operands, named) if of_two is None else of_two(*operands)
        return _tensor_of(found) if isinstance(found, Expr) else found


class _Indexing(TorchFunctionMode):
    """While active, `tensor[...]` with a traced index becomes a load node, or a row of them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ or func is operator.getitem:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, Traced) for part in index):
                return _tensor_of(getitem(_expr_of(args[0]), _expr_of(index)))
        return func(*args, **(kwargs or {}))


def call(fn: Callable[..., Any], symbols: list[Expr]) -> tuple[bool, Any]:
    """(Whether nothing went past `Traced`, what a function gives for these symbols then)."""
    with _Indexing():
        result = _expr_of(fn(*(_tensor_of(symbol) for symbol in symbols)))
    return not _escaped(result), result


def _tensor_of(expr: Expr) -> Traced:
    tensor = torch.zeros(0, dtype=expr.dtype).as_subclass(Traced)
    tensor.expr = expr
    return tensor


def _expr_of(value: Any) -> Any:
    """The expression that a tensor stands for; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_expr_of(part) for part in value)
    return value.expr if isinstance(value, Traced) else value


def _escaped(value: Any) -> bool:
    """Whether a tensor comes of `Traced` ones, and has no expression."""
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.shape[0] == 0
