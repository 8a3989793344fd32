"""Codes of values: FP8, keys side by side, with a scale for a block, or for channels or a head of a whole sequence."""

import triton
import triton.language as tl

from tilewise.ops.quantize.triton_code_bytes import bytes_of, scale_of
from tilewise.ops.quantize.triton_statistics import place_of, program_of, size_of
from tilewise.tiles.early import begin_early, end_early


@triton.jit(do_not_specialize=["batch", "seqlen", "blocks"])
def encode_columns(
    X, CU, MEAN, MOST, CODES, SCALE, stride_b, stride_t, stride_h, batch, seqlen, blocks,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARED: tl.constexpr, CODE: tl.constexpr, CONVERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """FP8 codes of a block of values, keys side by side in the order of `quant.blocks.KEY_ORDER`."""
    begin_early(EARLY)
    # who am I
    program = program_of(BACK)
    h = program % HEADS
    slot = program // HEADS
    b, block, first, length, cell = place_of(slot, h, CU, batch, seqlen, blocks, HEADS, ROWS)
    place = tl.arange(0, ROWS)
    row = block * ROWS + place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    d = tl.arange(0, BLOCK_D)
    in_dim = d < DIM
    there = in_dim[:, None] & (row < length)[None, :]
    x_rows = X + b * stride_b + h.to(tl.int64) * stride_h + (first + row) * stride_t
    by_head = (b * HEADS + h) * DIM

    x = tl.load(x_rows[None, :] + d[:, None], mask=there, other=0.0).to(tl.float32)  # [BLOCK_D, ROWS]
    if MEAN is not None:
        mean = tl.load(MEAN + by_head + d, mask=in_dim, other=0.0)
        x = tl.where(there, x - mean[:, None], 0.0)
    if SHARED == "block":
        sizes = tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [BLOCK_D * ROWS], can_reorder=True)
        most = size_of(tl.max(sizes, 0).to(tl.float32, bitcast=True)) + tl.zeros([1], tl.float32)
        tl.store(SCALE + cell + tl.arange(0, 1), scale_of(most, CODE))
        largest = tl.broadcast_to(most, BLOCK_D)
    else:
        largest = tl.load(MOST + by_head + d, mask=in_dim, other=0.0)
        if SHARED == "head":
            largest = tl.broadcast_to(tl.max(largest, 0) + tl.zeros([1], tl.float32), BLOCK_D)
        if block == 0:
            tl.store(SCALE + by_head + d, scale_of(largest, CODE), mask=in_dim)

    # epilogue
    line = cell - (block if CU is None else slot)  # where the head's blocks begin
    at = CODES + (line * DIM * ROWS + (cell - line) * ROWS) + (d.to(tl.int64) * blocks * ROWS)[:, None] + place[None, :]
    tl.store(at, bytes_of(x, scale_of(largest, CODE), "fp8", CONVERTS), mask=in_dim[:, None])
    end_early(EARLY)
