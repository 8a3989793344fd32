"""What spans a sequence, before codes are made: sums of columns, their extremes or sizes, by chunks of rows, and what a
head's chunks come to.
"""

import triton
import triton.language as tl

from tilewise.quant.schemes import SAMPLE, SAMPLED_FROM
from tilewise.tiles.early import begin_early, end_early
from tilewise.tiles.rotary import angles_of, turned
from tilewise.tiles.visit import locate

SOME = tl.constexpr(SAMPLE)  # rows of a chunk that a mean is of,
MANY = tl.constexpr(SAMPLED_FROM)  # in sequences of so many


@triton.jit
def program_of(BACK: tl.constexpr):
    """Which program this is, the last one first on the way BACK: L2 still has rows that were looked at last."""
    if BACK:
        return tl.num_programs(0) - 1 - tl.program_id(0)
    else:
        return tl.program_id(0)


@triton.jit
def place_of(slot, h, CU, batch, seqlen, blocks, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block: (its sequence, its number there, the sequence's first row in x and its length, where what blocks
    have stands)
    """
    if CU is None:
        b = (slot // blocks).to(tl.int64)
        block = slot % blocks
        first = b * 0
        length = seqlen
        cell = (b * HEADS + h) * blocks + block
    else:
        sequence, block = locate(slot, CU, batch, BLOCK)
        b = (sequence + slot * 0).to(tl.int64)
        first = tl.load(CU + b).to(tl.int64)
        length = tl.load(CU + b + 1) - tl.load(CU + b)
        cell = b * 0 + h * blocks + slot
    return b, block, first, length, cell


@triton.jit
def rows_given(x_rows, token, d, inside, there, ROPE, STEP: tl.constexpr, TURNS: tl.constexpr):
    """Some columns of rows, as they are, or by a ROPE turned and rounded; TURNS are how many dimensions it turns, and
    whether neighbours  # [ROWS, COLS]
    """
    x = tl.load(x_rows + d[None, :], mask=there, other=0.0)
    if ROPE is not None:
        cos, sin = angles_of(ROPE, token, inside)
        x = turned(x, x_rows, d, cos, sin, there, inside, STEP, TURNS[0], TURNS[1]).to(x.dtype)
    return x


@triton.jit
def rows_of_chunk(chunk, length, ROWS: tl.constexpr, SAMPLED: tl.constexpr):
    """(first row, how many) of a chunk of a sequence that sums are of (as `quant.blocks.keys_of_mean`)."""
    first = chunk * ROWS
    count = chunk * 0 + ROWS
    if SAMPLED:
        first += tl.where(length >= MANY, (5 * chunk + 3) % (ROWS // SOME) * SOME, 0)
        count = tl.where(length >= MANY, SOME, count)
    return first, count


@triton.jit
def size_of(x):
    """How large numbers are, what is no number infinitely."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit(do_not_specialize=["batch", "seqlen", "blocks"])
def sum_chunks(
    X, CU, ROPE, SUMS, SPANS, MOST, ZEROS, stride_b, stride_t, stride_h, batch, seqlen, blocks,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_D: tl.constexpr, SAMPLED: tl.constexpr, TURNS: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums or extremes of the columns of PER times ROWS rows of a head, or of some of each ROWS; or how large a head's
    columns are at most, as bits, found with others who look at it, in what was 0. ZEROS are made so, WIDE of a head.
    """
    begin_early(EARLY)
    # who am I
    h = tl.program_id(0) % HEADS
    b, block, first, length, cell = place_of(tl.program_id(0) // HEADS, h, CU, batch, seqlen, blocks, HEADS, PER * ROWS)
    d = tl.arange(0, BLOCK_D)
    x_rows = X + b * stride_b + h.to(tl.int64) * stride_h
    offs = tl.arange(0, STEP)

    # main loop: a thread adds up what it has of a step's rows, every AT_ONCE-th
    total = tl.zeros([AT_ONCE, BLOCK_D], tl.float64)
    low = tl.full([AT_ONCE, BLOCK_D], float("inf"), tl.float32)
    high = tl.full([AT_ONCE, BLOCK_D], float("-inf"), tl.float32)
    size = tl.zeros([AT_ONCE, BLOCK_D], tl.int32)  # as bits, among which those of no number are the largest
    _first_row, count = rows_of_chunk(block, length, ROWS, SAMPLED)
    for start in tl.range(0, PER * count, STEP, num_stages=STAGES):
        first_row, _count = rows_of_chunk(block * PER + start // count, length, ROWS, SAMPLED)
        row = first_row + start % count + offs
        in_x = row < length
        inside = in_x[:, None] & (d < DIM)[None, :]
        token = first + row if CU is not None else b * seqlen + row
        at = x_rows + ((first + row) * stride_t)[:, None]
        x = rows_given(at, token, d, in_x, inside, ROPE, BLOCK_D, TURNS).to(tl.float32)
        if SUMS is not None:
            total += tl.sum(x.to(tl.float64).reshape(STEP // AT_ONCE, AT_ONCE, BLOCK_D), 0)
        if MOST is not None:
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            size = tl.maximum(size, tl.max(bits.reshape(STEP // AT_ONCE, AT_ONCE, BLOCK_D), 0))
        if SPANS is not None:
            finite = tl.abs(x) < float("inf")
            least = tl.where(inside, tl.where(finite, x, float("-inf")), float("inf"))
            most = tl.where(inside, tl.where(finite, x, float("inf")), float("-inf"))
            low = tl.minimum(low, tl.min(least.reshape(STEP // AT_ONCE, AT_ONCE, BLOCK_D), 0))
            high = tl.maximum(high, tl.max(most.reshape(STEP // AT_ONCE, AT_ONCE, BLOCK_D), 0))

    # epilogue
    if SUMS is not None:
        tl.store(SUMS + cell * DIM + d, tl.sum(total, 0), mask=d < DIM)
    if MOST is not None:
        most = size_of(tl.max(size, 0).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        tl.atomic_max(MOST + (b * HEADS + h) * DIM + d, most, mask=d < DIM, sem="relaxed")
    if ZEROS is not None and block == 0:
        for column in tl.static_range(0, WIDE, BLOCK_D):
            tl.store(ZEROS + (b * HEADS + h) * WIDE + column + d, tl.zeros_like(d), mask=column + d < WIDE)
    if SPANS is not None:
        tl.store(SPANS + 2 * cell * DIM + d, tl.min(low, 0), mask=d < DIM)
        tl.store(SPANS + (2 * cell + 1) * DIM + d, tl.max(high, 0), mask=d < DIM)
    end_early(EARLY)


@triton.jit(do_not_specialize=["seqlen", "blocks"])
def join_chunks(
    SUMS, SPANS, ROTATION, MEAN, TURNED, MOST, CU, seqlen, blocks,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr, SAMPLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A head's means of columns in a sequence, as they are and rotated, and how far from them a column's numbers are at
    most.
    """
    begin_early(EARLY)
    # who am I
    h = tl.program_id(0) % HEADS
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    if CU is None:
        length = seqlen
        first = (b * HEADS + h) * blocks
    else:
        length = tl.load(CU + b + 1) - tl.load(CU + b)
        first = h * blocks + tl.load(CU + b) // (PER * ROWS) + b
    parts = tl.cdiv(length, PER * ROWS)

    # main loop
    total = tl.zeros([PARTS, BLOCK_D], tl.float64)
    low = tl.full([PARTS, BLOCK_D], float("inf"), tl.float32)
    high = tl.full([PARTS, BLOCK_D], float("-inf"), tl.float32)
    summed = length * 0
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        for n in tl.static_range(PER):
            first_row, count = rows_of_chunk(part * PER + n, length, ROWS, SAMPLED)
            summed += tl.sum(tl.maximum(tl.minimum(length - first_row, count), 0), 0)  # 0 of parts that are not there
        inside = (part < parts)[:, None] & (d < DIM)[None, :]
        total += tl.load(SUMS + ((first + part) * DIM)[:, None] + d[None, :], mask=inside, other=0.0)
        if SPANS is not None:
            at = SPANS + (2 * (first + part) * DIM)[:, None] + d[None, :]
            low = tl.minimum(low, tl.load(at, mask=inside, other=float("inf")))
            high = tl.maximum(high, tl.load(at + DIM, mask=inside, other=float("-inf")))

    # epilogue
    place = ((b * HEADS + h) * DIM) + d
    mean = (tl.sum(total, 0) / tl.maximum(summed, 1)).to(tl.float32)
    tl.store(MEAN + place, mean, mask=d < DIM)
    if TURNED is not None:
        at = ROTATION + (d * DIM)[:, None] + d[None, :]
        turn = tl.load(at, mask=(d < DIM)[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
        tl.store(TURNED + place, tl.sum(mean[:, None] * turn, 0), mask=d < DIM)
    if SPANS is not None:
        size = tl.maximum(tl.max(high, 0) - mean, mean - tl.min(low, 0))
        tl.store(MOST + place, tl.where(parts > 0, size_of(size), 0.0), mask=d < DIM)
    end_early(EARLY)
