"""The kernel before those of Hopper's backward that keep no sums of dQ (others have `gluon_sm90_sums.make_ready`)."""

import triton
import triton.language as tl

from tilewise.ops.attention.gluon_sm90_sums import TAKEN
from tilewise.tiles.load import POINTER, load_rows, rows_of
from tilewise.tiles.visit import locate


@triton.jit(do_not_specialize=["batch", "rows_q", "slots", "unit"])
def prepare(
    O, DO, LSE, DLSE, SHIFT, CENTRE, COUNTS, CU_Q, stride_ob, stride_os, stride_oh, stride_db, stride_ds,
    stride_dh, batch, rows_q, slots, unit,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What the scores and dP of each query begin with, -lse (times `unit`) and -delta, tile by tile; and zeros for the
    counts of what has been taken.
    """
    tl.extra.cuda.gdc_launch_dependents()
    h = tl.program_id(0) % HEADS  # heads of a row lie beside each other
    slot = tl.program_id(0) // HEADS % slots
    b = tl.program_id(0) // HEADS // slots
    head = b * HEADS + h
    tile = (head * slots + slot).to(tl.int64)
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
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(SHIFT + at, tl.where(lse == float("-inf"), 0.0, -lse * unit))
    tl.store(CENTRE + at, -delta)
    if tl.program_id(0) == 0:
        for n in tl.static_range(TAKEN):
            tl.store(COUNTS + n, 0)
