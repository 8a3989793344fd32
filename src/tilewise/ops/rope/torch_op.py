"""As PyTorch sees it: turning in place, a plain call in eager mode, inside torch.compile a custom operator; and queries
and keys out of one tensor with values, whose gradient is one.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import Row
from tilewise.core.tensors import recorded
from tilewise.ops.derivatives import run_backward
from tilewise.ops.forward_mode import refuse_forward_mode
from tilewise.ops.rope import composed
from tilewise.ops.rope.problem import Call
from tilewise.ops.rope.table import ROPE, ROWS


def turn_in_place(call: Call, impl: str | None, traced: bool) -> None:
    """q and k become what they are turned; raises InputError for an unknown `impl`, UnsupportedError where nothing
    runs this call.
    """
    row = dispatch.choose(ROWS, "rope", call, impl)
    if traced:
        assert call.q is not None
        inplace_operator(call.q, call.k, call.cos, call.sin, call.positions, call.interleaved, row.name)
    else:
        _run(row, call)


def _run(row: Row[Call], call: Call) -> None:
    if call.positions.numel():
        row.function(row.forward)(call, call.given)
        counted = [x for x in call.given.values() if not x.is_inference()]
        torch.autograd.graph.increment_version(counted)


def _turn(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    interleaved: bool, impl: str,
) -> None:  # fmt: skip
    heads_k = 0 if k is None else k.shape[-2]
    call = Call(q, k, cos, sin, positions, q.shape[-2], heads_k, q.shape[-1], interleaved, q.dtype)
    _run(dispatch.named(ROWS, impl), call)


inplace_operator = torch.library.custom_op("tilewise::rope_inplace", _turn, mutates_args=("q", "k"))


# out of one tensor -------------------------------------------------------------------------------------------------


class _Joint(torch.autograd.Function):
    """v is a view, which no custom operator may return, so torch.compile traces this and finds the operators inside."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
        heads_q: int, heads_k: int, interleaved: bool, impl: str,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(cos, sin, positions)
        ctx.how = interleaved, impl
        q, k, v = torch.split(qkv, [heads_q, heads_k, heads_k], -2)
        call = Call(q, k, cos, sin, positions, heads_q, heads_k, qkv.shape[-1], interleaved, qkv.dtype)
        return *ROPE(call, impl), v

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:
        angles = ctx.saved_tensors

        def first(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> list[torch.Tensor]:
            gradient = joint_gradient if recorded((dq, dk, dv)) else _gradient
            return [gradient(dq, dk, dv, *angles, *ctx.how)]

        def by_operations(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> list[torch.Tensor]:
            cos, sin, positions = angles
            call = _joint_call(dq, dk, cos, sin, positions, ctx.how[0])
            return [composed.backward(call, {}, (dq, dk, dv), ("qkv",))["qkv"]]

        return *run_backward("rope_qkv", first, by_operations, (dq, dk, dv), 3), *[None] * 7


def turn_joint(qkv: torch.Tensor, call: Call, impl: str | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) of qkv, whose first heads are `call`'s, connected to autograd; raises as `turn_in_place`."""
    row = dispatch.choose(ROWS, "rope", call, impl)
    how = (call.cos, call.sin, call.positions, call.heads_q, call.heads_k, call.interleaved, row.name)
    q, k, v = _Joint.apply(qkv, *how)  # type: ignore[no-untyped-call]
    return q, k, v


def _gradient(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    interleaved: bool, impl: str,
) -> torch.Tensor:  # fmt: skip
    call = _joint_call(dq, dk, cos, sin, positions, interleaved)
    return ROPE.run_backward(dispatch.named(ROWS, impl), call, {}, (dq, dk, dv), ("qkv",))["qkv"]


def _joint_call(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> Call:
    """The call that a backward sees."""
    return Call(None, None, cos, sin, positions, dq.shape[-2], dk.shape[-2], dq.shape[-1], interleaved, dq.dtype)


def _fake_gradient(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *_: Any) -> torch.Tensor:
    return dq.new_empty(*dq.shape[:-2], dq.shape[-2] + 2 * dk.shape[-2], dq.shape[-1])


joint_gradient = torch.library.custom_op("tilewise::rope_qkv_backward", _gradient, mutates_args=())
joint_gradient.register_fake(_fake_gradient)
refuse_forward_mode("rope", inplace_operator, joint_gradient)
