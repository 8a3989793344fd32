"""Expressions over (b, h, i, j, s): the graph that a mask or score function is traced into.

A node is an operation, its operands and its kind (bool, int or float). Numbers and tensors carry their value while a
function is traced; `Binding` (`formula.structure`) turns them into numbered slots, so that what remains is pure
structure: two formulas that differ only in numbers or tensors have the same structure and share one kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.core.errors import FormulaError, caller_line, shown
from tilewise.core.tensors import check_dense, not_dense
from tilewise.formula.walk import render

Number = int | float | bool

UNARY_FLOAT = ("tanh", "sigmoid", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos")
COMPARISONS = ("lt", "le", "eq", "ne")
LOGIC = ("and", "or", "xor")
_BITS = {"bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>"}
_ORDER = ("bool", "int", "float")
_OF_BOOLS = {"mul": "and", "min": "and", "add": "or", "max": "or"}  # PyTorch's arithmetic of booleans is boolean


_KINDS: dict[Any, str] = {bool: "bool", int: "int", float: "float", torch.bool: "bool"}
_KINDS |= dict.fromkeys((torch.int32, torch.int64), "int")  # narrower ones would wrap in PyTorch, and not here
_KINDS |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "float")
_DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}


Method = Callable[["Expr", Any], "Expr"]


def _both(op: str) -> tuple[Method, Method]:
    """An operator of two operands, and the one that stands on the right of what is no expression."""

    def forward(self: Expr, other: Any) -> Expr:
        return _of_two(op, self, other)

    def reflected(self: Expr, other: Any) -> Expr:
        return _of_two(op, other, self)

    return forward, reflected


def _of_two(op: str, left: Any, right: Any) -> Expr:
    if op == "pow":
        result: Expr = as_expr(left).pow(right)
        return result
    make = compare if op in COMPARISONS else bitwise if op in LOGIC else bits if op in _BITS else binary
    return make(op, left, right)


class Expr:
    """One node of a formula. Built by operators on symbols, never by hand.

    `op` is `sym`, `lit` (a number that is part of the structure), `num` (one that travels as an argument), `load` (a
    captured tensor, indexed), `table` (its extrema, in bounds) or an operation. `value`: name, number, tensor or slot.
    """

    __array_ufunc__ = None  # an operator with a NumPy scalar on its left comes here
    device = None  # a symbol lives nowhere; `x.to(None)` leaves x where it is

    def __init__(self, op: str, args: tuple[Expr, ...], kind: str, value: Any = None) -> None:
        self.op = op
        self.args = args
        self.kind = kind
        self.value = value

    # arithmetic
    __add__, __radd__ = _both("add")
    __sub__, __rsub__ = _both("sub")
    __mul__, __rmul__ = _both("mul")
    __truediv__, __rtruediv__ = _both("div")
    __floordiv__, __rfloordiv__ = _both("floordiv")
    __mod__, __rmod__ = _both("mod")
    __pow__, __rpow__ = _both("pow")

    def __neg__(self) -> Expr:
        return unary("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return unary("abs", self)

    # comparisons: > and >= are kept as < and <= on swapped operands
    __lt__, __gt__ = _both("lt")
    __le__, __ge__ = _both("le")

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return compare("ne", self, other)

    # logic, of booleans; bits, of integers
    __and__, __rand__ = _both("and")
    __or__, __ror__ = _both("or")
    __xor__, __rxor__ = _both("xor")
    __lshift__, __rlshift__ = _both("shl")
    __rshift__, __rrshift__ = _both("shr")

    def __invert__(self) -> Expr:
        return invert(self)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    # what would need a value while only a symbol exists
    def _no_value(self, what: str, hint: str) -> Any:
        raise FormulaError(
            f"{what} of a traced value at {caller_line()}",
            got=f"the expression {render(as_expr(self))}",
            expected="an expression without data-dependent Python control flow",
            hint=hint,
        )

    def __bool__(self) -> Any:
        return self._no_value("bool()", "use & | ~ for and/or/not, and where(cond, a, b) for if")

    def __float__(self) -> Any:
        return self._no_value("float()", "use torch.exp, torch.tanh, torch.floor and their like, not math")

    def __int__(self) -> Any:
        return self._no_value("int()", "use .to(torch.int32) or //")

    def __index__(self) -> Any:
        return self._no_value("index()", "index PyTorch tensors of 1 to 4 dimensions with traced positions")

    def __hash__(self) -> Any:
        return self._no_value("hash()", "capture the values of a dict or set as a tensor, and index that")

    def __iter__(self) -> Any:
        return self._no_value("iteration", "a position or score is a single value")

    def __len__(self) -> Any:
        return self._no_value("len()", "a position or score is a single value")

    def __getitem__(self, index: Any) -> Any:
        return self._no_value("an index", "index a captured tensor with positions, not a position")

    def __getattr__(self, name: str) -> Any:
        """PyTorch's methods, from the table of what formulas may hold."""
        if name.startswith("_"):
            raise AttributeError(name)
        from tilewise.formula.functions import method

        return method(as_expr(self), name)

    def whole(self) -> Expr:
        """Itself; a captured tensor with indices missing (`functions.Row`) raises."""
        return self

    def __repr__(self) -> str:
        return render(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from tilewise.formula.functions import apply_torch_function

        return apply_torch_function(func, args, kwargs or {})


# construction ------------------------------------------------------------------------------------------------------


def sym(name: str, kind: str = "int") -> Expr:
    """A symbol: `b h i j` (int), `s` (float), or an internal one."""
    return Expr("sym", (), kind, name)


def lit(value: Number) -> Expr:
    """A number that is part of the structure: the library's own; of users' numbers only True and False."""
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return Expr("lit", (), kind, value)


TRUE, FALSE = lit(True), lit(False)


def as_expr(value: Any) -> Expr:
    """Lift a number or a captured one-element tensor into an expression."""
    if isinstance(value, Expr):
        return value.whole()
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, int):
        if not -(2**61) <= value < 2**61:  # kernels are handed four times as much (`emit.encoded`)
            hint = "2**60 is beyond any position; use a float for a larger number"
            raise FormulaError(f"number at {caller_line()}", got=value, expected="-2**61 to 2**61 - 1", hint=hint)
        return Expr("num", (), "int", value)
    if isinstance(value, (float, torch.SymFloat)):
        return Expr("num", (), "float", value)
    if isinstance(value, torch.Tensor):
        check_captured(value)
        if value.numel() != 1:
            raise FormulaError(
                f"captured tensor at {caller_line()}",
                got=f"a tensor of shape {tuple(value.shape)} used without an index",
                expected="tensor[...] indexed by b, h, i or j, or a one-element tensor",
                hint="write bias[h, i, j] rather than bias",
            )
        return load(value, (lit(0),) * value.ndim)  # the tensor itself: its identity and its gradient stay
    if isinstance(value, torch.SymInt):
        return Expr("num", (), "int", value)
    if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic):
        number = value.item()
        if isinstance(number, (int, float)):
            return as_expr(number)
    raise FormulaError(
        f"operand at {caller_line()}",
        got=f"{type(value).__name__} {value!r}",
        expected="a number, a captured tensor indexed by positions, or a traced value",
        hint="make an array a tensor (torch.as_tensor) and index it; take a number out of anything else",
    )


