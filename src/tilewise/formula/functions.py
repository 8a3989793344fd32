"""What a formula may hold, by PyTorch's names, each composed of the nodes of `expr`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from tilewise.core.errors import FormulaError, caller_line, shown
from tilewise.formula.expr import (
    UNARY_FLOAT,
    Expr,
    as_expr,
    binary,
    bits,
    bitwise,
    cast,
    compare,
    invert,
    lit,
    logic,
    negate,
    unary,
    where,
)
from tilewise.formula.rows import OF_ROWS, read, spread
from tilewise.formula.walk import postorder, render

Function = Callable[..., Any]
ELSEWHERE = "compute what does not depend on positions or the score outside, and capture it as a tensor"


def _refused(what: str, got: Any, expected: str, hint: str) -> FormulaError:
    """The error that names the user's line."""
    return FormulaError(f"{what} at {caller_line()}", got=got, expected=expected, hint=hint)


# The functions below take PyTorch's own parameter names, so that keywords mean what they mean there; `**_` is where a
# value would live, which a symbol does not. Numbers in them are literals: part of a formula's structure.


def _two(op: str) -> Function:
    return lambda input, other: binary(op, input, other)


def _scaled(op: str) -> Function:
    """torch.add and torch.sub: `other` times `alpha`."""
    return lambda input, other, *, alpha=1: binary(op, input, other if alpha == 1 else as_expr(other) * alpha)


def _extreme(op: str) -> Function:
    def extreme(input: Any, other: Any) -> Expr:
        if not isinstance(other, (Expr, torch.Tensor)):  # to torch.max a number is a dimension
            raise _refused(op, f"other {other!r}", "a traced value", f"use clamp; of a row .a{op}(-1)")
        return spread(lambda a, b: binary(op, a, b), input, other)  # type: ignore[no-any-return]

    return extreme


def _extreme_or_reduced(op: str) -> Function:
    of_two = _extreme(op)
    return lambda input, other=None: OF_ROWS[f"a{op}"](input) if other is None else of_two(input, other)


def _one(op: str) -> Function:
    return lambda input: unary(op, input)


def _cmp(op: str, swap: bool = False) -> Function:
    if swap:
        return lambda input, other: compare(op, other, input)
    return lambda input, other: compare(op, input, other)


def _logical(op: str) -> Function:
    return lambda input, other: logic(op, cast(input, bool), cast(other, bool))


def _bitwise(op: str) -> Function:
    return lambda input, other: bitwise(op, input, other)


def _shift(op: str) -> Function:
    return lambda input, other: bits(op, input, other)


def _where(condition: Any, input: Any, other: Any) -> Expr:
    return where(condition, input, other)


def _clamp(input: Any, min: Any = None, max: Any = None) -> Expr:
    if min is None and max is None:
        raise _refused("clamp", "no bound", "min, max, or both", "leave out what clamps nothing")
    result = as_expr(input) if min is None else binary("max", input, min)
    return result if max is None else binary("min", result, max)


def _ceil(input: Any) -> Expr:
    return -unary("floor", -as_expr(input))


def _trunc(input: Any) -> Expr:
    return where(as_expr(input) < lit(0), _ceil(input), unary("floor", input))


def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expr:
    if rounding_mode not in (None, "floor", "trunc"):
        raise FormulaError(
            "rounding_mode", got=shown(rounding_mode), expected="None, 'floor' or 'trunc'", hint="x // y is 'floor'"
        )
    if rounding_mode != "trunc":
        return binary("floordiv" if rounding_mode else "div", input, other)
    x, y = as_expr(input), as_expr(other)
    if "float" in (x.kind, y.kind):
        return _trunc(x / y)
    size = binary("floordiv", abs(x), abs(other) if isinstance(other, int) else abs(y))
    return where((x < lit(0)) ^ (y < lit(0)), -size, size)


def _sign(input: Any) -> Expr:
    x = as_expr(input)
    return cast(where(lit(0) < x, lit(1), where(x < lit(0), lit(-1), lit(0))), x.dtype)


def _pow(input: Any, exponent: Any) -> Expr:
    x, p = as_expr(input), as_expr(exponent)
    if p.op not in ("num", "lit") and "float" not in (x.kind, p.kind):  # a rounded exponential would not be whole
        raise _refused(
            "power",
            f"base {render(x)}, exponent {render(p)}, both whole",
            "an exponent that is a number, or a base or an exponent that is a float",
            "capture a table of powers as a tensor and index it, or write the base as a float: 2.0**h",
        )
    if isinstance(x.value, (int, float)) and x.value > 0 and p.op != "num":
        return unary("exp2", p * math.log2(x.value))
    size = abs(p.value) if p.op == "num" and isinstance(p.value, (int, float)) else 0
    of_ints = p.kind == "int" and x.kind != "float"  # of which PyTorch has no inverse
    if size not in (0.5, 1, 2, 3, 4) or (of_ints and p.value < 0):
        raise _refused(
            "power",
            f"base {render(x)}, exponent {render(p)}",
            "an exponent of 0.5, 1, 2, 3 or 4, negative for a float; or a number > 0 as base",
            "use exp(p * log(x))",
        )
    x = cast(x, float if p.kind == "float" else int) if x.kind == "bool" or p.kind == "float" else x
    factor = result = unary("sqrt", x) if size == 0.5 else x
    if p.value < 0:  # before it is multiplied: the slope at 0 is infinite then, and no NaN
        factor = result = lit(1.0) / factor
    for _ in range(int(size) - 1):
        result = result * factor
    return result


