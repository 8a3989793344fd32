"""Attention over pages of a pool: programs take equal shares of all requests' tiles (`triton_work`), gather their keys
through the block table, and merge what is cut between them (Kwon et al., "PagedAttention"; Ye et al.,
"FlashInfer").

All queries of a group share a head's keys, so a tile has rows of queries and heads: row r is query r // GROUP of head
r % GROUP of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_launch import Plan, Plans, call_key, on_device
from tilewise.ops.attention.triton_plans import (
    bound_arguments,
    formula_arguments,
    functions,
    matmul_precision,
    multiprocessors,
    strides_of,
)
from tilewise.ops.attention.triton_work import (
    LOOK,
    UNIT,
    next_tile,
    plan_work,
    program_start,
    row_pieces,
    rows_of_unit,
    tile_at,
    unit_of,
)
from tilewise.tiles.arithmetic import LN2, LOG2E
from tilewise.tiles.visit import call_once, row_ends

_PROGRAMS_PER_SM = 2
_CHUNK = 1024  # slots that the plan looks at at a time
_PLANS = Plans()
PARTS = tl.constexpr(8)  # partial results of a row that are read at a time
MERGED = tl.constexpr(4)  # rows that are merged at a time


@triton.jit
def pages_of(TABLE, FIRST, stride_t, b, start, keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each token start .. start + BLOCK_N - 1 of request b, or of all where they lie in one."""
    row = TABLE + b.to(tl.int64) * stride_t if FIRST is None else TABLE + tl.load(FIRST + b)
    if PAGE % BLOCK_N == 0:
        return tl.load(row + start // PAGE, mask=start < keys, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        return tl.load(row + tokens // PAGE, mask=tokens < keys, other=0)


@triton.jit
def load_queries(Q, stride_qb, stride_qs, stride_qh, unit, hk, offs_d, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
                 BLOCK_R: tl.constexpr):  # fmt: skip
    in_r, m, h, _i = rows_of_unit(unit, hk, unit[1] * BLOCK_R + tl.arange(0, BLOCK_R), GROUP)
    row = unit[0].to(tl.int64) * stride_qb + (unit[6] + m).to(tl.int64) * stride_qs + h * stride_qh
    return tl.load(Q + row[:, None] + offs_d[None, :], mask=in_r[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, o, l, top, rows_q,
               HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Write rows of o and lse; o is not divided by l yet, both are relative to the maximum `top` (base e), and a sink
    joins here.
    """
    offs_dv = tl.arange(0, o.shape[1])
    if SINK is not None:
        sink = tl.load(SINK + h).to(tl.float32)
        new = tl.maximum(top, sink)
        new = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.math.exp2((top - new) * LOG2E)
        l = l * alpha + tl.math.exp2((sink - new) * LOG2E)
        o = o * alpha[:, None]
        top = new
    empty = l == 0.0
    l_safe = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), top + tl.math.log2(l_safe) * LN2)
    query = unit[6] + m
    b = unit[0].to(tl.int64)
    at = h.to(tl.int64) * rows_q + query if PACKED else (b * HEADS + h) * rows_q + query
    tl.store(LSE + at, lse, mask=in_r)
    row = b * stride_ob + query.to(tl.int64) * stride_os + h * stride_oh
    o = (o / l_safe[:, None]).to(O.dtype.element_ty)
    tl.store(O + row[:, None] + offs_dv[None, :], o, mask=in_r[:, None] & (offs_dv < HEAD_DIM_V)[None, :])


@triton.jit
def store_part(O_PART, LSE_PART, slot, l, top, o):
    """Leave a normalised partial result with its lse; of nothing, lse is -inf."""
    offs_r = tl.arange(0, o.shape[0])
    offs_dv = tl.arange(0, o.shape[1])
    empty = l == 0.0
    l_safe = tl.where(empty, 1.0, l)
    to = slot.to(tl.int64) * o.shape[0] + offs_r
    tl.store(LSE_PART + to, tl.where(empty, float("-inf"), top + tl.math.log2(l_safe) * LN2))
    tl.store(O_PART + to[:, None] * o.shape[1] + offs_dv[None, :], o / l_safe[:, None])


@triton.jit
def merge_row(
    O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, hk, begin, end, rows_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, PACKED: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Fold the parts of a row of tiles that the programs `begin` to `end` left, in order."""
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, PARTS)
    rows = tl.minimum(unit[5] * GROUP - unit[1] * BLOCK_R, BLOCK_R)
    for first in range(0, rows, MERGED):
        offs_r = first + tl.arange(0, MERGED)
        r = unit[1] * BLOCK_R + offs_r
        in_r, m, h, _i = rows_of_unit(unit, hk, r, GROUP)
        top = tl.full([MERGED], float("-inf"), tl.float32)
        total = tl.zeros([MERGED], tl.float32)
        acc = tl.zeros([MERGED, BLOCK_DV], tl.float32)
        for at in range(begin, end + 1, PARTS):
            those = at + offs_p
            slots = tl.where(those == begin, 2 * those + 1, 2 * those)
            row = slots.to(tl.int64)[:, None] * BLOCK_R + offs_r[None, :]
            there = (those <= end)[:, None] & in_r[None, :]
            lse = tl.load(LSE_PART + row, mask=there, other=float("-inf"), cache_modifier=".cg")  # [PARTS, MERGED]
            to = row[:, :, None] * BLOCK_DV + offs_dv[None, None, :]
            o = tl.load(O_PART + to, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            new = tl.maximum(top, tl.max(lse, 0))
            safe = tl.where(new == float("-inf"), 0.0, new)
            weight = tl.math.exp2((lse - safe[None, :]) * LOG2E)
            alpha = tl.math.exp2((top - safe) * LOG2E)
            total = total * alpha + tl.sum(weight, 0)
            acc = acc * alpha[:, None] + tl.sum(o * weight[:, :, None], 0)
            top = new
        store_rows(
            O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, total, top, rows_q, HEADS,
            HEAD_DIM_V, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_t", "rows_q", "slots", "programs", "mask_nums", "score_nums"])
def attention_work(
    Q, K, V, SINK, O, LSE, O_PART, LSE_PART, UNITS, BEFORE, ARRIVED, TABLE, FIRST,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_t, mask_args, mask_nums, score_args, score_nums, rows_q, slots,
    programs, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One loop over a program's tiles, in which units and heads change: what the next tile needs is on its way while
    this one is worked on. Of a row of tiles that is cut, each part is left in memory, and the program that has the last
    one merges them when its own share is done.
    """
    # who am I: one share of the work
    HEADS_KV: tl.constexpr = HEADS // GROUP
    p = tl.program_id(0)
    work = tl.load(BEFORE + slots) * HEADS_KV
    lo = program_start(p, programs, work)
    hi = program_start(p + 1, programs, work)
    first_u, first_hk, first_t = tile_at(lo, BEFORE, UNITS, slots, tl.arange(0, LOOK), HEADS_KV)
    u = first_u
    hk = first_hk
    t = first_t
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    # prologue: the first tile
    unit = unit_of(UNITS, u)
    pages = pages_of(TABLE, FIRST, stride_t, unit[0], (unit[2] + t) * BLOCK_N, unit[4], PAGE, BLOCK_N)
    q = load_queries(Q, stride_qb, stride_qs, stride_qh, unit, hk, offs_d, HEAD_DIM, GROUP, BLOCK_R)
    begun = t > 0  # by another program
    m_i = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)

    # main loop
    for _n in range(lo, hi):
        b = unit[0]
        keys = unit[4]
        coming = unit_of(UNITS, u + 1)
        in_r, m, h, offs_i = rows_of_unit(unit, hk, unit[1] * BLOCK_R + tl.arange(0, BLOCK_R), GROUP)
        offs_n = (unit[2] + t) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_k = offs_n < keys
        offs_j = tl.maximum(tl.minimum(offs_n, keys - 1), 0)
        k_rows = pages.to(tl.int64) * stride_kp + (offs_n % PAGE) * stride_ks + hk * stride_kh
        v_rows = pages.to(tl.int64) * stride_vp + (offs_n % PAGE) * stride_vs + hk * stride_vh
        k = tl.load(K + k_rows[:, None] + offs_d[None, :], mask=in_k[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(
            V + v_rows[:, None] + offs_dv[None, :], mask=in_k[:, None] & (offs_dv < HEAD_DIM_V)[None, :], other=0.0
        )

        # where the next tile is, and its pages
        last = t + 1 == unit[3]
        u, next_hk, t, after = next_tile(u, hk, t, unit, coming, HEADS_KV)
        pages = pages_of(TABLE, FIRST, stride_t, after[0], (after[2] + t) * BLOCK_N, after[4], PAGE, BLOCK_N)

        # scores
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_R, BLOCK_N]
        if SCORE is not None:
            score_once = call_once(b, h[:, None], offs_i[:, None], score_args, score_nums, SCORE_ONCE)
            s = SCORE(s, b, h[:, None], offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
        if VISIBLE is not None:
            mask_once = call_once(b, h[:, None], offs_i[:, None], mask_args, mask_nums, MASK_ONCE)
            seen = VISIBLE(b, h[:, None], offs_i[:, None], offs_j[None, :], mask_once, mask_args, mask_nums)
            seen = seen & in_k[None, :]
        else:
            first_j, last_j = row_ends(b, h, offs_i, 0, keys, mask_args, mask_nums, ROWS)
            seen = (offs_n[None, :] >= first_j[:, None]) & (offs_n[None, :] <= last_j[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.math.exp2((s - m_use[:, None]) * LOG2E)
        alpha = tl.math.exp2((m_i - m_use) * LOG2E)
        l_i = l_i * alpha + tl.sum(w, 1)
        acc = tl.dot(w.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new

        # the end of a row of tiles
        if last:
            if begun:
                store_part(O_PART, LSE_PART, 2 * p, l_i, m_i, acc)
            else:
                store_rows(
                    O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, l_i, m_i, rows_q, HEADS,
                    HEAD_DIM_V, PACKED,
                )  # fmt: skip
            m_i = tl.full([BLOCK_R], float("-inf"), tl.float32)
            l_i = tl.zeros([BLOCK_R], tl.float32)
            acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
            q = load_queries(Q, stride_qb, stride_qs, stride_qh, after, next_hk, offs_d, HEAD_DIM, GROUP, BLOCK_R)
        begun = begun & (last == 0)
        unit = after
        hk = next_hk

    # epilogue: the row that others go on with; then whoever left the last part of a row merges it
    if t > 0:
        store_part(O_PART, LSE_PART, 2 * p + 1 - begun.to(tl.int32), l_i, m_i, acc)
    tl.debug_barrier()
    for side in range(2):  # the row that others began and that ended here, the row that others go on with
        unit = unit_of(UNITS, tl.where(side == 0, first_u, u))
        head = tl.where(side == 0, first_hk, hk)
        start = tl.where(side == 0, lo - first_t, hi - t)
        ended = (side == 0) & (first_t > 0) & (start + unit[3] <= hi)
        if (hi > lo) & (ended | (side == 1) & (t > 0)):
            begin, end = row_pieces(start, unit[3], programs, 1, work)
            if tl.atomic_add(ARRIVED + begin, 1, sem="acq_rel") == end - begin:
                tl.debug_barrier()
                merge_row(
                    O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, head, begin, end, rows_q,
                    HEADS, GROUP, HEAD_DIM_V, PACKED, BLOCK_R, BLOCK_DV,
                )  # fmt: skip


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a paged call: the plan, then all tiles."""
    return planned_forward(call, _PLANS, _plans)


def planned_forward(call: Call, plans: Plans, make: Callable[[Call], Planned]) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a paged call by the plans of its kind, which `make` makes."""
    assert call.pages is not None
    key = call_key(call)
    work, tiles = plans.get(key) or plans.put(key, make(call))
    o, lse = call.new_output(), call.new_lse()
    table, first, _seqlens = call.pages
    with on_device(call.q):
        planned = work.launch(call)
        pointers = (call.q, call.k, call.v, call.sink, o, lse, *work.parts(call), *planned, table, first)
        tiles.launch(pointers, formula_arguments(call), (call.scale,))
    return o, lse


@dataclass(frozen=True)
class Work:
    """The plan of who does which tile, and how large what it writes is."""

    plan: Plan
    slots: int  # for units
    pieces: int
    rows: int  # of a partial result

    def launch(self, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(units, tiles before them, counters of parts) of this call."""
        assert call.pages is not None
        device = call.q.device
        units = torch.empty((self.slots + 2) * UNIT.value, dtype=torch.int32, device=device)
        before = torch.empty(self.slots + 1, dtype=torch.int32, device=device)
        arrived = torch.empty(self.pieces + 1, dtype=torch.int32, device=device)
        self.plan.launch((call.cu_seqlens_q, call.pages.seqlens, units, before, arrived), bound_arguments(call.mask))
        return units, before, arrived

    def parts(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for two partial results of o and lse for each piece."""
        device = call.q.device
        count = 2 * self.pieces * self.rows
        o_part = torch.empty((count, padded(call.head_dim_v)), dtype=torch.float32, device=device)
        return o_part, torch.empty(count, dtype=torch.float32, device=device)


Planned = tuple[Work, Plan]  # who does what, and the kernel that does it


def work_of(call: Call, block_r: int, block_n: int, pieces: int, rows: int, early: bool = False) -> Work:
    """The plan for tiles of so many rows and keys; `rows` of each may be there."""
    mask, _score = functions(call)
    side = mask and mask.queries
    of_request = call.rows_q * call.group
    slots = of_request // block_r + call.batch if call.packed else -(-of_request // block_r) * call.batch
    steps = max(slots + 2, call.batch).bit_length() + 1
    plan = Plan(
        plan_work, 1, (), (call.batch, call.rows_q, slots, pieces),
        (call.packed, call.num_heads_q, call.group, mask is not None and mask.by_head, side and side.tiles, block_r,
         block_n, min(_CHUNK, triton.next_power_of_2(slots)), triton.next_power_of_2(pieces + 1), steps, early), 8, 1,
    )  # fmt: skip
    return Work(plan, slots, pieces, rows)


def strides_of_pages(call: Call) -> tuple[int, ...]:
    """Of q, k, v, o and the block table, as the kernels take them."""
    assert call.pages is not None
    strides_o = strides_of(call.new_output())
    return (*strides_of(call.q), *call.k.stride()[:3], *call.v.stride()[:3], *strides_o, call.pages.row_stride)


def _plans(call: Call) -> Planned:
    mask, score = functions(call)
    block_d, block_dv = padded(call.head_dim), padded(call.head_dim_v)
    block_r, block_n = _tile(call)
    programs = _PROGRAMS_PER_SM * multiprocessors(call.q.device)
    warps = 8 if max(block_d, block_dv) > 256 else 4
    side = mask and mask.queries
    work = work_of(call, block_r, block_n, programs, block_r)
    tiles = Plan(
        attention_work, programs, strides_of_pages(call), (call.rows_q, work.slots, programs),
        (call.num_heads_q, call.group, call.head_dim, call.head_dim_v, call.k.shape[1], call.packed, block_r, block_n,
         block_d, block_dv, side and side.rows, side and side.once, side and side.visible, score and score.queries.once,
         score and score.queries.apply, matmul_precision(call)), warps, 2,
    )  # fmt: skip
    return work, tiles


def rows_of_tile(call: Call) -> int:
    """For the mean request, up to 8,192 values of o."""
    rows = -(-call.rows_q // max(call.batch, 1) if call.packed else call.rows_q) * call.group
    most = max(16, min(64, 8192 // padded(max(call.head_dim, call.head_dim_v))))
    return max(16, min(most, triton.next_power_of_2(rows)))


def _tile(call: Call) -> tuple[int, int]:
    """Rows of a tile, and 32 KB of keys."""
    return rows_of_tile(call), max(16, min(128, 32768 // (padded(call.head_dim) * call.q.element_size())))
