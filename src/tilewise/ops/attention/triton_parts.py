"""Results of a row of tiles: whole ones written, partial ones left for one another, and merged by whoever is last."""

import triton
import triton.language as tl

from tilewise.ops.attention.triton_prefixes import parts_of_prefix, room_of_prefixes, row_of_part
from tilewise.ops.attention.triton_work import has_all_parts, program_start, row_pieces, rows_of_unit, unit_of
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
def leave_part(O_PART, LSE_PART, unit, hk, p, begins, l, top, o, batch, rows_q, HEADS_KV: tl.constexpr,
               GROUP: tl.constexpr, OF_PREFIXES: tl.constexpr, PREFIX_TILE: tl.constexpr):  # fmt: skip
    """Leave what a program has of a row of tiles that it `begins`, or ends: in one of two slots, or by rows where
    prefixes may be shared, since rows behind one are left whole, too.
    """
    if PREFIX_TILE is None:
        store_part(O_PART, LSE_PART, 2 * p + begins, l, top, o)
    else:
        rows = unit[5] * GROUP
        at = row_of_part(unit[0], hk, rows, rows_q * GROUP, p, HEADS_KV, o.shape[0])
        if not OF_PREFIXES:
            at += room_of_prefixes(batch, rows_q * GROUP, HEADS_KV, PREFIX_TILE)
        store_part(O_PART, LSE_PART, at, l, top, o, rows)


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
    O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, hk, begin, end, prefix, rows_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, PACKED: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, ENCODING: tl.constexpr, PREFIX_R: tl.constexpr = 0,
):  # fmt: skip
    """Fold the parts of a row of tiles that the programs `begin` to `end` left, in order; those of chunks are in the
    slots `begin` to `end`. With PREFIX_R, the rows of a tile of a prefix, the parts of one come first: `prefix` is how
    many, the first row of them, and of the row's own.
    """
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, PARTS)
    rows = tl.minimum(unit[5] * GROUP - unit[1] * BLOCK_R, BLOCK_R)
    shared = prefix[0] if PREFIX_R else 0 * begin
    for first in range(0, rows, MERGED):
        offs_r = first + tl.arange(0, MERGED)
        r = unit[1] * BLOCK_R + offs_r
        in_r, m, h, _i = rows_of_unit(unit, hk, r, GROUP)
        top = tl.full([MERGED], float("-inf"), tl.float32)
        total = tl.zeros([MERGED], tl.float32)
        acc = tl.zeros([MERGED, BLOCK_DV], tl.float32)
        for at in range(begin - shared, end + 1, PARTS):
            those = at + offs_p
            if PREFIX_R:
                n = (those - begin).to(tl.int64)
                starts = tl.where(n < 0, prefix[1] + (n + shared) * PREFIX_R, prefix[2] + n * BLOCK_R)
            elif CHUNKS:
                starts = those.to(tl.int64) * BLOCK_R
            else:
                starts = tl.where(those == begin, 2 * those + 1, 2 * those).to(tl.int64) * BLOCK_R
            row = starts[:, None] + offs_r[None, :]
            there = (those <= end)[:, None] & in_r[None, :]
            top, total, acc = fold_parts(top, total, acc, O_PART, LSE_PART, row, there, offs_dv, BLOCK_DV)
        store_rows(
            O, LSE, SINK, stride_ob, stride_os, stride_oh, unit, in_r, m, h, acc, total, top, rows_q, HEADS,
            HEAD_DIM_V, PACKED, ENCODING,
        )  # fmt: skip


@triton.jit
def merge_share(
    O, LSE, SINK, O_PART, LSE_PART, ARRIVED, stride_ob, stride_os, stride_oh, line, place, after, PREFIXES, rows_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr, ENCODING: tl.constexpr, PREFIX_TILE: tl.constexpr,
):  # fmt: skip
    """Merge the rows of a program's share of requests that may share prefixes: those that are cut, where it left the
    last part, and whole ones behind a prefix. `line` is (units, requests, programs, work), `place` (unit, head,
    tile, position) where the share begins, `after` (unit, head, tile) where it ends.
    """
    UNITS, batch, programs, work = line
    u, hk, t, lo = place
    HEADS_KV: tl.constexpr = HEADS // GROUP
    p = tl.program_id(0)
    left = program_start(p + 1, programs, work) - lo
    room = room_of_prefixes(batch, rows_q * GROUP, HEADS_KV, PREFIX_TILE)
    shares = tl.load(PREFIXES[1] + batch) > 0
    while left > 0:
        unit = unit_of(UNITS, u)
        tiles = tl.minimum(unit[3] - t, left)
        cut = tiles < unit[3]
        if cut | (unit[2] > 0):
            begin, end = row_pieces(lo - t, unit[3], programs, 1, work)
            if has_all_parts(ARRIVED, begin, end, cut):
                shared, row = parts_of_prefix(PREFIXES, UNITS, u, unit, hk, rows_q, batch, HEADS_KV, GROUP, PREFIX_TILE)
                rows = unit[5] * GROUP
                own = room + row_of_part(unit[0], hk, rows, rows, begin, HEADS_KV, BLOCK_R)
                merge_row(
                    O, LSE, SINK, O_PART, LSE_PART, stride_ob, stride_os, stride_oh, unit, hk, begin, end,
                    (shared, row, own), rows_q, HEADS, GROUP, HEAD_DIM_V, False, BLOCK_R, BLOCK_DV, False, ENCODING,
                    PREFIX_TILE[1],
                )  # fmt: skip
        left -= tiles
        lo += tiles
        t = 0 * t
        hk = tl.where(hk + 1 == HEADS_KV, 0, hk + 1)
        u = tl.where(hk == 0, u + 1, u)
        if (left > 0) & ~shares:  # rows between the first and the one that others go on with are written
            lo += left - after[2]
            left = after[2]
            u = after[0]
            hk = after[1]
