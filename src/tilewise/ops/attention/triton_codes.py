"""Attention over codes by the portable kernel: its plan."""

from __future__ import annotations

import torch

from tilewise.core.dispatch import capability
from tilewise.ops.attention.codes import backward as backward
from tilewise.ops.attention.codes import encoded
from tilewise.ops.attention.configs import Config, Row, first_fit, padded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_attention import lists_of
from tilewise.ops.attention.triton_codes_fwd import QUERIES, attention_codes_fwd
from tilewise.ops.attention.triton_keys import call_key
from tilewise.ops.attention.triton_plans import (
    Listing,
    batches_of,
    formula_arguments,
    functions,
    lengths_of,
    slots_of,
    strides_of,
    together,
    visibility,
)
from tilewise.ops.triton_launch import Plan, Plans, on_device
from tilewise.quant.blocks import Quantized

_M = QUERIES.value
# chosen by compiling with few spills (tests/compile/resources.json)
_TILES = (Row(64, Config(_M, 64, 4, 2)), Row(128, Config(_M, 32, 4, 2)), Row(256, Config(_M, 32, 8, 1)))
_LEAST = 32  # columns of a product of bytes
_PLANS = Plans()


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Triton kernel."""
    x = encoded(call)
    key = call_key(call)
    key = None if key is None else (key, x.scheme)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, forward_plan(x, call))
    o, lse = call.new_output(), call.new_lse()
    q, k, v = (y.view(torch.uint8) if y.dtype == torch.float8_e4m3fn else y for y in (x.q, x.k, x.v))
    tensors = (q, k, v, x.k_exact, call.sink, o, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.skip)
    scales = (x.q_scale, x.k_scale, x.v_scale, x.q_mean, x.v_mean, x.q_bias)
    with on_device(o):
        lists = lists_of(call, plan, False, key, {})
        plan.launch((*tensors, *scales, *lists), formula_arguments(call), (call.scale,))
    return o, lse


def tiles(head_dim: int, head_dim_v: int) -> Config:
    """The tiles of `attention_codes_fwd`."""
    return first_fit(_TILES, head_dim, head_dim_v, "plain")


def forward_plan(x: Quantized, call: Call) -> Plan:
    """The plan of `attention_codes_fwd`."""
    mask, score = functions(call)
    side = score and score.queries
    cfg = tiles(call.head_dim, call.head_dim_v)
    slots = slots_of(call, cfg, False)
    pairs = call.num_heads_q * batches_of(call)
    block_d, block_dv = (max(_LEAST, padded(d)) for d in (call.head_dim, call.head_dim_v))
    exact = (0, 0, 0) if x.k_exact is None else strides_of(x.k_exact)
    return Plan(
        attention_codes_fwd,
        grid=slots * pairs,
        strides=(*strides_of(x.q), *strides_of(x.k), *exact, *_of_values(x), *strides_of(call.new_output())),
        sizes=(*lengths_of(call), slots, together(call, mask, slots, pairs), x.q_scale.shape[-2], x.k_scale.shape[-2]),
        constants=(
            call.num_heads_q, call.group, call.head_dim, call.head_dim_v, cfg.block_m, cfg.block_n, block_d, block_dv,
            *visibility(mask, False), side and side.once, side and side.apply,
            call.score is not None or call.scale <= 0.0, call.packed, "fp8" if x.scheme.qk == "fp8" else "int8",
            x.scheme.pv, x.q_scale.shape[-1], x.k_scale.shape[-1], x.scheme.v_scale == "block", x.scheme.p_largest,
            capability(call.q.device) >= 89, call.skip is not None,
        ),
        warps=cfg.warps,
        stages=cfg.stages,
        extra=(cfg, mask, Listing()),
    )  # fmt: skip


def _of_values(x: Quantized) -> tuple[int, int, int, int]:
    """(batch, row, head, channel) strides of values: FP8 stands by channel, packed without a batch."""
    if x.scheme.pv != "fp8":
        return (*strides_of(x.v), 1)
    heads, channels = x.v.stride()[-3:-1]
    return (x.v.stride(0) if x.v.ndim == 4 else 0, 1, heads, channels)
