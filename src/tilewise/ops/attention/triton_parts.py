"""Results of a row of tiles: whole ones written, partial ones left for one another, and merged by whoever is last."""

import triton
import triton.language as tl

from tilewise.ops.attention.triton_prefixes import PREFIX, first_rows, left_last, parts_of_request
from tilewise.ops.attention.triton_work import UNIT, rows_of_unit, unit_of
from tilewise.tiles.arithmetic import LN2, LOG2E
from tilewise.tiles.codes import columns_of_codes

PARTS = tl.constexpr(8)  # partial results of a row that are read at a time
MERGED = tl.constexpr(4)  # rows that are merged at a time


@triton.jit
def store_rows(O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, o, l, top, rows_q,
               HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, PACKED: tl.constexpr,
               ENCODING: tl.constexpr):  # fmt: skip
    """Write rows of o and lse; o is not divided by l yet, both are relative to the maximum `top` (base e), and a sink
    joins here.
    """
    offs_dv = columns_of_codes(tl.arange(0, o.shape[1]), HEAD_DIM_V, ENCODING)
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
def store_part(O_PART, LSE_PART, at, l, top, o, rows=None):
    """Leave a normalised partial result with its lse, -inf of nothing: in slot `at`, or from row `at` on, `rows`."""
    offs_r = tl.arange(0, o.shape[0])
    offs_dv = tl.arange(0, o.shape[1])
    empty = l == 0.0
    l_safe = tl.where(empty, 1.0, l)
    to = at + offs_r if rows is not None else at.to(tl.int64) * o.shape[0] + offs_r
    there = None if rows is None else offs_r < rows
    tl.store(LSE_PART + to, tl.where(empty, float("-inf"), top + tl.math.log2(l_safe) * LN2), mask=there)
    there = None if rows is None else there[:, None]
    tl.store(O_PART + to[:, None] * o.shape[1] + offs_dv[None, :], o / l_safe[:, None], mask=there)


@triton.jit
def fold_parts(top, total, acc, O_PART, LSE_PART, row, there, offs_dv, BLOCK_DV: tl.constexpr):
    """(maximum, sum, sum of values) of some rows after PARTS more parts of each, in rows [PARTS, MERGED] of memory."""
    lse = tl.load(LSE_PART + row, mask=there, other=float("-inf"), cache_modifier=".cg")  # [PARTS, MERGED]
    to = row[:, :, None] * BLOCK_DV + offs_dv[None, None, :]
    o = tl.load(O_PART + to, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
    new = tl.maximum(top, tl.max(lse, 0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.math.exp2((lse - safe[None, :]) * LOG2E)
    alpha = tl.math.exp2((top - safe) * LOG2E)
    total = total * alpha + tl.sum(weight, 0)
    acc = acc * alpha[:, None] + tl.sum(o * weight[:, :, None], 0)
    return new, total, acc


@triton.jit
def merge_row(
    O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, hk, begin, end, rows_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, PACKED: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, ENCODING: tl.constexpr,
):  # fmt: skip
    """Fold the parts of a row of tiles that the programs `begin` to `end` left, in order; those of chunks are in the
    slots `begin` to `end`.
    """
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
            slots = those
            if not CHUNKS:
                slots = tl.where(those == begin, 2 * those + 1, 2 * those)
            row = slots.to(tl.int64)[:, None] * BLOCK_R + offs_r[None, :]
            there = (those <= end)[:, None] & in_r[None, :]
            top, total, acc = fold_parts(top, total, acc, O_PART, LSE_PART, row, there, offs_dv, BLOCK_DV)
        store_rows(
            O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, total, top, rows_q, HEADS,
            HEAD_DIM_V, PACKED, ENCODING,
        )  # fmt: skip


@triton.jit
def merge_request(
    O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, u, hk, UNITS, BEFORE, split, room, rows_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr, ENCODING: tl.constexpr,
):  # fmt: skip
    """Fold the parts of a request's rows, unit `u`: those of the prefix that it shares, then its own, in order."""
    HEADS_KV: tl.constexpr = HEADS // GROUP
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, PARTS)
    unit = unit_of(UNITS, u)
    parts = parts_of_request(u, hk, UNITS, BEFORE, split, HEADS_KV)
    count = parts[2] + parts[4]
    for first in range(0, unit[5] * GROUP, MERGED):
        r = first + tl.arange(0, MERGED)
        in_r, m, h, _i = rows_of_unit(unit, hk, r, GROUP)
        top = tl.full([MERGED], float("-inf"), tl.float32)
        total = tl.zeros([MERGED], tl.float32)
        acc = tl.zeros([MERGED, BLOCK_DV], tl.float32)
        for at in range(0, count, PARTS):
            n = at + offs_p
            row = first_rows(n, unit[0], hk, parts, room, HEADS_KV, BLOCK_R)[:, None] + r[None, :]
            there = (n < count)[:, None] & in_r[None, :]
            top, total, acc = fold_parts(top, total, acc, O_PART, LSE_PART, row, there, offs_dv, BLOCK_DV)
        store_rows(
            O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, total, top, rows_q, HEADS,
            HEAD_DIM_V, False, ENCODING,
        )  # fmt: skip


@triton.jit
def merge_share(
    O, LSE, SINK, O_PART, LSE_PART, ARRIVED, stride_ob, stride_os, stride_oh, u, hk, t, left, UNITS, BEFORE, split,
    room, rows_q, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr, ENCODING: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Count the parts that a program left of its share, `left` tiles from tile t of unit u on, and merge the requests
    of which one was the last: behind the loop over tiles, which is pipelined only without a loop inside.
    """
    HEADS_KV: tl.constexpr = HEADS // GROUP
    tl.debug_barrier()
    lanes = tl.arange(0, SHARED)
    while left > 0:
        unit = unit_of(UNITS, u)
        tiles = tl.minimum(unit[3] - t, left)
        if (tiles < unit[3]) | (tl.load(UNITS + u * UNIT + PREFIX) != 0):
            first, count, last = left_last(u, unit, hk, lanes, ARRIVED + 1, UNITS, BEFORE, split, rows_q, HEADS_KV)
            for n in range(count):
                if tl.sum((last & (lanes == n)).to(tl.int32), 0) > 0:
                    tl.debug_barrier()
                    merge_request(
                        O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, first + n, hk, UNITS, BEFORE,
                        split, room, rows_q, HEADS, GROUP, HEAD_DIM_V, BLOCK_R, BLOCK_DV, ENCODING,
                    )  # fmt: skip
        left -= tiles
        t = 0 * t
        hk = tl.where(hk + 1 == HEADS_KV, 0, hk + 1)
        u = tl.where(hk == 0, u + 1, u)
