"""Trace a mask or score function once, by calling it with symbols.

A function written for PyTorch FlexAttention works unchanged: operators and methods build nodes, `torch.where`,
`torch.tanh` and friends dispatch on the symbols, and indexing a captured tensor with symbols is caught while the
function runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.core.errors import FormulaError, caller_line
from tilewise.formula.expr import (
    UNARY_FLOAT,
    Expr,
    as_expr,
    binary,
    cast,
    compare,
    load,
    logic,
    negate,
    sym,
    unary,
    where,
)
from tilewise.formula.walk import render

# The functions below take PyTorch's own parameter names, so that keywords mean what they mean there.


def _where(condition: Any, input: Any, other: Any) -> Expr:
    return where(condition, input, other)


def _clamp(input: Any, min: Any = None, max: Any = None) -> Expr:
    return as_expr(input).clamp(min, max)


def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expr:
    if rounding_mode not in (None, "floor"):
        raise FormulaError("rounding_mode", got=repr(rounding_mode), expected="None or 'floor'")
    return binary("floordiv" if rounding_mode else "div", input, other)


def _two(op: str) -> Callable[[Any, Any], Expr]:
    return lambda input, other: binary(op, input, other)


def _scaled(op: str) -> Callable[..., Expr]:
    """torch.add and torch.sub: `other` times `alpha`."""
    return lambda input, other, *, alpha=1: binary(op, input, other if alpha == 1 else as_expr(other) * alpha)


def _one(op: str) -> Callable[[Any], Expr]:
    return lambda input: unary(op, input)


def _cmp(op: str, swap: bool = False) -> Callable[[Any, Any], Expr]:
    if swap:
        return lambda input, other: compare(op, other, input)
    return lambda input, other: compare(op, input, other)


def _getitem(tensor: Any, index: Any) -> Any:
    if isinstance(tensor, Expr):
        raise FormulaError(
            f"index of a traced value at {caller_line()}",
            got=render(tensor),
            expected="an index into a captured tensor",
        )
    indices = index if isinstance(index, tuple) else (index,)
    return load(tensor, indices)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.where: _where,
    torch.minimum: _two("min"),
    torch.maximum: _two("max"),
    torch.min: _two("min"),
    torch.max: _two("max"),
    torch.clamp: _clamp,
    torch.logical_and: lambda input, other: logic("and", cast(input, bool), cast(other, bool)),
    torch.logical_or: lambda input, other: logic("or", cast(input, bool), cast(other, bool)),
    torch.logical_not: lambda input: negate(cast(input, bool)),
    torch.logical_xor: lambda input, other: compare("ne", cast(input, bool), cast(other, bool)),
    torch.bitwise_and: lambda input, other: logic("and", input, other),
    torch.bitwise_or: lambda input, other: logic("or", input, other),
    torch.div: _div,
    torch.true_divide: _two("div"),
    torch.floor_divide: _two("floordiv"),
    torch.remainder: _two("mod"),
    torch.pow: lambda input, exponent: input**exponent,
    torch.square: lambda input: as_expr(input) * as_expr(input),
    torch.nn.functional.sigmoid: _one("sigmoid"),
    torch.nn.functional.tanh: _one("tanh"),
    torch.Tensor.__getitem__: _getitem,
}
for _name, _op in (("add", "add"), ("sub", "sub"), ("subtract", "sub")):
    _FUNCTIONS[getattr(torch, _name)] = _scaled(_op)
for _name in ("mul", "multiply"):
    _FUNCTIONS[getattr(torch, _name)] = _two("mul")
for _name in (*UNARY_FLOAT, "abs", "neg", "floor"):
    _FUNCTIONS[getattr(torch, _name)] = _one(_name)
for _names, _op, _swap in (
    (("lt", "less"), "lt", False),
    (("le", "less_equal"), "le", False),
    (("gt", "greater"), "lt", True),
    (("ge", "greater_equal"), "le", True),
    (("eq",), "eq", False),
    (("ne", "not_equal"), "ne", False),
):
    for _name in _names:
        _FUNCTIONS[getattr(torch, _name)] = _cmp(_op, _swap)
# a captured tensor on the left of an operator arrives as the tensor's own method
for _method, _op in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("mod", "mod")):
    _FUNCTIONS[getattr(torch.Tensor, f"__{_method}__")] = _two(_op)
    if hasattr(torch.Tensor, f"__r{_method}__"):
        _FUNCTIONS[getattr(torch.Tensor, f"__r{_method}__")] = lambda a, b, _o=_op: binary(_o, b, a)
for _method, _op, _swap in (
    ("lt", "lt", False),
    ("le", "le", False),
    ("gt", "lt", True),
    ("ge", "le", True),
    ("eq", "eq", False),
    ("ne", "ne", False),
):
    _FUNCTIONS[getattr(torch.Tensor, f"__{_method}__")] = _cmp(_op, _swap)
for _method in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne"):
    _FUNCTIONS.setdefault(getattr(torch.Tensor, _method), _FUNCTIONS[getattr(torch, _method)])


def apply_torch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.f(...)` with a traced operand."""
    known, name = _FUNCTIONS.get(func), getattr(func, "__name__", str(func))
    if known is None:
        names = {f.__name__ for f in _FUNCTIONS if not f.__name__.startswith("_")}
        raise FormulaError(
            f"torch.{name} at {caller_line()}",
            got="a traced value",
            expected="one of " + ", ".join(sorted(names)),
            hint="compute what does not depend on positions or the score outside, and capture it as a tensor",
        )
    try:
        return known(*args, **kwargs)
    except FormulaError:
        raise
    except TypeError as wrong:  # a keyword or a number of operands that PyTorch has and formulas have not
        taken = ", ".join(inspect.signature(known).parameters)
        raise FormulaError(
            f"torch.{name} at {caller_line()}", got=str(wrong), expected=f"torch.{name}({taken})"
        ) from wrong


class _Indexing(TorchFunctionMode):
    """While active, `tensor[...]` with a traced index becomes a load node."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, Expr) for part in index):
                return _getitem(args[0], args[1])
        return func(*args, **(kwargs or {}))


def trace(fn: Callable[..., Any], names: tuple[str, ...], kind: str, what: str) -> Expr:
    """Call `fn` with one symbol for each name and check the kind of what comes back."""
    arguments = [sym(name, "float" if name == "s" else "int") for name in names]
    try:
        with _Indexing():
            result = fn(*arguments)
    except FormulaError:
        raise
    except (TypeError, IndexError) as wrong:  # from Python, PyTorch or NumPy, to which a symbol is no number
        raise FormulaError(
            f"{what} function",
            got=f"{type(wrong).__name__}: {wrong}",
            expected=f"a function ({', '.join(names)}) of arithmetic, comparisons, & | ~, where and its like, "
            "and captured tensors indexed by positions",
            hint="compute what does not depend on positions or the score outside, and capture it as a tensor",
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
