"""Sums of dQ, which programs of Hopper's backward add to: what goes before, the order, and what comes after."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.gluon_api import barrier
from tilewise.tiles.load import POINTER, load_rows, rows_of
from tilewise.tiles.visit import locate


@triton.jit(do_not_specialize=["batch", "rows_q", "slots", "unit"])
def prepare(
    O, DO, LSE, DLSE, SHIFT, CENTRE, SUM, COUNTS, CU_Q, stride_ob, stride_os, stride_oh, stride_db, stride_ds,
    stride_dh, batch, rows_q, slots, unit,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PACKED: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """What the scores and dP of each query begin with, -lse (times `unit`) and -delta, tile by tile, and what begins at
    0: sums of dQ, how many items have been dealt out, and ORDERED how many programs have added to each tile.
    """
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
        at = ((rows if PACKED else b64 * rows_q + rows) * HEADS + h64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(SUM + at, tl.zeros([BLOCK_M, D], tl.float32), mask=inside[:, None])
    if ORDERED:
        tl.store(COUNTS + 1 + tl.program_id(0), 0)
    if tl.program_id(0) == 0:
        tl.store(COUNTS, 0)


@triton.jit(do_not_specialize=["rows", "scale"])
def finish(SUM, DQ, rows, scale, HEAD_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """dQ from its sums."""
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    seen = (offs < rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    dq = tl.load(SUM + offs[:, None] * D + offs_d[None, :], mask=seen) * scale
    tl.store(DQ + offs[:, None] * HEAD_DIM + offs_d[None, :], dq.to(DQ.dtype.element_ty), mask=seen)


@gluon.jit
def place_in_order(n, m, lengths, fixed, BLOCK_M: gl.constexpr, KEYS: gl.constexpr):
    """How many programs add to the dQ of query tile m before that of key tile n does: those of later keys, which have
    begun before it and under a causal mask are there before it. Negative if n is not seen from there.
    """
    seqlen_q, seqlen_k = lengths
    last = (seqlen_k - 1) // KEYS
    if fixed.tiles is not None:
        last_seen = (m + 1) * BLOCK_M - 1 + seqlen_k - seqlen_q
        last = gl.where(last_seen < 0, -1, gl.minimum(last, last_seen // KEYS))
    return last - n


@gluon.jit
def wait_for_count(count, wanted):
    """Wait until so many have counted up."""
    got = gl.atomic_add(count, 0, sem="acquire")
    while got < wanted:
        got = gl.atomic_add(count, 0, sem="acquire")
    barrier()


@gluon.jit
def count_up(count, place):
    """Count up when all that this warp sent is in memory."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )
    barrier()
    if place >= 0:
        gl.atomic_add(count, 1, sem="release")
