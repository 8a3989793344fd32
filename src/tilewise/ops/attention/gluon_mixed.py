"""Long prompts beside requests that decode, on Hopper: the kernel of many queries and that of few run at the same time,
each on multiprocessors of its own. Which request is whose, and who has how many, is planned on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.ops.attention import gluon_attention, gluon_decode
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_attention import NO_LISTS, launch_forward
from tilewise.ops.attention.triton_keys import call_key
from tilewise.ops.attention.triton_paged import pool_of
from tilewise.ops.attention.triton_planned import Beside, Planned, launch
from tilewise.ops.attention.triton_plans import multiprocessors
from tilewise.ops.triton_launch import Plan, Plans, on_device

FEW = 64  # rows of queries of a key/value head up to which a request is the other kernel's

_PLANS = Plans()


class _Both(NamedTuple):
    many: Plan
    few: Planned


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by both kernels; by that of many queries alone, where those of few do not reach the keys."""
    if not gluon_attention.reached(call.q, call.k, call.v):
        return gluon_attention.forward(call)
    assert call.pages is not None
    key, limited = call_key(call), gluon_attention.is_limited(call)
    both = _PLANS.get(key and (key, limited))
    if both is None:
        both = _PLANS.put(key and (key, limited), _plans(call, limited))
    o, lse = call.new_output(), call.new_lse()
    shares = torch.empty(3, dtype=torch.int32, device=call.q.device)
    with on_device(call.q):
        memory = both.few.work.memory(call)
        both.few.work.launch(call, memory, shares)
        launch_forward(call, both.many, NO_LISTS, o, lse, (shares, *gluon_attention.pages_of(call)))
        launch(call, both.few, memory, pool_of(call), o, lse, shares)
    return o, lse


def _plans(call: Call, limited: bool) -> _Both:
    many = gluon_attention.forward_plan(call, limited, FEW)
    return _Both(many, gluon_decode.plans_beside(call, Beside(FEW, many.grid, multiprocessors(call.q.device))))
