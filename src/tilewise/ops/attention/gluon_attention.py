"""Attention on Hopper: the plan of the Gluon forward; the backward is the portable one."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.ops.attention import triton_attention
from tilewise.ops.attention.configs import Config, Row, first_fit, padded
from tilewise.ops.attention.gluon_sm90_fwd import attention_fwd_sm90
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_launch import Plan, describable
from tilewise.ops.attention.triton_plans import (
    functions,
    lengths_of,
    multiprocessors,
    slots_of,
    together,
    visibility,
)
from tilewise.ops.attention.variant import formula_kind, is_band

backward = triton_attention.backward

# One compute warpgroup for each 64 queries. Chosen by timing on an H200 (benchmarks/NOTES.md).
_FORWARD = (
    Row(64, Config(128, 128, 4, 2, True), ("lists", "short")),
    Row(64, Config(192, 128, 4, 2, True)),
    Row(128, Config(128, 128, 4, 2, True)),
    Row(256, Config(128, 64, 4, 2, True)),
)
_REGISTERS = {2: 240, 3: 160}  # by number of compute warpgroups
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_SHARED = 226 * 1024  # bytes for tiles; the rest is for barriers and what reductions need
_SHORT = 1536  # queries of a sequence up to which rows of unequal length take smaller tiles
_FEW = 24  # tiles of queries of a sequence up to which tiles of unequal length are divided beforehand


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Gluon forward."""
    return triton_attention.forward(call, forward_plan, _reached)


def _reached(*tensors: torch.Tensor) -> bool:
    return triton_attention.fetchable(*tensors) and all(map(describable, tensors))


def forward_plan(call: Call) -> Plan:
    """The plan of `attention_fwd_sm90`."""
    mask, score = functions(call, "gluon")
    side = score and score.queries
    equal = call.mask is None or is_band(call.mask.text)  # all tiles of queries visit as many tiles of keys
    kind = formula_kind(call.mask and call.mask.text, None)
    if kind == "plain" and not equal and call.rows_q <= _SHORT:
        kind = "short"
    cfg = first_fit(_FORWARD, call.head_dim, call.head_dim_v, kind)
    d, d_v = padded(call.head_dim), padded(call.head_dim_v)
    consumers = cfg.block_m // 64
    slots = slots_of(call, cfg, False)
    pairs = call.num_heads_q * call.batch
    workers, turns = _division(call, mask, equal, slots, pairs)
    return Plan(
        attention_fwd_sm90,
        grid=workers,
        strides=(),
        sizes=(*lengths_of(call), slots, turns, slots * pairs),
        constants=(
            call.num_heads_q, call.group, cfg.block_n, consumers, cfg.stages, *visibility(mask, False),
            side and side.once, side and side.apply, call.score is not None or call.scale <= 0.0,
            mask is not None or call.rows_k % cfg.block_n != 0,
            2 * (cfg.block_m + cfg.stages * cfg.block_n) * (d + d_v) <= _SHARED, _REGISTERS[consumers],
        ),
        warps=cfg.warps,
        stages=cfg.stages,
        extra=(cfg, functions(call)[0]),
        boxes={0: (64, d), 1: (cfg.block_n, d), 2: (cfg.block_n, d_v), 4: (64, d_v)},  # q, k, v, o
        describe=describe,
    )  # fmt: skip


def _division(call: Call, mask: Any, equal: bool, slots: int, pairs: int) -> tuple[int, int]:
    """(programs, pairs of batch and head that take turns).

    A program for each multiprocessor begins a tile while the one before it ends. That needs tiles of equal length, or
    so few of a sequence that two turns, one forth and one back, hold all lengths; others the hardware deals out, one
    a program.
    """
    workers = min(slots * pairs, multiprocessors(call.q.device))
    if equal:
        return workers, together(call, mask, slots, pairs)
    if slots <= _FEW and (mask is None or mask.classify is None):
        return workers, max(1, min(pairs, -(-2 * workers // slots)))
    return slots * pairs, together(call, mask, slots, pairs)


def describe(x: torch.Tensor, box: tuple[int, ...]) -> Any:
    """A descriptor of a (batch, seqlen, heads, dim) tensor whose tiles are (rows, columns) of one sequence and head."""
    row = -(-x.shape[-1] // 8) * 8  # any multiple of 16 bytes does where there is but one
    batch, rows, heads, _ = (stride if size > 1 else row for size, stride in zip(x.shape, x.stride(), strict=True))
    tile = [1, 1, *box]
    layout = gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[x.dtype])
    return TensorDescriptor(x, [x.shape[n] for n in (0, 2, 1, 3)], [batch, heads, rows, 1], tile, layout)