def _relu(input: Any, inplace: bool = False) -> Expr:
    x = as_expr(input)
    if x.kind != "float":
        return binary("max", x, lit(0))
    return where(x <= lit(0.0), lit(0.0), x)  # not max: the slope at 0 is 0


def _log1p(input: Any) -> Expr:
    """log(1 + x), plus what rounding 1 + x took away from a small x."""
    x = cast(input, float)
    small = where(abs(x) < lit(0.5), x, lit(0.0))
    near = small + lit(1.0)
    return unary("log", x + lit(1.0)) + (small - (near - lit(1.0))) / near


def _expm1(input: Any) -> Expr:
    """By an identity that does not cancel near 0."""
    x = cast(input, float)
    return unary("tanh", x * lit(0.5)) * (unary("exp", x) + lit(1.0))


def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Expr:
    if beta == 0:
        raise _refused("softplus beta", beta, "another number than 0", "with 0 all is infinite")
    x = cast(input, float) if beta == 1 else cast(input, float) * beta
    soft = binary("max", x, lit(0.0)) + _log1p(unary("exp", -abs(x)))
    soft = where(x > threshold, x, soft)
    return soft if beta == 1 else soft / beta


def _logsigmoid(input: Any) -> Expr:
    x = cast(input, float)
    return binary("min", x, lit(0.0)) - _log1p(unary("exp", -abs(x)))


def _silu(input: Any, inplace: bool = False) -> Expr:
    return as_expr(input) * unary("sigmoid", input)


def _masked_fill(input: Any, mask: Any, value: Any) -> Expr:
    x, fill = as_expr(input), as_expr(value)
    if torch.promote_types(x.dtype, fill.dtype) != x.dtype:
        got = f"the {fill.kind} value {render(fill)} for the {x.kind} expression {render(x)}"
        raise _refused("masked_fill", got, "a value that the expression's type holds", "cast with .float()")
    return where(mask, cast(fill, x.dtype), x)


def _like(number: int) -> Function:
    return lambda input, *, dtype=None, **_: cast(lit(number), dtype or as_expr(input).dtype)


def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Expr:
    return cast(fill_value, dtype or as_expr(input).dtype)


def _new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Expr:
    if any(extent != 1 for extent in ((size,) if isinstance(size, int) else size)):
        raise _refused("size", repr(size), "(): a traced value is a single one", "pass () as the size")
    return cast(fill_value, dtype or as_expr(input).dtype)


def _new(number: int) -> Function:
    return lambda input, size=(), *, dtype=None, **_: _new_full(input, size, lit(number), dtype=dtype)


def _cast(dtype: torch.dtype) -> Function:
    return lambda input, **_: cast(input, dtype)


def _to(input: Any, *target: Any, dtype: Any = None, other: Any = None, **_: Any) -> Expr:
    result = as_expr(input)
    for one in (*target, dtype, other):
        if isinstance(one, (Expr, torch.Tensor)):
            result = cast(result, one.dtype)
        elif one is not None and not isinstance(one, (torch.device, str, int)):  # devices, non_blocking, copy
            result = cast(result, one)
    return result


def _detach(input: Any) -> Expr:
    x = as_expr(input)
    if any(node.kind == "float" and node.op in ("sym", "load") for node in postorder([x])) and x.kind == "float":
        raise _refused(
            "detach",
            f"the expression {render(x)}",
            "positions, which take no gradient: a formula's derivative is that of the whole formula",
            "detach a captured tensor outside",
        )
    return x


def getitem(tensor: Any, index: Any) -> Expr:
    return read(tensor, index if isinstance(index, tuple) else (index,))


