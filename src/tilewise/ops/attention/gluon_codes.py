"""Attention over codes on Hopper: the plan of `gluon_sm90_codes`."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.ops.attention.codes import backward as backward
from tilewise.ops.attention.codes import encoded
from tilewise.ops.attention.configs import Config, padded
from tilewise.ops.attention.gluon_attention import (
    SHARED,
    common,
    counter_of,
    cuts_no_tile,
    dealt,
    equal,
    linear_of,
    meets,
    turns_of,
)
from tilewise.ops.attention.gluon_boxes import describe
from tilewise.ops.attention.gluon_fixed import constants
from tilewise.ops.attention.gluon_sm90_codes import attention_codes_sm90
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_attention import lists_of
from tilewise.ops.attention.triton_keys import call_key
from tilewise.ops.attention.triton_plans import (
    Listing,
    batches_of,
    formula_arguments,
    functions,
    lengths_of,
    multiprocessors,
    slots_of,
    together,
)
from tilewise.ops.triton_launch import Plan, Plans, on_device
from tilewise.quant.blocks import Quantized, groups_of_block, num_slots, rows_of_block
from tilewise.quant.schemes import KEYS, Scheme

_CONFIG = Config(128, KEYS, 4, 2, True)
_STAGES = 4  # of keys and values, at most
_AT_ONCE = 128  # channels of values: beside more, a thread has no registers for the next scores
_REGISTERS = 240
_FEWEST_MET = 64  # tiles of an item from which programs meet
_PLANS = Plans()


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Gluon kernel. What it is told beside the codes is made before them: then it is launched while the
    last of them are made.
    """
    assert call.scheme is not None
    with on_device(call.q):
        plan, beside = _prepared(call.scheme, call)
        return _launched(plan, encoded(call), call, beside)


def of_codes(x: Quantized, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of the codes `x`, which `call`'s q, k and v became, under its formula."""
    with on_device(call.q):
        plan, beside = _prepared(x.scheme, call)
        return _launched(plan, x, call, beside)


def _prepared(scheme: Scheme, call: Call) -> tuple[Plan, tuple[Any, ...]]:
    """The plan, and the lists and the counter that the kernel is given."""
    key = call_key(call)
    key = None if key is None else (key, scheme, call.wants_grad, cuts_no_tile(call))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, forward_plan(scheme, call))
    lists = lists_of(call, plan, False, key, {})
    return plan, (*lists, counter_of(call, plan, lists))


def _launched(plan: Plan, x: Quantized, call: Call, beside: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = call.new_output(), call.new_lse()
    channels = x.v.transpose(1, 2) if x.v.ndim == 4 else x.v.transpose(0, 1)[None]
    tensors = (x.q, x.k, channels, call.sink, o, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.skip)
    scales = (x.q_scale, x.k_scale, x.v_scale, x.v_mean, x.q_bias)
    plan.launch((*tensors, *scales, *beside), formula_arguments(call), (call.scale,))
    return o, lse


def forward_plan(scheme: Scheme, call: Call) -> Plan:
    """The plan of `attention_codes_sm90`. Sums of weights as they are before they are codes, which a backward's
    probabilities agree with, take a tenth of the time: else their codes are summed.
    """
    mask, score = functions(call, "gluon")
    d, d_v = padded(call.head_dim), padded(call.head_dim_v)
    cfg = _CONFIG
    slots = slots_of(call, cfg, False)
    pairs = call.num_heads_q * batches_of(call)
    turns = together(call, mask, slots, pairs) if equal(call) else turns_of(call, slots, pairs)
    at_once = min(d_v, _AT_ONCE)
    own, tile = cfg.block_m * (d + 2 * at_once), cfg.block_n * (d + d_v)
    stages = min(_STAGES, (SHARED - own) // tile)
    used, early = own + stages * tile, call.skip is None and d_v == at_once
    return Plan(
        attention_codes_sm90,
        grid=min(slots * pairs, multiprocessors(call.q.device)),
        strides=(),
        sizes=(*lengths_of(call), slots, turns, slots * pairs, _blocks(call, "q"), _blocks(call, "k")),
        constants=(
            constants(
                **common(call, mask, score, score.forward if score else None, cfg, False),
                in_base_2=score is not None and (score.in_base_2 or linear_of(call, score) is not None),
                block_n=cfg.block_n,
                consumers=cfg.block_m // 64,
                stages=stages,
                sinks=call.sink is not None,
                dealt=dealt(call, mask, slots),
                meets=meets(call, -(-call.rows_k // cfg.block_n), _FEWEST_MET),
                ahead=2 if early and used + cfg.block_m * d <= SHARED else 1,
                registers=_REGISTERS,
                head_dim_v=call.head_dim_v,
                codes=True,
                p_largest=int(scheme.p_largest),
                q_groups=groups_of_block("q", scheme.q_scale),
                k_groups=groups_of_block("k", scheme.k_scale),
                biased="k" in scheme.smooth,
                centred="v" in scheme.smooth,
                value_blocks=scheme.v_scale == "block",
                exact_sums=call.wants_grad,
                skips=call.skip is not None,
            ),
        ),
        warps=cfg.warps,
        stages=cfg.stages,
        extra=(cfg, functions(call)[0], Listing(by_length=True)),
        boxes={0: (64, d), 1: (cfg.block_n, d), 2: (d_v, cfg.block_n), 4: (64, at_once)},  # q, k, v, o
        describe=describe,
        early=True,
    )


def _blocks(call: Call, side: str) -> int:
    """How many blocks of queries or keys, or slots for packed ones, a head has."""
    rows = call.rows_q if side == "q" else call.rows_k
    return num_slots(rows, rows_of_block(side), call.batch if call.packed else None)
