"""Trace a mask or score function once, by calling it with symbols.

A function written for PyTorch FlexAttention works unchanged: operators and methods build nodes, `torch.where`,
`torch.tanh` and friends dispatch on the symbols, and indexing a captured tensor with symbols is caught while the
function runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.core.errors import FormulaError
from tilewise.formula.expr import Expr, as_expr, cast, sym
from tilewise.formula.functions import ELSEWHERE, getitem
from tilewise.formula.walk import render


class _Indexing(TorchFunctionMode):
    """While active, `tensor[...]` with a traced index becomes a load node."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, Expr) for part in index):
                return getitem(args[0], args[1])
        return func(*args, **(kwargs or {}))


def _called(fn: Callable[..., Any], arguments: list[Expr], ours: bool) -> Any:
    if not ours and torch.compiler.is_dynamo_compiling():
        from tilewise.formula.compiled import call

        whole, result = call(fn, arguments)
        if whole:
            return result
    with _Indexing():
        return fn(*arguments)


def trace(fn: Callable[..., Any], names: tuple[str, ...], kind: str, what: str, ours: bool = False) -> Expr:
    """Call `fn` with one symbol for each name and check the kind of what comes back. One of `ours` is written for
    expressions, a user's for what PyTorch has.
    """
    arguments = [sym(name, "float" if name == "s" else "int") for name in names]
    try:
        result = _called(fn, arguments, ours)
    except FormulaError:
        raise
    except (TypeError, IndexError, ValueError, RuntimeError) as wrong:
        # from Python, PyTorch or NumPy, to which a symbol is no number; the latter two where they name a symbol's type
        if not isinstance(wrong, (TypeError, IndexError)) and Expr.__module__ not in str(wrong):
            raise
        raise FormulaError(
            f"{what} function",
            got=f"{type(wrong).__name__}: {wrong}",
            expected=f"a function ({', '.join(names)}) of arithmetic, comparisons, & | ~, where and its like, "
            "and captured tensors indexed by positions",
            hint=ELSEWHERE,
        ) from wrong
    expr = as_expr(result)
    if kind == "bool" and expr.kind != "bool":
        raise FormulaError(
            f"{what} function",
            got=f"a {expr.kind} expression {render(expr)}",
            expected="a boolean expression",
            hint="return a comparison, for example i >= j",
        )
    return cast(expr, float) if kind == "float" else expr