def tensor_kind(dtype: torch.dtype) -> str:
    """The kind (bool, int, float) that values of a captured tensor have in a formula."""
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def check_captured(tensor: torch.Tensor) -> None:
    """Raise InputError for a tensor without dense memory of its own, which may have no shape."""
    if not_dense(tensor) is not None:
        check_dense(f"captured tensor at {caller_line()}", tensor, "a dense tensor with memory of its own")


def load(tensor: torch.Tensor, indices: Sequence[Any]) -> Expr:
    """A captured tensor read at traced indices, one for each dimension."""
    check_captured(tensor)
    if len(indices) != tensor.ndim or tensor.ndim > 4:
        raise FormulaError(
            f"index into a captured tensor at {caller_line()}",
            got=f"{len(indices)} indices for a tensor of shape {tuple(tensor.shape)}",
            expected="one index for each dimension, 0 to 4 dimensions",
            hint="index every dimension: write bias[h, i, j] rather than bias[h]",
        )
    exprs = tuple(as_expr(index) for index in indices)
    for position, index in enumerate(exprs):
        what, hint = f"index {position} into a captured tensor", "cast with .to(torch.int32), or use // instead of /"
        _of_kind("int", index, what, "an integer expression", hint)
        if isinstance(index.value, int) and index.value < 0:  # a constant counts from the end
            exprs = (*exprs[:position], as_expr(index.value + tensor.shape[position]), *exprs[position + 1 :])
    return Expr("load", exprs, tensor_kind(tensor.dtype), tensor)


def cast(value: Any, dtype: Any) -> Expr:
    """Convert to bool, int or float; the width is the kernel's choice (float32, int32, int64 where needed)."""
    expr, kind = as_expr(value), _KINDS.get(dtype)
    if kind is None:
        raise FormulaError(
            f"cast at {caller_line()}",
            got=shown(dtype),
            expected="torch.bool, int32, int64, float16, bfloat16, float32 or float64",
            hint="use torch.float32 or torch.int32",
        )
    if expr.op == "lit":
        return lit({"bool": bool, "int": int, "float": float}[kind](expr.value))
    return expr if kind == expr.kind else Expr("to_" + kind, (expr,), kind)


def _numeric(expr: Expr) -> Expr:
    return cast(expr, int) if expr.kind == "bool" else expr


def _join(a: Expr, b: Expr) -> tuple[Expr, Expr, str]:
    kind = _ORDER[max(_ORDER.index(a.kind), _ORDER.index(b.kind))]
    if kind == "float":
        return cast(a, float), cast(b, float), kind
    return a, b, kind