# From PyTorch's names to what they build: as functions of the namespaces below, as operators of a captured tensor, and
# as methods of a traced value where a tensor has them.
_ENTRIES: dict[str, Function] = {
    "add": _scaled("add"),
    "sub subtract": _scaled("sub"),
    "mul multiply": _two("mul"),
    "div divide": _div,
    "true_divide": _two("div"),
    "floor_divide": _two("floordiv"),
    "remainder": _two("mod"),
    "pow": _pow,
    "min": _extreme_or_reduced("min"),
    "max": _extreme_or_reduced("max"),
    "minimum": _extreme("min"),
    "maximum": _extreme("max"),
    "lt less": _cmp("lt"),
    "le less_equal": _cmp("le"),
    "gt greater": _cmp("lt", swap=True),
    "ge greater_equal": _cmp("le", swap=True),
    "eq": _cmp("eq"),
    "ne not_equal": _cmp("ne"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda input: negate(cast(input, bool)),
    "bitwise_and": _bitwise("and"),
    "bitwise_or": _bitwise("or"),
    "bitwise_xor": _bitwise("xor"),
    "bitwise_not": lambda input: invert(input),
    "bitwise_left_shift": _shift("shl"),
    "bitwise_right_shift": _shift("shr"),
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp clip": _clamp,
    "clamp_min": lambda input, min: _clamp(input, min=min),
    "clamp_max": lambda input, max: _clamp(input, max=max),
    "abs absolute": _one("abs"),
    "neg negative": _one("neg"),
    "floor": _one("floor"),
    "sign": _sign,
    "ceil": _ceil,
    "trunc fix": _trunc,
    "square": lambda input: _pow(input, 2),
    **{name: _one(name) for name in UNARY_FLOAT},
    "rsqrt": lambda input: lit(1.0) / unary("sqrt", input),
    "reciprocal": lambda input: lit(1.0) / as_expr(input),
    "log1p": _log1p,
    "expm1": _expm1,
    "expit": _one("sigmoid"),
    "relu": _relu,
    "silu": _silu,
    "softplus": _softplus,
    "logsigmoid": _logsigmoid,
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "float double half bfloat16": _cast(torch.float32),
    "int long": _cast(torch.int64),
    "bool": _cast(torch.bool),
    "to": _to,
    "type_as": lambda input, other: _to(input, other),
    "detach": _detach,
    **OF_ROWS,
}
TABLE = {name: function for names, function in _ENTRIES.items() for name in names.split()}
_OF_ROWS = {*OF_ROWS.values(), TABLE["max"], TABLE["min"], getitem}  # which take rows as they are
_METHODS = TABLE | {"where": lambda input, condition, other: where(condition, input, other)}
_SPACES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.special": torch.special}
_OPERATORS = dict.fromkeys(("add", "sub", "mul", "pow", "lt", "le", "gt", "ge", "eq", "ne")) | {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
_BY_NAME = {f"__{name}__": TABLE[entry or name] for name, entry in _OPERATORS.items()}
_FUNCTIONS: dict[Any, Function] = {torch.Tensor.__getitem__: getitem}
for _space in _SPACES.values():
    _FUNCTIONS |= {getattr(_space, name): TABLE[name] for name in TABLE if callable(getattr(_space, name, None))}
_FUNCTIONS |= {getattr(torch.Tensor, name): _METHODS[name] for name in TABLE if hasattr(torch.Tensor, name)}
_FUNCTIONS |= {getattr(torch.Tensor, name): function for name, function in _BY_NAME.items()}
_FUNCTIONS |= {torch.Tensor.__invert__: invert, torch.Tensor.__neg__: TABLE["neg"], torch.Tensor.__abs__: TABLE["abs"]}
_FUNCTIONS |= {torch.Tensor.__pos__: as_expr, torch.rsub: lambda input, other: TABLE["sub"](other, input)}
_REFLECTED = {f"__r{name}__": function for name, function in zip(_OPERATORS, _BY_NAME.values(), strict=True)}


def operator_of(name: str) -> Function | None:
    """The operator of two operands that a method of this name (`__add__`, `__radd__`) is, if it is one."""
    if name in _REFLECTED:
        return lambda right, left: spread(_REFLECTED[name], left, right)
    known = _pow if name == "pow" else _BY_NAME.get(name)  # as `__pow__` calls itself
    return known and functools.partial(spread, known)


def _qualified(func: Any) -> str:
    """A function's public name."""
    name = getattr(func, "__name__", str(func))
    for path, space in {**_SPACES, "torch.Tensor": torch.Tensor}.items():
        for public in (name, name.removeprefix("special_")):
            if getattr(space, public, None) is func:
                return f"{path}.{public}"
    return f"{(getattr(func, '__module__', None) or 'torch').replace('torch._ops', 'torch.ops')}.{name}"


def _call(known: Function, func: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return known(*args, **kwargs) if known in _OF_ROWS else spread(known, *args, **kwargs)
    except FormulaError:
        raise
    except TypeError as wrong:  # a keyword or a number of operands that PyTorch has and formulas have not
        name, taken = _qualified(func), ", ".join(inspect.signature(known).parameters)
        raise _refused(name, str(wrong), f"{name}({taken})", "pass these operands and no others") from wrong


def apply_torch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.f(...)` with a traced operand."""
    known = _FUNCTIONS.get(func)
    if known is None:
        offered = {
            f"{path}.{name}".removeprefix("torch.")
            for path, space in _SPACES.items()
            for name in TABLE
            if callable(getattr(space, name, None)) and (space is torch or not hasattr(torch, name))
        }
        raise _refused(_qualified(func), "a traced value", "one of " + ", ".join(sorted(offered)), ELSEWHERE)
    return _call(known, func, *args, **kwargs)


def method(value: Expr, name: str) -> Callable[..., Any]:
    """`value.name` where it is one of PyTorch's methods that a formula may hold."""
    if name not in _METHODS or not hasattr(torch.Tensor, name):
        what, got = f"attribute {name!r} of a traced value", f"the expression {render(value)}"
        raise _refused(what, got, "an operation of the formula language, which this is not", ELSEWHERE)
    return functools.partial(_call, _METHODS[name], getattr(torch.Tensor, name), value)
