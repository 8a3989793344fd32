"""Several values in a row: a captured tensor whose last index is missing, and what is computed of its entries.

A row is as many expressions as it has entries, and whatever is done to it is done to each; `sum(-1)`, `any(-1)` and
their like make one of them, in pairs and pairs of pairs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.core.errors import FormulaError, caller_line, shown
from tilewise.formula.expr import Expr, as_expr, binary, cast, check_captured, lit, load, logic, tensor_kind

MOST = 1024  # entries: a formula has no more operations than `structure.MAX_NODES`, of which each entry takes some
_REDUCED = "one value for each pair: .sum(-1), .any(-1), .all(-1), .amax(-1) make one of a row"


class Many(Expr):
    """Values in a row."""

    def entries(self) -> tuple[Expr, ...]:
        """One expression for each."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from tilewise.formula.functions import method

        return method(self, name)


def _both(function: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    return lambda self, other: spread(function, self, other), lambda self, other: spread(function, other, self)


def _alone(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: spread(function, self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _forward, _reflected = _both(getattr(operator, f"__{_name}__"))
    setattr(Many, f"__{_name}__", _forward)
    setattr(Many, f"__r{_name}__", _reflected)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Many, f"__{_name}__", _both(getattr(operator, _name))[0])
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Many, f"__{_name}__", _alone(getattr(operator, _name)))


class Vector(Many):
    """A row of expressions."""

    def __init__(self, entries: Sequence[Expr]) -> None:
        super().__init__("row", tuple(entries), entries[0].kind if entries else "float")

    def entries(self) -> tuple[Expr, ...]:
        return self.args

    def __getitem__(self, index: Any) -> Expr:
        if isinstance(index, int) and -len(self.args) <= index < len(self.args):
            return self.args[index]
        raise FormulaError(
            f"index into a row at {caller_line()}",
            got=f"{shown(index)}, of {len(self.args)} entries",
            expected="an integer that is one of them",
            hint="index captured tensors by positions, before anything is computed of them",
        )

    def whole(self) -> Expr:
        raise FormulaError(
            f"row at {caller_line()}", got=f"{len(self.args)} values, of {self.kind}", expected="one", hint=_REDUCED
        )


class Row(Many):
    """A captured tensor with too few indices so far: takes more. With one missing it is a row."""

    def __getitem__(self, index: Any) -> Expr:
        return read(self.value, (*self.args, *(index if isinstance(index, tuple) else (index,))))

    def whole(self) -> Expr:
        return load(self.value, self.args)  # which says how many indices it takes

    def entries(self) -> tuple[Expr, ...]:
        if self.value.ndim - len(self.args) != 1:
            self.whole()
        return _entries(self.value, self.args, range(self.value.shape[-1]))


def _entries(tensor: torch.Tensor, indices: Sequence[Any], places: range) -> tuple[Expr, ...]:
    if len(places) > MOST:
        raise FormulaError(
            f"row of a captured tensor at {caller_line()}",
            got=f"{len(places)} entries of a tensor of shape {tuple(tensor.shape)}",
            expected=f"at most {MOST}: each is an operation of its own",
            hint="what multiplies wide rows goes into columns of q and k",
        )
    return tuple(load(tensor, (*indices, lit(place))) for place in places)


def read(tensor: Any, indices: tuple[Any, ...]) -> Expr:
    """`tensor[indices]`: a load, a `Row` where indices are missing, or a part of one."""
    if isinstance(tensor, Expr):
        return tensor[indices if len(indices) != 1 else indices[0]]  # type: ignore[no-any-return]
    check_captured(tensor)
    dots = [position for position, index in enumerate(indices) if index is Ellipsis]
    if len(dots) == 1 and (dots[0] == len(indices) - 1 or len(indices) == tensor.ndim + 1):
        indices = indices[: dots[0]] + indices[dots[0] + 1 :]
    if len(indices) == tensor.ndim <= 4 and isinstance(indices[-1], slice) and _constant(indices[-1]):
        first = tuple(as_expr(index) for index in indices[:-1])
        return Vector(_entries(tensor, first, range(tensor.shape[-1])[indices[-1]]))
    if len(indices) < tensor.ndim <= 4:
        return Row("load", tuple(as_expr(index) for index in indices), tensor_kind(tensor.dtype), tensor)
    return load(tensor, indices)


def _constant(part: slice) -> bool:
    return all(end is None or type(end) is int for end in (part.start, part.stop, part.step)) and part.step != 0


def spread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), for each entry where there is a row among these, with what is no row for all."""
    given = [*args, *kwargs.values()]
    if not any(isinstance(x, Many) for x in given):
        return function(*args, **kwargs)
    rows = [_row_of(x) for x in given]
    count = _extent([len(row) for row in rows if row is not None])
    made = []
    for n in range(count):
        entry = [x if row is None else row[n if len(row) > 1 else 0] for x, row in zip(given, rows, strict=True)]
        named = dict(zip(kwargs, entry[len(args) :], strict=True))
        made.append(as_expr(function(*entry[: len(args)], **named)))
    return Vector(made)


def _extent(sizes: list[int]) -> int:
    """How many entries rows of so many have together: as many in each, or one."""
    wide = sorted({size for size in sizes if size != 1})
    if len(wide) > 1:
        got, hint = " and ".join(map(str, wide)), "both have the extent of their tensor's last dimension"
        what = f"rows at {caller_line()}"
        raise FormulaError(what, got=f"{got} entries", expected="as many in each, or one", hint=hint)
    return wide[0] if wide else 1


def _row_of(x: Any) -> tuple[Expr, ...] | None:
    """The entries of a row, or of a captured tensor of one dimension."""
    if isinstance(x, Many):
        return x.entries()
    if isinstance(x, torch.Tensor) and x.ndim == 1 and x.shape[0] != 1:
        return _entries(x, (), range(x.shape[0]))
    return None


# what makes one value of a row ---------------------------------------------------------------------------------------


def _all_of(input: Any) -> tuple[Expr, ...]:
    """The entries, of a single value itself."""
    found = _row_of(input)
    return (as_expr(input),) if found is None else found


def _reduced(input: Any, dim: Any, keepdim: bool, made: Callable[[tuple[Expr, ...]], Expr]) -> Expr:
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if any(one not in (None, -1, 0) for one in dims) or len(dims) > 1:
        raise FormulaError(
            f"dim at {caller_line()}", got=shown(dim), expected="-1, or None", hint="a row has one dimension"
        )
    result = made(_all_of(input))
    return Vector([result]) if keepdim else result


def _in_pairs(of_two: Callable[[Expr, Expr], Expr], values: Sequence[Expr]) -> Expr:
    """All of them, none far down a chain."""
    while len(values) > 1:
        pairs = [of_two(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = [*pairs, *values[len(pairs) * 2 :]]
    return values[0]


def total(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Expr:
    """torch.sum; of booleans how many are True."""

    def made(values: tuple[Expr, ...]) -> Expr:
        values = tuple(cast(x, int) if x.kind == "bool" else x for x in values)
        found = _in_pairs(lambda a, b: binary("add", a, b), values or (lit(0.0),))
        return found if dtype is None else cast(found, dtype)

    return _reduced(input, dim, keepdim, made)


def mean(input: Any, dim: Any = None, keepdim: bool = False) -> Expr:
    """torch.mean."""
    return _reduced(input, dim, keepdim, lambda values: binary("div", total(Vector(values)), lit(float(len(values)))))


def any_of(input: Any, dim: Any = None, keepdim: bool = False) -> Expr:
    """torch.any."""
    return _reduced(input, dim, keepdim, lambda values: _joined("or", values))


def all_of(input: Any, dim: Any = None, keepdim: bool = False) -> Expr:
    """torch.all."""
    return _reduced(input, dim, keepdim, lambda values: _joined("and", values))


def _joined(op: str, values: tuple[Expr, ...]) -> Expr:
    held = [cast(x, bool) for x in values]
    return _in_pairs(lambda a, b: logic(op, a, b), held or [lit(op == "and")])


def extreme(op: str) -> Callable[..., Expr]:
    """torch.amax or torch.amin."""

    def reduced(input: Any, dim: Any = None, keepdim: bool = False) -> Expr:
        return _reduced(input, dim, keepdim, lambda values: _in_pairs(lambda a, b: binary(op, a, b), _some(op, values)))

    return reduced


def _some(op: str, values: tuple[Expr, ...]) -> tuple[Expr, ...]:
    if not values:
        raise FormulaError(f"{op} at {caller_line()}", got="a row of no entries", expected="one or more", hint=_REDUCED)
    return values


def dot(input: Any, other: Any) -> Expr:
    """torch.dot: the sum of products."""
    return total(spread(lambda a, b: binary("mul", a, b), Vector(_all_of(input)), Vector(_all_of(other))))


def unsqueeze(input: Any, dim: int) -> Expr:
    """A single value as a row of one."""
    if isinstance(input, Many) or dim not in (-1, 0):
        got = f"dim {shown(dim)} of {'a row' if isinstance(input, Many) else 'a single value'}"
        raise FormulaError(f"unsqueeze at {caller_line()}", got=got, expected="-1 of a single value", hint=_REDUCED)
    return Vector([as_expr(input)])


def squeeze(input: Any, dim: int = -1) -> Expr:
    """A row of one as a single value; any other as it is."""
    values = _all_of(input)
    return values[0] if len(values) == 1 else Vector(values)


OF_ROWS: dict[str, Callable[..., Expr]] = {
    "sum": total,
    "mean": mean,
    "any": any_of,
    "all": all_of,
    "amax": extreme("max"),
    "amin": extreme("min"),
    "dot": dot,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
}
