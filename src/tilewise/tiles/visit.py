"""Which rows a program owns and which tiles it visits."""

import triton
import triton.language as tl


@triton.jit
def locate(slot, CU_SEQLENS, batch, BLOCK: tl.constexpr):
    """(sequence, tile inside it) of a packed slot.

    Sequence b owns the slots from cu[b] // BLOCK + b on: enough for its tiles whatever the lengths, so no prefix sum and
    no longest length is needed. A slot beyond its sequence's last tile has nothing to do.
    """
    low = 0
    high = batch
    while high - low > 1:  # the last sequence whose first slot is not beyond `slot`
        middle = (low + high) // 2
        first = tl.load(CU_SEQLENS + middle) // BLOCK + middle
        if first <= slot:
            low = middle
        else:
            high = middle
    return low, slot - (tl.load(CU_SEQLENS + low) // BLOCK + low)


@triton.jit
def span_tiles(first_any, last_any, first_all, last_all, size, BLOCK: tl.constexpr):
    """Loop bounds from a visible run: (begin, end) of the visited tiles and (full_begin, full_end) of those without a hidden pair."""
    first = tl.maximum(first_any, 0).to(tl.int32)
    last = tl.minimum(last_any, size - 1).to(tl.int32)
    begin = first // BLOCK
    end = tl.where(last >= first, last // BLOCK + 1, begin)
    # a tile beyond the sequence's end counts as partial: it needs its bounds checked
    full_begin = tl.maximum((tl.maximum(first_all, 0).to(tl.int32) + BLOCK - 1) // BLOCK, begin)
    full_end = tl.minimum((tl.minimum(last_all, size - 1).to(tl.int32) + 1) // BLOCK, end)
    empty = full_end <= full_begin
    return begin, end, tl.where(empty, end, full_begin), tl.where(empty, end, full_end)


@triton.jit
def partial_tile(t, begin, full_begin, full_end):
    """The t-th visited tile outside the full run."""
    n = begin + t
    return tl.where(n < full_begin, n, n + (full_end - full_begin))


@triton.jit
def row_ends(b, h, rows, begin, end, args, nums, ROWS: tl.constexpr):
    """First and last visible position of the other axis for each row, int32, within [begin, end)."""
    first = tl.zeros_like(rows) + begin
    last = tl.zeros_like(rows) + (end - 1)
    if ROWS is not None:
        row_first, row_last = ROWS(b, h, rows, args, nums)
        first = tl.maximum(row_first, begin).to(tl.int32) + tl.zeros_like(rows)
        last = tl.minimum(row_last, end - 1).to(tl.int32) + tl.zeros_like(rows)
    return first, last
