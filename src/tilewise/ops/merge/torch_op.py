"""Merging as PyTorch sees it: an autograd function in eager mode, a custom operator inside torch.compile.

Both lead to `run_forward` and `run_backward`, which pick the implementation's code by its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.core.dispatch import Row
from tilewise.ops.derivatives import gradients
from tilewise.ops.derivatives import run_backward as differentiable
from tilewise.ops.forward_mode import refuse_forward_mode
from tilewise.ops.merge import composed
from tilewise.ops.merge.problem import Call, Form, check_values
from tilewise.ops.merge.table import ROWS

_BY_NAME = {row.name: row for row in ROWS}
Tensors = list[torch.Tensor]


def _nothing(call: Call) -> bool:
    """Whether no state or no row is there, so that no kernel is needed."""
    return call.o[0].numel() == 0


def run_forward(row: Row[Call], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse)"""
    if _nothing(call):
        return call.new_output().zero_(), call.new_lse().fill_(-torch.inf)
    result: tuple[torch.Tensor, torch.Tensor] = row.function(row.forward)(call)
    return result


def run_backward(row: Row[Call], call: Call, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Gradients of every o and of every lse: d o_n = w_n do, d lse_n = w_n (dlse + <do, o_n - o>)."""
    assert row.backward is not None
    if _nothing(call):
        return [torch.zeros_like(x) for x in call.o], [torch.zeros_like(x) for x in call.lse]
    do = do if do.stride(-1) == 1 or do.shape[-1] == 1 else do.contiguous()
    result: tuple[Tensors, Tensors] = row.function(row.backward)(call, do, dlse)
    return result


# eager -------------------------------------------------------------------------------------------------------------


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Row[Call], call: Call, *states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(*states, call.indptr)
        ctx.row, ctx.form, ctx.dtype = row, call.form, call.dtype
        return run_forward(row, call)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
        *states, indptr = ctx.saved_tensors

        def first(do: torch.Tensor, dlse: torch.Tensor, *states: torch.Tensor) -> Tensors:
            grads_o, grads_lse = run_backward(ctx.row, _of(states, indptr, ctx.form, ctx.dtype), do, dlse)
            return [*grads_o, *grads_lse]

        return None, None, *_differentiable(first, do, dlse, states, indptr, ctx.form, ctx.dtype)


def _of(states: Sequence[torch.Tensor], indptr: torch.Tensor | None, form: Form, dtype: torch.dtype) -> Call:
    """The call of these: every o, then every lse."""
    half = len(states) // 2
    return Call(tuple(states[:half]), tuple(states[half:]), indptr, form, dtype)


def _differentiable(
    first: Callable[..., Tensors], do: torch.Tensor, dlse: torch.Tensor, states: Sequence[torch.Tensor],
    indptr: torch.Tensor | None, form: Form, dtype: torch.dtype,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """Gradients of `states`, which `first` computes, differentiable once more."""

    def by_operations(do: torch.Tensor, dlse: torch.Tensor, *states: torch.Tensor) -> Sequence[torch.Tensor | None]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            views = [x.view_as(x) if x.requires_grad else x.detach() for x in states]
            wanted = [x for x in views if x.requires_grad]
            outputs = composed.forward(_of(views, indptr, form, dtype))
            found = iter(gradients(outputs, wanted, (do, dlse), create_graph))
        return [next(found) if x.requires_grad else None for x in views]

    return differentiable("merge", first, by_operations, [do, dlse, *states], 2)


def eager(row: Row[Call], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse), connected to autograd where a state takes a gradient."""
    if not call.wants_grad:
        return run_forward(row, call)
    result: tuple[torch.Tensor, torch.Tensor] = _Merge.apply(row, call, *call.o, *call.lse)  # type: ignore[no-untyped-call]
    return result


# compiled ----------------------------------------------------------------------------------------------------------

_SCHEMA = "Tensor[] o, Tensor[] lse, Tensor? indptr, str form, ScalarType dtype, str impl"


def _call(o: Tensors, lse: Tensors, indptr: torch.Tensor | None, form: str, dtype: torch.dtype, impl: str) -> Call:
    return Call(tuple(o), tuple(lse), indptr, Form(form), dtype)


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(*args)
    check_values(call)  # nothing had a value when torch.compile saw the arguments
    return run_forward(_BY_NAME[args[-1]], call)


def _backward(do: torch.Tensor, dlse: torch.Tensor, *args: Any) -> Tensors:
    grads_o, grads_lse = run_backward(_BY_NAME[args[-1]], _call(*args), do, dlse)
    return [*grads_o, *grads_lse]


merge_forward = torch.library.custom_op(
    "tilewise::merge_forward", _forward, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
merge_backward = torch.library.custom_op(
    "tilewise::merge_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor dlse, {_SCHEMA}) -> Tensor[]",
)


@merge_forward.register_fake
def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(*args)
    return call.new_output(), call.new_lse()


@merge_backward.register_fake
def _backward_fake(do: torch.Tensor, dlse: torch.Tensor, *args: Any) -> Tensors:
    call = _call(*args)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*call.o, *call.lse)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    o, lse, indptr, *ctx.plain = inputs
    ctx.save_for_backward(*o, *lse, indptr)


def _autograd(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    *states, indptr = ctx.saved_tensors
    half = len(states) // 2

    def first(do: torch.Tensor, dlse: torch.Tensor, *states: torch.Tensor) -> Tensors:
        found: Tensors = merge_backward(do, dlse, list(states[:half]), list(states[half:]), indptr, *ctx.plain)
        return found

    form, dtype, _ = ctx.plain
    found = _differentiable(first, do, dlse, states, indptr, Form(form), dtype)
    return list(found[:half]), list(found[half:]), None, None, None, None


merge_forward.register_autograd(_autograd, setup_context=_setup_context)
refuse_forward_mode("merge", merge_forward, merge_backward)


def compiled(row: Row[Call], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) through the custom operator, which torch.compile keeps whole."""
    result: tuple[torch.Tensor, torch.Tensor] = merge_forward(
        list(call.o), list(call.lse), call.indptr, call.form.value, call.dtype, row.name
    )
    return result
