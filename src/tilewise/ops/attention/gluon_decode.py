"""Few queries over pages on Hopper: the plan of the Gluon kernel."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from tilewise.layouts import Pages
from tilewise.ops.attention import triton_decode, triton_paged
from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.gluon_sm90_decode import attention_decode_sm90
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.sharing import requests_of_tile
from tilewise.ops.attention.triton_launch import Plan, Plans
from tilewise.ops.attention.triton_paged import Planned, PlannedCalls, Work, rows_of_tile, strides_of_pages, work_of
from tilewise.ops.attention.triton_plans import functions, multiprocessors

_PLANS = Plans()
_SHARED = 220 * 1024  # bytes for tiles
_ROUNDS = 3  # pieces of a large share: most of it first, then half of the rest each
_REGISTERS = {
    16: (160, 128),
    32: (168, 144),
    64: (152, 120),
}  # by rows of a tile, of a thread that fetches, and of one that merges
_ENDLESS = 2**30  # tokens of a page where each request has but one, so that lengths compile nothing
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
    shared: int  # requests of a tile of a prefix, 0 where none is shared
    rows_of_part: int
    merged: int  # rows of a part that are merged at a time
    registers: int
    registers_of_merge: int
    rows: Any
    mask_once: Any
    visible: Any
    score_once: Any
    score: Any


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a call: the plan, then all tiles. Keys that do not start at 16 bytes, portable kernels read."""
    if _starts_elsewhere(call):
        return triton_paged.forward(call) if call.pages is not None else _split(call)
    if call.pages is None:
        call = copy.copy(call)
        call.pages = _rows_as_pages(call)
    return triton_paged.planned_forward(call, _PLANS, _plans, _pool)


def plan(call: Call) -> PlannedCalls | None:
    """The plan that calls of one kind share; none for keys in rows, whose lengths are all alike."""
    if call.pages is None:
        return None
    return triton_paged.plan(call) if _starts_elsewhere(call) else PlannedCalls(call, _PLANS, _plans, _pool)


def _pool(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return call.k, call.v


def _starts_elsewhere(call: Call) -> bool:
    return (call.k.data_ptr() | call.v.data_ptr()) % 16 != 0


def _split(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = triton_decode.forward(call)
    return found


def _rows_as_pages(call: Call) -> Pages:
    """Every batch element's keys as a page of its own; made anew inside a CUDA graph, which has its own memory."""
    stream = None
    if call.q.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return _whole.__wrapped__(call.batch, call.k.shape[1], call.q.device, None)
        stream = torch.cuda.current_stream(call.q.device).cuda_stream
    return _whole(call.batch, call.k.shape[1], call.q.device, stream)


@functools.lru_cache(maxsize=64)
def _whole(batch: int, seqlen_k: int, device: torch.device, _stream: int | None) -> Pages:
    table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    return Pages(table, None, torch.full((batch,), seqlen_k, dtype=torch.int32, device=device))


def _plans(call: Call) -> Planned:
    mask, score = functions(call)
    block_d, block_dv = padded(call.head_dim), padded(call.head_dim_v)
    block_r = rows_of_tile(call)
    block_n = 128 if block_d + block_dv <= 256 and block_r <= 32 else 64
    rest = _SHARED - 2 * block_r * (2 * block_d + block_n)
    stages = min(4, rest // (2 * block_n * (block_d + block_dv)))
    programs = multiprocessors(call.q.device)
    shared = requests_of_tile(call)
    rows = block_r if call.packed or shared else min(block_r, triton.next_power_of_2(call.rows_q * call.group))
    side = mask and mask.queries
    assert call.pages is not None
    one_each = call.pages.first is None and call.pages.longest == 1
    fixed = Fixed(
        call.num_heads_q, call.group, call.head_dim, call.head_dim_v,
        _ENDLESS if one_each else call.k.shape[1], call.packed, call.sink is not None, block_r, block_n, block_d,
        block_dv, stages, _ROUNDS, shared, rows, min(rows, _MERGED // block_dv), *_REGISTERS[block_r],
        side and side.rows, side and side.once, side and side.visible, score and score.queries.once,
        score and score.queries.apply,
    )  # fmt: skip
    fixed = Fixed(*(gl.constexpr(x) if isinstance(x, int) else x for x in fixed))
    work: Work = work_of(call, block_r, block_n, _ROUNDS * programs, rows, early=True)
    sizes = (call.rows_q, work.slots)
    return work, Plan(attention_decode_sm90, programs, strides_of_pages(call), sizes, (fixed,), 4, 1, early=True)
