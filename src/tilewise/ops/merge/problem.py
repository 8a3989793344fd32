"""The facts of one call of `merge` or `merge_states`, checked before any work."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.readback import host_values, values_checked
from tilewise.core.tensors import as_int32, check_dense, refuse_batched

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEPARATE_LIMIT = 8  # states that a kernel takes as tensors of their own; more are stacked first


class Form(Enum):
    """Where the states of a row lie: in tensors of their own, along the first dimension of one tensor, or in the rows
    of one tensor that `indptr` gives it.
    """

    SEPARATE = "separate"
    STACKED = "stacked"
    RAGGED = "ragged"


@dataclass(eq=False, slots=True)
class Call:
    """One call: its states as they came, and the dtype of the merged o. Implementations read this and nothing else.

    `o` and `lse` hold one tensor but for Form.SEPARATE. `indptr` is there for Form.RAGGED.
    """

    o: tuple[torch.Tensor, ...]
    lse: tuple[torch.Tensor, ...]
    indptr: torch.Tensor | None
    form: Form
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums, and of lse."""
        return wide_of(self.dtype)

    @property
    def wants_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*self.o, *self.lse))

    def new_output(self) -> torch.Tensor:
        shape = list(self.o[0].shape)
        if self.form is Form.STACKED:
            del shape[0]
        elif self.indptr is not None:
            shape[0] = self.indptr.shape[0] - 1
        return torch.empty(shape, dtype=self.dtype, device=self.o[0].device)

    def new_lse(self) -> torch.Tensor:
        shape = list(self.lse[0].shape)
        if self.form is Form.STACKED:
            del shape[0]
        elif self.indptr is not None:
            shape[1] = self.indptr.shape[0] - 1
        return torch.empty(shape, dtype=self.wide, device=self.o[0].device)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states of this dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def o_view(x: torch.Tensor, form: Form) -> torch.Tensor:
    """An o of any form, or its gradient, as (states, batch, seqlen, heads, head_dim_v)."""
    if form is Form.RAGGED:
        return x[:, None, None]
    x = x if form is Form.STACKED else x[None]
    return x if x.ndim == 5 else x[:, None]


def lse_view(x: torch.Tensor, form: Form) -> torch.Tensor:
    """An lse of any form, or its gradient, as (states, batch, heads, seqlen)."""
    if form is Form.RAGGED:
        return x.t()[:, None, :, None]
    x = x if form is Form.STACKED else x[None]
    return x if x.ndim == 4 else x[:, None]


def separate_call(states: Sequence[Any], dtype: Any) -> Call:
    """The call of `merge`; raises InputError."""
    if not states:
        raise InputError("states", got="none", expected="one or more pairs (o, lse)", hint="merge((o1, lse1), ...)")
    for n, state in enumerate(states):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise InputError(
                f"state {n}",
                got=type(state).__name__,
                expected="a pair (o, lse)",
                hint="pass what attention_with_lse returns: merge((o1, lse1), (o2, lse2)); tensors of several states"
                " go to merge_states",
            )
    one = len(states) == 1
    o, lse = tuple(state[0] for state in states), tuple(state[1] for state in states)
    for n, (x, y) in enumerate(zip(o, lse, strict=True)):
        names = ("o", "lse") if one else (f"o of state {n}", f"lse of state {n}")
        _check_state(names, x, y, Form.SEPARATE)
        for name, this, first in ((names[0], x, o[0]), (names[1], y, lse[0])):
            if this.shape != first.shape or this.device != first.device:
                raise InputError(
                    name,
                    got=f"shape {tuple(this.shape)} on {this.device}",
                    expected=f"{tuple(first.shape)} on {first.device}, as state 0 has it",
                    hint="states are of the same queries and heads",
                )
        if (x.dtype == torch.float64) != (o[0].dtype == torch.float64):
            raise InputError(
                names[0],
                got=f"{x.dtype} beside {o[0].dtype}",
                expected="float64 in every state or in none",
                hint="convert o and lse of all states with .double()",
            )
    common = functools.reduce(torch.promote_types, (x.dtype for x in o))
    kept = _output_dtype(dtype, common)
    if len(states) > SEPARATE_LIMIT:
        return Call((torch.stack([x.to(common) for x in o]),), (torch.stack(lse),), None, Form.STACKED, kept)
    return Call(o, lse, None, Form.SEPARATE, kept)


def joined_call(o: Any, lse: Any, indptr: Any, dtype: Any) -> Call:
    """The call of `merge_states`; raises InputError."""
    form = Form.STACKED if indptr is None else Form.RAGGED
    _check_state(("o", "lse"), o, lse, form)
    if indptr is not None:
        indptr = as_int32(indptr)
        _check_indptr(indptr, o)
    call = Call((o,), (lse,), indptr, form, _output_dtype(dtype, o.dtype))
    check_values(call)
    return call


