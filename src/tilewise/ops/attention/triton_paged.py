"""Attention over pages of a pool: programs take equal shares of all requests' tiles (`triton_work`), gather their keys
through the block table, and merge what is cut between them (Kwon et al., "PagedAttention"; Ye et al.,
"FlashInfer").

All queries of a group share a head's keys, so a tile has rows of queries and heads: row r is query r // GROUP of head
r % GROUP of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewise.formula.emit import encoded
from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.sharing import may_share, most_rows, rows_of_shared_tile
from tilewise.ops.attention.triton_channels import bits_by_channel, keys_by_channel, load_by_channel
from tilewise.ops.attention.triton_fwd import MOST
from tilewise.ops.attention.triton_parts import leave_part, merge_row, merge_share, store_part, store_rows
from tilewise.ops.attention.triton_planned import (
    Planned,
    PlannedCalls,
    PrefixTile,
    Work,
    planned_forward,
    shared_work_of,
    strides_of_pages,
    work_of,
)
from tilewise.ops.attention.triton_plans import functions, matmul_precision, multiprocessors
from tilewise.ops.attention.triton_work import (
    LOOK,
    chunks_of,
    has_all_parts,
    next_tile,
    program_start,
    row_pieces,
    rows_of_unit,
    tile_at,
    unit_of,
)
from tilewise.ops.triton_launch import Plan, Plans
from tilewise.quant.codes import BY_DTYPE
from tilewise.tiles.arithmetic import decoded, softmax_step
from tilewise.tiles.codes import columns_of_codes, load_codes, numbers_of
from tilewise.tiles.visit import call_once, row_ends

PREFIX_KEYS = 64  # of a tile of a prefix, at most: more of them beside its many rows would not fit registers
_PROGRAMS_PER_SM = 2
CHUNK_KEYS = 2048  # of a chunk, where results must not depend on the batch
_PLANS = Plans()


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
def load_queries(Q, stride_qb, stride_qs, stride_qh, unit, hk, offs_d, rows_q, HEAD_DIM: tl.constexpr,
                 GROUP: tl.constexpr, BLOCK_R: tl.constexpr, OF_PREFIXES: tl.constexpr = False):  # fmt: skip
    in_r, m, h, _i = rows_of_unit(unit, hk, unit[1] * BLOCK_R + tl.arange(0, BLOCK_R), GROUP)
    row = h.to(tl.int64) * stride_qh
    if OF_PREFIXES:  # of several requests
        row += (unit[0] + m // rows_q).to(tl.int64) * stride_qb + (m % rows_q).to(tl.int64) * stride_qs
    else:
        row += unit[0].to(tl.int64) * stride_qb + (unit[6] + m).to(tl.int64) * stride_qs
    return tl.load(Q + row[:, None] + offs_d[None, :], mask=in_r[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_scales(SCALES, pages, offsets, hk, in_k, BITS: tl.constexpr):
    """(of keys, if by token, of values) of a tile's tokens; SCALES are two tensors, then the strides of each, then what
    `triton_channels` has  # [BLOCK_N]
    """
    page = pages.to(tl.int64)
    v_at = page * decoded(SCALES[5]) + offsets * decoded(SCALES[6]) + hk * decoded(SCALES[7])
    k_scale = in_k
    if not BITS:
        k_at = page * decoded(SCALES[2]) + offsets * decoded(SCALES[3]) + hk * decoded(SCALES[4])
        k_scale = tl.load(SCALES[0] + k_at, mask=in_k, other=0.0)
    return k_scale, tl.load(SCALES[1] + v_at, mask=in_k, other=0.0)


@triton.jit
def add_scaled(acc, w, v, v_scale, PRECISION: tl.constexpr):
    """acc + (w * v_scale) v."""
    if v.dtype == tl.float16:  # whose small numbers are few: what is rounded to it is w times at most 1
        top = tl.max(v_scale, 0)
        top = tl.where(top > 0, top, 1.0)
        w = w * (v_scale / top)[None, :]
        return acc + tl.dot(w.to(v.dtype), v, input_precision=PRECISION) * top
    else:
        return tl.dot((w * v_scale[None, :]).to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def load_keys(K, V, SCALES, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, pages, unit, hk, tile,
              offs_d, offs_dv, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ENCODING: tl.constexpr,
              BITS: tl.constexpr):  # fmt: skip
    """(keys and values, or their codes, of one of a unit's tiles, their scales, their positions)."""
    offs_n = (unit[2] + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_k = offs_n < unit[4]
    place, head = (offs_n % PAGE).to(tl.int64), hk.to(tl.int64)  # whatever lies outermost in the pool
    k_rows = pages.to(tl.int64) * stride_kp + place * stride_ks + head * stride_kh
    v_rows = pages.to(tl.int64) * stride_vp + place * stride_vs + head * stride_vh
    scales = (in_k,)
    if ENCODING is None:
        k = tl.load(K + k_rows[:, None] + offs_d[None, :], mask=in_k[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(
            V + v_rows[:, None] + offs_dv[None, :], mask=in_k[:, None] & (offs_dv < HEAD_DIM_V)[None, :], other=0.0
        )
    else:
        if BITS:
            k = load_by_channel(
                K, SCALES, k_rows, pages, offs_n % PAGE, in_k, hk, offs_d, HEAD_DIM, BLOCK_D, BITS, PAGE % BLOCK_N == 0
            )
        else:
            k = load_codes(K, k_rows, in_k, HEAD_DIM, BLOCK_D, ENCODING)
        v = load_codes(V, v_rows, in_k, HEAD_DIM_V, BLOCK_DV, ENCODING)
        scales = load_scales(SCALES, pages, offs_n % PAGE, hk, in_k, BITS)
    return k, v, scales, offs_n


@triton.jit
def fold_keys(q, k, v, scales, m_i, l_i, acc, unit, h, offs_i, offs_n, mask_args, mask_nums, score_args, score_nums,
              scale, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr, SCORE_ONCE: tl.constexpr,
              SCORE: tl.constexpr, PRECISION: tl.constexpr, ENCODING: tl.constexpr,
              BITS: tl.constexpr):  # fmt: skip
    """The online softmax's state (maximum, sum, sum of values) after one more tile."""
    b = unit[0]
    keys = unit[4]
    in_k = offs_n < keys
    offs_j = tl.maximum(tl.minimum(offs_n, keys - 1), 0)
    if BITS:
        k = keys_by_channel(k, BITS).to(q.dtype)
    elif ENCODING is not None:
        k = numbers_of(k, ENCODING).to(q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_R, BLOCK_N]
    if ENCODING is not None and not BITS:
        s *= scales[0][None, :]
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
    m_new, l_i, w, alpha = softmax_step(s, m_i, l_i)
    if ENCODING is None:
        acc = tl.dot(w.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    else:
        acc = add_scaled(acc * alpha[:, None], w, numbers_of(v, ENCODING).to(q.dtype), scales[1], PRECISION)
    return m_new, l_i, acc


@triton.jit(do_not_specialize=["stride_t", "rows_q", "slots", "programs", "mask_nums", "score_nums"])
def attention_work(
    Q, K, V, SINK, O, LSE, O_PART, LSE_PART, UNITS, BEFORE, ARRIVED, TABLE, FIRST, SCALES, PREFIXES,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_t, mask_args, mask_nums, score_args, score_nums, rows_q, slots,
    programs, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr, ENCODING: tl.constexpr,
    BITS: tl.constexpr, OF_PREFIXES: tl.constexpr, PREFIX_TILE: tl.constexpr,
):  # fmt: skip
    """One loop over a program's tiles, in which units and heads change: what the next tile needs is on its way while
    this one is worked on. Of a row of tiles that is cut, each part is left in memory, and the program that has the last
    one merges them when its own share is done. Where prefixes are shared (`triton_prefixes`), the launch OF_PREFIXES
    leaves all that it has, and the one over PREFIXES, which that did in tiles as PREFIX_TILE says, merges it.
    """
    # who am I: one share of the work
    HEADS_KV: tl.constexpr = HEADS // GROUP
    p = tl.program_id(0)
    work = tl.load(BEFORE + slots) * HEADS_KV
    if OF_PREFIXES:
        programs = tl.load(BEFORE + slots + 1)
        if p >= programs:
            return
    lo = program_start(p, programs, work)
    hi = program_start(p + 1, programs, work)
    first_u, first_hk, first_t = tile_at(lo, BEFORE, UNITS, slots, tl.arange(0, LOOK), HEADS_KV)
    u = first_u
    hk = first_hk
    t = first_t
    offs_d = columns_of_codes(tl.arange(0, BLOCK_D), HEAD_DIM, ENCODING, BITS)
    offs_dv = tl.arange(0, BLOCK_DV)

    # prologue: the first tile
    unit = unit_of(UNITS, u)
    pages = pages_of(TABLE, FIRST, stride_t, unit[0], (unit[2] + t) * BLOCK_N, unit[4], PAGE, BLOCK_N)
    q = load_queries(
        Q, stride_qb, stride_qs, stride_qh, unit, hk, offs_d, rows_q, HEAD_DIM, GROUP, BLOCK_R, OF_PREFIXES
    )
    begun = t > 0  # by another program
    m_i = tl.full([BLOCK_R], float("-inf") if SCORE is None else -MOST, tl.float32)
    l_i = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)

    # main loop
    for _n in range(lo, hi):
        coming = unit_of(UNITS, u + 1)
        in_r, m, h, offs_i = rows_of_unit(unit, hk, unit[1] * BLOCK_R + tl.arange(0, BLOCK_R), GROUP)
        k, v, scales, offs_n = load_keys(
            K, V, SCALES, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, pages, unit, hk, t, offs_d,
            offs_dv, HEAD_DIM, HEAD_DIM_V, PAGE, BLOCK_N, BLOCK_D, BLOCK_DV, ENCODING, BITS,
        )  # fmt: skip

        # where the next tile is, and its pages
        last = t + 1 == unit[3]
        u, next_hk, t, after = next_tile(u, hk, t, unit, coming, HEADS_KV)
        pages = pages_of(TABLE, FIRST, stride_t, after[0], (after[2] + t) * BLOCK_N, after[4], PAGE, BLOCK_N)

        m_i, l_i, acc = fold_keys(
            q, k, v, scales, m_i, l_i, acc, unit, h, offs_i, offs_n, mask_args, mask_nums, score_args, score_nums,
            scale, ROWS, MASK_ONCE, VISIBLE, SCORE_ONCE, SCORE, PRECISION, ENCODING, BITS,
        )  # fmt: skip

        # the end of a row of tiles, or of this program's part of one that another began
        if last:
            leave = begun
            if OF_PREFIXES:
                leave = last
            elif PREFIXES is not None:
                leave = begun | (unit[2] > 0)
            if leave:
                leave_part(
                    O_PART, LSE_PART, unit, hk, p, 0, l_i, m_i, acc, slots, rows_q, HEADS_KV, GROUP, OF_PREFIXES,
                    PREFIX_TILE,
                )  # fmt: skip
            else:
                store_rows(
                    O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, l_i, m_i, rows_q, HEADS,
                    HEAD_DIM_V, PACKED, ENCODING,
                )  # fmt: skip
            m_i = tl.full([BLOCK_R], float("-inf") if SCORE is None else -MOST, tl.float32)
            l_i = tl.zeros([BLOCK_R], tl.float32)
            acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
            q = load_queries(
                Q, stride_qb, stride_qs, stride_qh, after, next_hk, offs_d, rows_q, HEAD_DIM, GROUP, BLOCK_R,
                OF_PREFIXES,
            )  # fmt: skip
        begun = begun & (last == 0)
        unit = after
        hk = next_hk

    # epilogue: the row that others go on with; then whoever left the last part of a row merges it
    if t > 0:
        begins = (begun == 0).to(tl.int32)
        leave_part(
            O_PART, LSE_PART, unit, hk, p, begins, l_i, m_i, acc, slots, rows_q, HEADS_KV, GROUP, OF_PREFIXES,
            PREFIX_TILE,
        )  # fmt: skip
    tl.debug_barrier()
    if PREFIXES is not None:
        line = (UNITS, slots, programs, work)
        merge_share(
            O, LSE, SINK, O_PART, LSE_PART, ARRIVED, stride_ob, stride_os, stride_oh, line,
            (first_u, first_hk, first_t, lo), (u, hk, t), PREFIXES, rows_q, HEADS, GROUP, HEAD_DIM_V, BLOCK_R,
            BLOCK_DV, ENCODING, PREFIX_TILE,
        )  # fmt: skip
    elif not OF_PREFIXES:
        for side in range(2):  # the row that others began and that ended here, the row that others go on with
            unit = unit_of(UNITS, tl.where(side == 0, first_u, u))
            head = tl.where(side == 0, first_hk, hk)
            start = tl.where(side == 0, lo - first_t, hi - t)
            ended = (side == 0) & (first_t > 0) & (start + unit[3] <= hi)
            if (hi > lo) & (ended | (side == 1) & (t > 0)):
                begin, end = row_pieces(start, unit[3], programs, 1, work)
                if has_all_parts(ARRIVED, begin, end, True):
                    merge_row(
                        O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, head, begin, end, None,
                        rows_q, HEADS, GROUP, HEAD_DIM_V, PACKED, BLOCK_R, BLOCK_DV, False, ENCODING,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_t", "rows_q", "slots", "programs", "most", "mask_nums", "score_nums"])
def attention_chunks(
    Q, K, V, SINK, O, LSE, O_PART, LSE_PART, UNITS, BEFORE, ARRIVED, TABLE, FIRST, SCALES, _PREFIXES,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_t, mask_args, mask_nums, score_args, score_nums, rows_q, slots,
    programs, most, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr, ENCODING: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program's share is whole chunks of CHUNK tiles: each is begun and left alike, and rows of several are merged
    alike, whichever programs do them. `most` is how many chunks a row can have.
    """
    # who am I: one share of the work
    HEADS_KV: tl.constexpr = HEADS // GROUP
    p = tl.program_id(0)
    work = tl.load(BEFORE + slots) * HEADS_KV
    lo = program_start(p, programs, work)
    hi = program_start(p + 1, programs, work)
    u, hk, t = tile_at(lo, BEFORE, UNITS, slots, tl.arange(0, LOOK), HEADS_KV, CHUNK)
    offs_d = columns_of_codes(tl.arange(0, BLOCK_D), HEAD_DIM, ENCODING, BITS)
    offs_dv = tl.arange(0, BLOCK_DV)

    for place in range(lo, hi):
        # prologue: a chunk
        unit = unit_of(UNITS, u)
        end = tl.minimum(((unit[2] + t) // CHUNK + 1) * CHUNK - unit[2], unit[3])
        in_r, m, h, offs_i = rows_of_unit(unit, hk, unit[1] * BLOCK_R + tl.arange(0, BLOCK_R), GROUP)
        q = load_queries(Q, stride_qb, stride_qs, stride_qh, unit, hk, offs_d, rows_q, HEAD_DIM, GROUP, BLOCK_R)
        pages = pages_of(TABLE, FIRST, stride_t, unit[0], (unit[2] + t) * BLOCK_N, unit[4], PAGE, BLOCK_N)
        m_i = tl.full([BLOCK_R], float("-inf") if SCORE is None else -MOST, tl.float32)
        l_i = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)

        # main loop
        for tile in range(t, end):
            k, v, scales, offs_n = load_keys(
                K, V, SCALES, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, pages, unit, hk, tile,
                offs_d, offs_dv, HEAD_DIM, HEAD_DIM_V, PAGE, BLOCK_N, BLOCK_D, BLOCK_DV, ENCODING, BITS,
            )  # fmt: skip
            pages = pages_of(TABLE, FIRST, stride_t, unit[0], (unit[2] + tile + 1) * BLOCK_N, unit[4], PAGE, BLOCK_N)
            m_i, l_i, acc = fold_keys(
                q, k, v, scales, m_i, l_i, acc, unit, h, offs_i, offs_n, mask_args, mask_nums, score_args, score_nums,
                scale, ROWS, MASK_ONCE, VISIBLE, SCORE_ONCE, SCORE, PRECISION, ENCODING, BITS,
            )  # fmt: skip

        # epilogue: a row of one chunk is done; of others, whoever leaves the last part of a row merges it
        chunks = chunks_of(unit[2], unit[3], CHUNK)
        if chunks == 1:
            store_rows(
                O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, l_i, m_i, rows_q, HEADS,
                HEAD_DIM_V, PACKED, ENCODING,
            )  # fmt: skip
        else:
            begin, last = row_pieces(tl.load(BEFORE + u) * HEADS_KV + hk * chunks, chunks, programs, 1, work)
            shared = begin < last
            # a row that programs share has its room with the first of them, beside that of rows of its own
            room = (2 * begin + shared.to(tl.int32)) * most
            store_part(O_PART, LSE_PART, room + (unit[2] + t) // CHUNK - unit[2] // CHUNK, l_i, m_i, acc)
            if (end == unit[3]) | (place + 1 == hi):
                tl.debug_barrier()
                if has_all_parts(ARRIVED, begin, last, shared):
                    merge_row(
                        O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, hk, room,
                        room + chunks - 1, None, rows_q, HEADS, GROUP, HEAD_DIM_V, PACKED, BLOCK_R, BLOCK_DV, True,
                        ENCODING,
                    )  # fmt: skip
                tl.debug_barrier()
        t = tl.where(end == unit[3], 0, end)
        hk = tl.where(t == 0, hk + 1, hk)
        u = tl.where(hk == HEADS_KV, u + 1, u)
        hk = tl.where(hk == HEADS_KV, 0, hk)


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a paged call: the plan, then all tiles."""
    return planned_forward(call, _PLANS, _plans, pool_of)


def plan(call: Call) -> PlannedCalls:
    """The plan that calls of one kind share."""
    return PlannedCalls(call, _PLANS, _plans, pool_of)


def pool_of(call: Call) -> tuple[Any, ...]:
    """k and v as the kernels take them, and the scales of codes with their strides."""
    if call.scales is None:
        return call.k, call.v, None
    scales = (*call.scales[:2], *(encoded(stride) for scale in call.scales[:2] for stride in scale.stride()))
    if call.keys_by_channel:
        least, opened, place = call.scales[2:]
        strides = (*least.stride()[:2], *opened.stride()[:3])
        scales = (*scales, least, opened, place, *(encoded(stride) for stride in strides))
    return call.k.view(torch.uint8), call.v.view(torch.uint8), scales  # Triton has no float8 on older GPUs


def _plans(call: Call) -> Planned:
    block_r, block_n = _tile(call)
    block_dv = padded(call.head_dim_v)
    programs = _PROGRAMS_PER_SM * multiprocessors(call.q.device)
    if may_share(call):
        rows = rows_of_shared_tile(call, "triton_paged")
        prefix = PrefixTile(multiprocessors(call.q.device), rows, min(block_n, PREFIX_KEYS))
        own = programs * block_r + call.batch * call.rows_q * call.num_heads_q
        work = shared_work_of(call, block_n, block_dv, programs, own, prefix, programs)
        return Planned(
            work,
            _plan(call, work, attention_work, programs, (block_r, block_n), False, prefix),
            _plan(call, work, attention_work, prefix.programs, (prefix.rows, prefix.keys), True, prefix),
        )
    if call.batch_invariant:
        chunk = CHUNK_KEYS // block_n
        work = work_of(call, block_r, block_n, block_dv, programs, block_r, chunk=chunk)
        return Planned(work, _plan(call, work, attention_chunks, programs, (block_r, block_n), chunk))
    work = work_of(call, block_r, block_n, block_dv, programs, block_r)
    return Planned(work, _plan(call, work, attention_work, programs, (block_r, block_n), False, None))


def _plan(call: Call, work: Work, kernel: Any, programs: int, tile: tuple[int, int], *more: Any) -> Plan:
    """A kernel over a line of work; `more` are the constants that it has alone."""
    mask, score = functions(call)
    block_d, block_dv = _columns(call), padded(call.head_dim_v)
    of_prefixes = more[0] is True
    side = None if mask is None or of_prefixes else mask.queries  # no key of a prefix is hidden
    constants = (
        call.num_heads_q, call.group, call.head_dim, call.head_dim_v, call.k.shape[1], call.packed, *tile, block_d,
        block_dv, side and side.rows, side and side.once, side and side.visible, score and score.queries.once,
        score and score.queries.apply, matmul_precision(call),
        None if call.scales is None else BY_DTYPE[call.v.dtype], bits_by_channel(call), *more,
    )  # fmt: skip
    sizes = (call.rows_q, work.slots, programs, *((work.most,) if kernel is attention_chunks else ()))
    # the many rows of a tile of a prefix fill the registers of four warps
    warps = 8 if of_prefixes or max(block_d, block_dv) > 256 else 4
    stages = 1 if call.keys_by_channel else 2  # Triton 3.9 cannot divide loads that depend on a page's place
    return Plan(kernel, programs, strides_of_pages(call), sizes, constants, warps, stages)


def rows_of_tile(call: Call, least: int = 16, most: int = 64) -> int:
    """For the mean request, for all of a request that may share a prefix, or for four queries where other requests must
    not matter.
    """
    if may_share(call):
        return max(least, triton.next_power_of_2(call.rows_q * call.group))
    mean = -(-call.rows_q // max(call.batch, 1)) if call.packed else call.rows_q
    rows = (4 if call.batch_invariant else mean) * call.group
    return max(least, min(most, most_rows(call), triton.next_power_of_2(rows)))


def _tile(call: Call) -> tuple[int, int]:
    """Rows of a tile, and 32 KB of keys or values; by channel 8,192 numbers of one page, whose scales are then read
    once, or else 4,096, since scales of several pages take registers.
    """
    most = 128
    if call.keys_by_channel:
        most = 8192 // _columns(call)
        most = most if call.k.shape[1] % most == 0 else most // 2
    widest = max(_columns(call), padded(call.head_dim_v))
    return rows_of_tile(call), max(_least(call), min(128, most, 32768 // (widest * call.q.element_size())))


def _columns(call: Call) -> int:
    """Of a tile of keys."""
    return max(_least(call), padded(call.head_dim))


def _least(call: Call) -> int:
    """Rows and columns of a tile of keys: of codes Triton makes operands that are wider than 16 (`triton_operands`)."""
    return 16 if call.scales is None else 32
