"""Codes of values: FP8, keys side by side, with a scale for a block, or for channels or a head of a whole sequence.

How large the numbers of a channel are at most is known before, or found by the programs that make its codes: each says
what its block has, and goes on when all blocks of the sequence's head have said so, its values in registers meanwhile.
"""

import triton
import triton.language as tl

from tilewise.ops.quantize.triton_code_bytes import bytes_of, scale_of
from tilewise.ops.quantize.triton_statistics import place_of, program_of, size_of
from tilewise.tiles.early import begin_early, end_early


@triton.jit
def take_turn(NEXT):
    """A program's number in the order in which programs begin; who takes the last one leaves 0."""
    turn = tl.atomic_add(NEXT, 1, sem="relaxed")
    if turn == tl.num_programs(0) - 1:
        tl.atomic_xchg(NEXT, 0, sem="relaxed")
    return turn


@triton.jit
def in_turn(turn, blocks, HEADS: tl.constexpr, TOGETHER: tl.constexpr):
    """(head, slot) of a program: blocks of TOGETHER heads of a sequence before those of others, as `place_of` wants."""
    of_heads = turn // (TOGETHER * blocks)
    n = turn % (TOGETHER * blocks)
    h = of_heads % (HEADS // TOGETHER) * TOGETHER + n % TOGETHER
    return h, of_heads // (HEADS // TOGETHER) * blocks + n // TOGETHER


@triton.jit
def largest_of_head(x, MOST, COUNT, programs, in_dim, d):
    """(x as it was, how large the numbers of a channel are at most in all blocks) when all of these have said so; the
    last program to know leaves zeros. What waits is x as it was read, half of what it is as float32  # [COLS, ROWS]
    """
    sizes = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as bits, those of no number are the largest
    most = size_of(tl.max(sizes, 1).to(tl.float32, bitcast=True))
    tl.atomic_max(MOST + d, most.to(tl.int32, bitcast=True), mask=in_dim, sem="relaxed")
    tl.debug_barrier()
    said = tl.atomic_add(COUNT, 1, sem="release") + 1
    while said < programs:
        said = tl.atomic_add(COUNT, 0, sem="relaxed")
    said = tl.atomic_add(COUNT, 0, sem="acquire")
    most = tl.load(MOST + d, mask=in_dim, other=0, volatile=True).to(tl.float32, bitcast=True)
    tl.debug_barrier()
    if tl.atomic_add(COUNT, 1, sem="acq_rel") == 2 * programs - 1:
        tl.store(MOST + d, tl.zeros_like(d), mask=in_dim)
        tl.debug_barrier()
        tl.atomic_xchg(COUNT, 0, sem="release")
    # a count has no sign, which the compiler cannot know: so it makes float32 of x anew
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ (said >> 31).to(tl.int16)).to(x.dtype, bitcast=True)
    return x, most


@triton.jit(do_not_specialize=["batch", "seqlen", "blocks"])
def encode_columns(
    X, CU, MEAN, SIZE, COUNTS, CODES, SCALE, stride_b, stride_t, stride_h, batch, seqlen, blocks,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARED: tl.constexpr, CODE: tl.constexpr, CONVERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """FP8 codes of a block of values, keys side by side in the order of `quant.blocks.KEY_ORDER`. With COUNTS, zeros of
    all heads and one more, SIZE has zeros, too.
    """
    begin_early(EARLY)
    # who am I
    if COUNTS is None:
        program = program_of(BACK)
        h = program % HEADS
        slot = program // HEADS
    else:
        h, slot = in_turn(take_turn(COUNTS + batch * HEADS), blocks, HEADS, TOGETHER)
    b, block, first, length, cell = place_of(slot, h, CU, batch, seqlen, blocks, HEADS, ROWS)
    place = tl.arange(0, ROWS)
    row = block * ROWS + place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    d = tl.arange(0, BLOCK_D)
    in_dim = d < DIM
    there = in_dim[:, None] & (row < length)[None, :]
    x_rows = X + b * stride_b + h.to(tl.int64) * stride_h + (first + row) * stride_t
    by_head = (b * HEADS + h) * DIM

    given = tl.load(x_rows[None, :] + d[:, None], mask=there, other=0.0)  # [BLOCK_D, ROWS]
    x = given.to(tl.float32)
    if MEAN is not None:
        mean = tl.load(MEAN + by_head + d, mask=in_dim, other=0.0)
        x = tl.where(there, x - mean[:, None], 0.0)
    if SHARED == "block":
        sizes = tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [BLOCK_D * ROWS], can_reorder=True)
        most = size_of(tl.max(sizes, 0).to(tl.float32, bitcast=True)) + tl.zeros([1], tl.float32)
        tl.store(SCALE + cell + tl.arange(0, 1), scale_of(most, CODE))
        largest = tl.broadcast_to(most, BLOCK_D)
    else:
        if COUNTS is None:
            largest = tl.load(SIZE + by_head + d, mask=in_dim, other=0.0)
        else:
            largest = tl.zeros([BLOCK_D], tl.float32)
            if block * ROWS < length:  # packed sequences have slots to spare
                programs = tl.cdiv(length, ROWS)
                given, largest = largest_of_head(given, SIZE + by_head, COUNTS + b * HEADS + h, programs, in_dim, d)
            x = given.to(tl.float32)
        if SHARED == "head":
            largest = tl.broadcast_to(tl.max(largest, 0) + tl.zeros([1], tl.float32), BLOCK_D)
        if block == 0:
            tl.store(SCALE + by_head + d, scale_of(largest, CODE), mask=in_dim)

    # epilogue
    line = cell - (block if CU is None else slot)  # where the head's blocks begin
    at = CODES + (line * DIM * ROWS + (cell - line) * ROWS) + (d.to(tl.int64) * blocks * ROWS)[:, None] + place[None, :]
    tl.store(at, bytes_of(x, scale_of(largest, CODE), "fp8", CONVERTS), mask=in_dim[:, None])
    end_early(EARLY)