_SHAPES = {  # of o and lse by form, packed first
    Form.SEPARATE: {3: ("(total, heads, head_dim_v)", "(heads, total)"),
                    4: ("(batch, seqlen, heads, head_dim_v)", "(batch, heads, seqlen)")},
    Form.STACKED: {4: ("(states, total, heads, head_dim_v)", "(states, heads, total)"),
                   5: ("(states, batch, seqlen, heads, head_dim_v)", "(states, batch, heads, seqlen)")},
    Form.RAGGED: {3: ("(total_states, heads, head_dim_v)", "(heads, total_states)")},
}  # fmt: skip


def _check_state(names: tuple[str, str], o: Any, lse: Any, form: Form) -> None:
    """Types, ranks, dtypes, devices and shapes of an o and its lse."""
    shapes = _SHAPES[form]
    for name, x, at in ((names[0], o, 0), (names[1], lse, 1)):
        expected = "a dense tensor " + " or ".join(pair[at] for pair in shapes.values())
        check_dense(name, x, expected, "attention_with_lse returns o and lse")
    if o.ndim not in shapes or o.shape[-1] < 1:
        expected = " or ".join(pair[0] for pair in shapes.values())
        hint = (
            "states of one call each go to merge((o1, lse1), (o2, lse2)); merge_states takes them stacked"
            if form is Form.STACKED
            else "as attention_with_lse returns o"
        )
        raise InputError(names[0], got=f"shape {tuple(o.shape)}", expected=expected, hint=hint)
    if o.dtype not in DTYPES:
        raise InputError(
            names[0],
            got=str(o.dtype),
            expected="float16, bfloat16, float32 or float64",
            hint="convert it, for example with .float()",
        )
    if o.stride(-1) != 1 and o.shape[-1] > 1:
        raise InputError(
            names[0],
            got=f"strides {o.stride()}",
            expected="unit stride in the last dimension",
            hint="call .contiguous()",
        )
    wanted = (*o.shape[:-3], o.shape[-2], o.shape[-3])
    if lse.shape != wanted:
        raise InputError(
            names[1],
            got=f"shape {tuple(lse.shape)}",
            expected=f"{tuple(wanted)}: {shapes[o.ndim][1]} of an o {shapes[o.ndim][0]}",
            hint="heads come before rows in lse: lse.transpose(-1, -2)",
        )
    if lse.dtype != wide_of(o.dtype):
        raise InputError(
            names[1],
            got=str(lse.dtype),
            expected=f"{wide_of(o.dtype)} for an o of {o.dtype}",
            hint="keep lse as attention_with_lse returns it; one of base 2 needs a factor of log(2)",
        )
    if lse.device != o.device:
        raise InputError(
            names[1],
            got=f"device {lse.device}",
            expected=f"{o.device}, the device of o",
            hint="move it: .to(o.device)",
        )


_INDPTR_HINT = "cumulative numbers of states: torch.tensor([0, *numbers], device=o.device).cumsum(0)"


def _check_indptr(indptr: Any, o: torch.Tensor) -> None:
    """Type, rank, dtype, device and memory of indptr."""
    expected = "a contiguous int32 or int64 tensor (rows + 1,) on the device of o"
    check_dense("indptr", indptr, expected, _INDPTR_HINT)
    refuse_batched("indptr", (indptr,))
    if not isinstance(indptr, torch.Tensor) or indptr.ndim != 1 or indptr.shape[0] < 1:
        got = tuple(indptr.shape) if isinstance(indptr, torch.Tensor) else type(indptr).__name__
        raise InputError("indptr", got=got, expected=expected, hint=_INDPTR_HINT)
    if indptr.dtype != torch.int32 or indptr.device != o.device or not indptr.is_contiguous():
        got = f"{indptr.dtype} on {indptr.device}, stride {indptr.stride(0)}"
        raise InputError("indptr", got=got, expected=expected, hint="use .to(o.device, torch.int32).contiguous()")


def check_values(call: Call) -> None:
    """The check that needs values: those of indptr, where values are checked, and unless they cannot be read now."""
    checked = call.indptr is not None and values_checked(call.indptr.device) and not call.indptr.is_meta
    values = host_values(call.indptr) if call.indptr is not None and checked else None
    if values is None:
        return
    total = call.o[0].shape[0]
    if values[0] != 0 or values[-1] != total:
        raise InputError(
            "indptr",
            got=f"first {values[0]}, last {values[-1]}",
            expected=f"from 0 to {total}, the number of states",
            hint=_INDPTR_HINT,
        )
    fall = next((pair for pair in itertools.pairwise(values) if pair[1] < pair[0]), None)
    if fall is not None:
        raise InputError(
            "indptr", got=f"{fall[1]} after {fall[0]}", expected="values that never fall", hint=_INDPTR_HINT
        )


def _output_dtype(dtype: Any, common: torch.dtype) -> torch.dtype:
    """The dtype of the merged o: the caller's, or what the states have in common."""
    if dtype is None:
        return common
    allowed = (torch.float64,) if common == torch.float64 else DTYPES[:3]
    if dtype not in allowed:
        names = ", ".join(str(x) for x in allowed)
        raise InputError(
            "dtype", got=shown(dtype), expected=f"None or one of {names} for an o of {common}", hint="None keeps it"
        )
    kept: torch.dtype = dtype
    return kept
