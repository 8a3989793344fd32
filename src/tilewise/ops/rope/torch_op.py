"""Turning in place, as PyTorch sees it: a plain call in eager mode, inside torch.compile a custom operator."""

from __future__ import annotations

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import Row
from tilewise.ops.rope.problem import Call
from tilewise.ops.rope.table import ROWS


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
