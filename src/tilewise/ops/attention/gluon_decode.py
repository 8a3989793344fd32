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
from tilewise.ops.attention.triton_launch import Plan, Plans
from tilewise.ops.attention.triton_paged import (
    Planned,
    PlannedCalls,
    Work,
    pool_of,
    rows_of_tile,
    strides_of_pages,
    work_of,
)
from tilewise.ops.attention.triton_plans import functions, multiprocessors
from tilewise.quant.codes import BY_DTYPE, KINDS

_PLANS = Plans()
_SHARED = 220 * 1024  # bytes for tiles
_SHARED_OF_TWO = 108 * 1024
_ROUNDS = 3  # pieces of a large share: most of it first, then half of the rest each
# registers of a thread: when the kernel starts, and of one that fetches; by rows of a tile, then where two programs share
# a multiprocessor
_REGISTERS = {16: (None, 160), 32: (None, 168), 64: (None, 152)}
_REGISTERS_OF_TWO = (128, 104)
_REGISTERS_OF_INTEGERS = (128, 120)
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
    rows_of_part: int
    merged: int  # rows of a part that are merged at a time
    encoding: str | None
    integers: bool  # whether its codes are
    registers: int
    alike: bool  # whether keys and values lie alike in their pools
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
    return triton_paged.planned_forward(call, _PLANS, _plans, pool_of)


def plan(call: Call) -> PlannedCalls | None:
    """The plan that calls of one kind share; none for keys in rows, whose lengths are all alike."""
    if call.pages is None:
        return None
    return triton_paged.plan(call) if _starts_elsewhere(call) else PlannedCalls(call, _PLANS, _plans, pool_of)


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
    encoding = None if call.scales is None else BY_DTYPE[call.k.dtype]
    integers = encoding in ("int8", "int4")
    block_r = rows_of_tile(call, least=4, most=16) if integers else rows_of_tile(call)
    of_key = 2 * (block_d + block_dv) if encoding is None else (block_d + block_dv) // KINDS[encoding].in_byte + 8
    two = integers or (block_r == 16 and block_d + block_dv <= 256)  # programs on a multiprocessor: one hides another
    wide = of_key <= 264 if integers else not two and block_d + block_dv <= 256 and block_r <= 32
    block_n = 128 if wide else 64
    rest = (_SHARED_OF_TWO if two else _SHARED) - 2 * block_r * (2 * block_d + block_n)
    stages = min(8 if encoding else 4, rest // (block_n * of_key))
    programs = (2 if two else 1) * multiprocessors(call.q.device)
    registers = _REGISTERS_OF_INTEGERS if integers else _REGISTERS_OF_TWO if two else _REGISTERS[block_r]
    alike = block_d == block_dv and call.k.stride() == call.v.stride()
    rows = block_r if call.packed else min(block_r, triton.next_power_of_2(call.rows_q * call.group))
    side = mask and mask.queries
    assert call.pages is not None
    one_each = call.pages.first is None and call.pages.longest == 1
    fixed = Fixed(
        call.num_heads_q, call.group, call.head_dim, call.head_dim_v,
        _ENDLESS if one_each else call.k.shape[1], call.packed, call.sink is not None, block_r, block_n, block_d,
        block_dv, stages, _ROUNDS, rows, min(rows, _MERGED // block_dv), encoding, integers,
        registers[1], alike, side and side.rows,
        side and side.once, side and side.visible, score and score.queries.once, score and score.queries.apply,
    )  # fmt: skip
    fixed = Fixed(*(gl.constexpr(x) if isinstance(x, int | str) else x for x in fixed))
    work: Work = work_of(call, block_r, block_n, _ROUNDS * programs, rows, early=True)
    sizes = (call.rows_q, work.slots)
    options = {} if registers[0] is None else {"maxnreg": registers[0]}
    tiles = Plan(
        attention_decode_sm90, programs, strides_of_pages(call), sizes, (fixed,), 4, 1, early=True, options=options
    )  # fmt: skip
    return work, tiles
