"""The kernel before those of Hopper's backward that keep no sums of dQ, where sequences are packed."""

import triton
import triton.language as tl

from tilewise.tiles.arithmetic import lse_of_weights
from tilewise.tiles.load import POINTER, load_rows, rows_of
from tilewise.tiles.visit import locate


@triton.jit(do_not_specialize=["batch", "rows_q", "slots", "unit"])
def prepare(
    O, DO, LSE, DLSE, SHIFT, CENTRE, CU_Q, stride_ob, stride_os, stride_oh, stride_db, stride_ds, stride_dh, batch,
    rows_q, slots, unit,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the scores and dP of each query begin with, -lse (times `unit`) and -delta, tile by tile."""
    tl.extra.cuda.gdc_launch_dependents()
    h = tl.program_id(0) % HEADS  # heads of a row lie beside each other
    slot = tl.program_id(0) // HEADS
    b, m = locate(slot, CU_Q, batch, BLOCK_M)
    row0 = tl.load(CU_Q + b)
    seqlen_q = tl.load(CU_Q + b + 1) - row0
    start = m * BLOCK_M
    offs = start + tl.arange(0, BLOCK_M)
    inside = offs < seqlen_q
    O_rows = rows_of(O, b, row0, h, seqlen_q, stride_ob, stride_os, stride_oh, HEAD_DIM_V, BLOCK_M, D, POINTER)
    DO_rows = rows_of(DO, b, row0, h, seqlen_q, stride_db, stride_ds, stride_dh, HEAD_DIM_V, BLOCK_M, D, POINTER)
    o = load_rows(O_rows, start, stride_os, inside, HEAD_DIM_V, BLOCK_M, D, True, POINTER)
    do = load_rows(DO_rows, start, stride_ds, inside, HEAD_DIM_V, BLOCK_M, D, True, POINTER)
    at = h.to(tl.int64) * rows_q + (row0 + offs)
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + at, mask=inside, other=0.0)
    at = (h * slots + slot).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(SHIFT + at, -lse_of_weights(lse, unit))
    tl.store(CENTRE + at, -delta)
