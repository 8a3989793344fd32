"""What goes before Hopper's backward, and what comes after where programs add to sums of dQ."""

import triton
import triton.language as tl

from tilewise.tiles.load import POINTER, load_rows, rows_of
from tilewise.tiles.visit import locate


@triton.jit
def tile_of_queries(
    CU_Q, batch, rows_q, slots, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """(batch element or packed sequence, head, tile of its queries, its first row, how many it has) of a program."""
    slot = tl.program_id(0) % slots
    h = tl.program_id(0) // slots % HEADS
    b = tl.program_id(0) // slots // HEADS
    m = slot
    row0 = b * 0
    seqlen_q = rows_q
    if PACKED:
        b, m = locate(slot, CU_Q, batch, BLOCK_M)
        row0 = tl.load(CU_Q + b)
        seqlen_q = tl.load(CU_Q + b + 1) - row0
    return b, h, m, row0, seqlen_q


@triton.jit(do_not_specialize=["batch", "rows_q", "slots", "unit"])
def prepare(
    O, DO, LSE, DLSE, SHIFT, CENTRE, SUM, COUNTS, CU_Q, stride_ob, stride_os, stride_oh, stride_db, stride_ds,
    stride_dh, batch, rows_q, slots, unit,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What the scores and dP of each query begin with, -lse (times `unit`) and -delta, tile by tile, and what begins at
    0: how many items two kernels have dealt out, and sums of dQ.
    """
    b, h, m, row0, seqlen_q = tile_of_queries(CU_Q, batch, rows_q, slots, HEADS, BLOCK_M, PACKED)
    start = m * BLOCK_M
    offs = start + tl.arange(0, BLOCK_M)
    inside = offs < seqlen_q
    rows = (row0 + offs).to(tl.int64)
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    O_rows = rows_of(O, b, row0, h, seqlen_q, stride_ob, stride_os, stride_oh, HEAD_DIM_V, BLOCK_M, D, POINTER)
    DO_rows = rows_of(DO, b, row0, h, seqlen_q, stride_db, stride_ds, stride_dh, HEAD_DIM_V, BLOCK_M, D, POINTER)
    o = load_rows(O_rows, start, stride_os, inside, HEAD_DIM_V, BLOCK_M, D, True, POINTER)
    do = load_rows(DO_rows, start, stride_ds, inside, HEAD_DIM_V, BLOCK_M, D, True, POINTER)
    at = (h64 if PACKED else b64 * HEADS + h64) * rows_q + rows
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + at, mask=inside, other=0.0)
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(SHIFT + at, tl.where(lse == float("-inf"), 0.0, -lse * unit))
    tl.store(CENTRE + at, -delta)
    if SUM is not None:
        within = tl.arange(0, BLOCK_M * D)
        at = tl.program_id(0).to(tl.int64) * (BLOCK_M * D) + within
        seen = start + 0 * within < seqlen_q  # packed sequences have tiles to spare
        tl.store(SUM + at, tl.zeros([BLOCK_M * D], tl.float32), mask=seen)
    if tl.program_id(0) == 0:
        tl.store(COUNTS, 0)
        tl.store(COUNTS + 1, 0)


@triton.jit(do_not_specialize=["batch", "rows_q", "slots", "scale"])
def finish(
    SUM, DQ, CU_Q, batch, rows_q, slots, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dQ from its sums, which lie as threads had them: of both warpgroups' shares eight columns at a time, and there of
    each thread (warp, row, pair of columns) two rows and two columns.
    """
    b, h, m, row0, seqlen_q = tile_of_queries(CU_Q, batch, rows_q, slots, HEADS, BLOCK_M, PACKED)
    within = tl.arange(0, BLOCK_M * D)
    at = tl.program_id(0).to(tl.int64) * (BLOCK_M * D) + within
    sums = tl.load(SUM + at, mask=m * BLOCK_M + 0 * within < seqlen_q).reshape(2, 8, 4, 8, 4, 2, 2)
    if BLOCK_M == 64:  # a share is half of the columns
        dq = sums.permute(2, 5, 3, 0, 1, 4, 6).reshape(BLOCK_M, D)
    else:
        dq = sums.permute(0, 2, 5, 3, 1, 4, 6).reshape(BLOCK_M, D)
    offs = m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    rows = (row0 if PACKED else b.to(tl.int64) * rows_q) + offs
    at = (rows.to(tl.int64) * HEADS + h)[:, None] * HEAD_DIM + offs_d[None, :]
    inside = (offs < seqlen_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(DQ + at, (dq * scale).to(DQ.dtype.element_ty), mask=inside)