def binary(op: str, left: Any, right: Any) -> Expr:
    """add sub mul div floordiv mod min max, with PyTorch's promotion of bool, int and float."""
    a, b = as_expr(left), as_expr(right)
    if a.kind == b.kind == "bool" and op in _OF_BOOLS:
        return logic(_OF_BOOLS[op], a, b)
    a, b, kind = _join(_numeric(a), _numeric(b))
    if op == "div":
        a, b, kind = cast(a, float), cast(b, float), "float"
    written = b.op == "num" and not isinstance(right, Expr) and isinstance(b.value, int)  # not the number of a slot
    if op in ("floordiv", "mod") and kind == "int" and written and b.value == 0:
        raise FormulaError(
            f"divisor at {caller_line()}",
            got=0,
            expected="an integer other than 0",
            hint="for a size of 0: max(size, 1)",
        )
    return Expr(op, (a, b), kind)


def unary(op: str, value: Any) -> Expr:
    """neg abs floor keep the kind; tanh sigmoid exp exp2 log log2 sqrt sin cos give float."""
    expr = _numeric(as_expr(value))
    if op in UNARY_FLOAT:
        return Expr(op, (cast(expr, float),), "float")
    if op == "floor" and expr.kind == "int":
        return expr
    return Expr(op, (expr,), expr.kind)


def compare(op: str, left: Any, right: Any) -> Expr:
    """lt le eq ne."""
    a, b = as_expr(left), as_expr(right)
    if a.kind != b.kind:
        a, b, _ = _join(_numeric(a), _numeric(b))
    return Expr(op, (a, b), "bool")


def _of_kind(kind: str, expr: Expr, what: str, expected: str, hint: str) -> Expr:
    """The expression, if it is of this kind."""
    if expr.kind != kind:
        got = f"the {expr.kind} expression {render(expr)}"
        raise FormulaError(f"{what} at {caller_line()}", got=got, expected=expected, hint=hint)
    return expr


def _as_bool(value: Any, operator: str) -> Expr:
    hint = "compare first, for example (x != 0); parenthesise comparisons joined by & and |"
    return _of_kind("bool", as_expr(value), f"operand of {operator}", "a boolean expression", hint)


def logic(op: str, left: Any, right: Any) -> Expr:
    """and, or, xor of boolean expressions; literal True and False fold away."""
    name = {"and": "&", "or": "|", "xor": "^"}[op]
    a, b = _as_bool(left, name), _as_bool(right, name)
    absorbing = op == "or"
    for x, y in ((a, b), (b, a)):
        if x.op == "lit" and op == "xor":
            return negate(y) if x.value else y
        if x.op == "lit":
            return x if x.value is absorbing else y
    return compare("ne", a, b) if op == "xor" else Expr(op, (a, b), "bool")


def bitwise(op: str, left: Any, right: Any) -> Expr:
    """and, or, xor: of booleans their logic, of integers their bits."""
    a, b = as_expr(left), as_expr(right)
    return logic(op, a, b) if a.kind == b.kind == "bool" else bits("bit" + op, a, b)


def bits(op: str, left: Any, right: Any) -> Expr:
    """bitand bitor bitxor shl shr of integers, in 64 bits of two's complement; a boolean counts as 0 or 1.

    As in PyTorch, bits shifted out to the left are lost, and shifting by less than 0 or more than 63 leaves of a number
    0 to the left, and its sign (0 or -1) to the right.
    """
    a, b = _numeric(as_expr(left)), _numeric(as_expr(right))
    hint = "parenthesise comparisons joined by & and |; cast with .to(torch.int64)"
    for operand in (a, b):
        _of_kind("int", operand, f"operand of {_BITS[op]}", "booleans, or integers", hint)
    return Expr(op, (a, b), "int")


def invert(value: Any) -> Expr:
    """~: not of a boolean, all bits of an integer."""
    x = as_expr(value)
    if x.kind == "float":
        return negate(_as_bool(x, "~"))  # which says what it takes
    return negate(x) if x.kind == "bool" else binary("sub", lit(-1), x)


def alike(first: Expr, second: Expr) -> Expr:
    """A condition written twice: either holds where the other does, and who solves for an axis takes the one it can."""
    return Expr("alike", (_as_bool(first, "alike"), _as_bool(second, "alike")), "bool")


def rising(index: Any) -> Expr:
    """An index along which a captured tensor's values never fall: over a tile they lie between those at its ends."""
    return Expr("rising", (as_expr(index),), "int")


def negate(expr: Expr) -> Expr:
    """Boolean not, with literals and double negation folded."""
    if expr.op == "lit":
        return FALSE if expr.value else TRUE
    return expr.args[0] if expr.op == "not" else Expr("not", (expr,), "bool")


def where(condition: Any, if_true: Any, if_false: Any) -> Expr:
    """`if_true` where the condition holds, else `if_false`."""
    c = _as_bool(condition, "where")
    a, b = as_expr(if_true), as_expr(if_false)
    if c.op == "lit":
        return a if c.value else b
    if a.kind != b.kind:
        a, b, _ = _join(_numeric(a), _numeric(b))
    return Expr("where", (c, a, b), a.kind)
