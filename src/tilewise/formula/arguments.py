"""Arguments of masks and scores by name: their checks, and the sizes of calls that they are made for."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.tensors import check_dense
from tilewise.formula import expr as e
from tilewise.formula.expr import Expr
from tilewise.formula.sizes import Size


def lead_of(table: torch.Tensor, b: Expr, h: Expr) -> tuple[Expr, Expr]:
    """The indices of a table (1 or batch, 1 or heads, ...) before its last two."""
    return (b if table.shape[0] > 1 else e.lit(0)), (h if table.shape[1] > 1 else e.lit(0))


def sizes_of(name: str, table: torch.Tensor | None, *axes: str) -> tuple[Size, ...]:
    """The sizes of a table that has the last of these axes, as many as it has dimensions."""
    shape = () if table is None else table.shape
    return tuple(Size(name, axis, n) for axis, n in zip(axes[len(axes) - len(shape) :], shape, strict=True))


def sizes_of_table(name: str, table: torch.Tensor) -> tuple[Size, ...]:
    """Of a table (1 or batch, 1 or heads, seqlen_q, seqlen_k)."""
    sizes = sizes_of(name, table, "batch", "num_heads_q", "seqlen_q", "seqlen_k")
    shift = Size(name, "shift", table.shape[3] - table.shape[2])
    return (*(size for size in sizes[:2] if size.extent != 1), *sizes[2:], shift)


def check_integer(
    name: str, value: Any, hint: str, least: int = 1, kind: str = "an integer", most: int | None = None
) -> None:
    """Symbolic integers of torch.compile pass."""
    whole = isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)
    if not isinstance(value, torch.SymInt) and not (whole and value >= least):
        raise InputError(name, got=shown(value), expected=f"{kind} >= {least}", hint=hint)
    if most is not None and not isinstance(value, torch.SymInt) and value > most:
        raise InputError(name, got=shown(value), expected=f"{kind} from {least} to {most}", hint=hint)


def check_tensor(name: str, value: Any, ranks: tuple[int, ...], kind: str, hint: str) -> None:
    """Raise unless `value` is a tensor of these ranks and of `kind`: floating-point, integer, or boolean."""
    wanted = f"{'an' if kind[0] == 'i' else 'a'} {kind} tensor of rank {' or '.join(map(str, ranks))}"
    check_dense(name, value, wanted, hint)
    if value.ndim not in ranks or value.is_floating_point() != (kind == "floating-point") or value.is_complex():
        additive = kind == "boolean" and value.is_floating_point()
        raise InputError(
            name,
            got=f"{value.dtype} of shape {tuple(value.shape)}",
            expected=wanted,
            hint="numbers to add to the scores go to score=tilewise.bias(values)" if additive else hint,
        )
