"""Few queries over pages on Hopper: the plan of the Gluon kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from tilewise.ops.attention import triton_paged
from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.gluon_sm90_decode import attention_decode_sm90
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_launch import Plan, Plans
from tilewise.ops.attention.triton_paged import Planned, Work, rows_of_tile, strides_of_pages, work_of
from tilewise.ops.attention.triton_plans import functions, multiprocessors

_PLANS = Plans()
_SHARED = 220 * 1024  # bytes for tiles
_ROUNDS = 3  # pieces of a large share: most of it first, then half of the rest each
_REGISTERS = 200  # of a thread that fetches
_MERGED = 512  # values of o that are merged at a time


class Fixed(NamedTuple):
    """What is known when the kernel is compiled: numbers, and the formula's device functions, None where not needed."""

    heads: int
    group: int
    head_dim: int
    head_dim_v: int
    page: int
    packed: bool
    sinks: bool
    block_r: int
    block_n: int
    block_d: int
    block_dv: int
    stages: int
    rounds: int
    rows_of_part: int
    merged: int  # rows of a part that are merged at a time
    registers: int
    rows: Any
    mask_once: Any
    visible: Any
    score_once: Any
    score: Any


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a paged call: the plan, then all tiles. Keys that do not start at 16 bytes, the portable kernel
    reads.
    """
    if (call.k.data_ptr() | call.v.data_ptr()) % 16:
        return triton_paged.forward(call)
    return triton_paged.planned_forward(call, _PLANS, _plans, (call.k, call.v))


def _plans(call: Call) -> Planned:
    mask, score = functions(call)
    block_d, block_dv = padded(call.head_dim), padded(call.head_dim_v)
    block_r = rows_of_tile(call)
    block_n = 128 if block_d + block_dv <= 256 and block_r <= 32 else 64
    rest = _SHARED - 2 * block_r * (2 * block_d + block_n)
    stages = min(4, rest // (2 * block_n * (block_d + block_dv)))
    programs = multiprocessors(call.q.device)
    rows = block_r if call.packed else min(block_r, triton.next_power_of_2(call.rows_q * call.group))
    side = mask and mask.queries
    fixed = Fixed(
        call.num_heads_q, call.group, call.head_dim, call.head_dim_v, call.k.shape[1], call.packed,
        call.sink is not None, block_r, block_n, block_d, block_dv, stages, _ROUNDS, rows,
        min(rows, _MERGED // block_dv), _REGISTERS, side and side.rows, side and side.once, side and side.visible,
        score and score.queries.once, score and score.queries.apply,
    )  # fmt: skip
    fixed = Fixed(*(gl.constexpr(x) if isinstance(x, int) else x for x in fixed))
    work: Work = work_of(call, block_r, block_n, _ROUNDS * programs, rows, early=True)
    sizes = (call.rows_q, work.slots)
    return work, Plan(attention_decode_sm90, programs, strides_of_pages(call), sizes, (fixed,), 4, 1, early=True)
