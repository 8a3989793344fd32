"""Which rows a program owns and which tiles it visits."""

import triton
import triton.language as tl

TILE_BITS = tl.constexpr(24)  # of an entry of a list; those above say which parts of the row see nothing of the tile
TILE = tl.constexpr(2**24 - 1)


@triton.jit
def take_turns(pid, slots, pairs, together):
    """(pair of batch and head, slot) of a program: `together` pairs take turns, slot by slot, before the next ones.

    Programs start in order of pid. With the longest slots of several pairs first, the last programs to start are
    short, and the GPU is not left to a few long ones.
    """
    first = pid // (slots * together) * together
    rest = pid - first * slots
    width = tl.minimum(together, pairs - first)
    return first + rest % width, rest // width


@triton.jit
def snake(turn, pid, workers):
    """A worker's item in its `turn`-th turn of a persistent grid. Every other turn goes backwards: who had a long one
    gets a short one.
    """
    return turn * workers + tl.where(turn % 2 == 0, pid, workers - 1 - pid)


@triton.jit
def locate(slot, CU_SEQLENS, batch, BLOCK: tl.constexpr):
    """(sequence, tile inside it) of a packed slot.

    Sequence b owns the slots from cu[b] // BLOCK + b on: enough for its tiles whatever the lengths, so no prefix sum
    and no longest length is needed. A slot beyond its sequence's last tile has nothing to do.
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
def first_within(x, begin, end):
    """A run's first position in 32 bits, within [begin, end]: ends that read tensors have 64 bits, and any number."""
    x = tl.maximum(x, begin)
    if x.dtype.primitive_bitwidth > 32:
        x = tl.minimum(x, end)
    return x.to(tl.int32)


@triton.jit
def last_within(x, begin, end):
    """A run's last position in 32 bits, within [begin - 1, end - 1]."""
    x = tl.minimum(x, end - 1)
    if x.dtype.primitive_bitwidth > 32:
        x = tl.maximum(x, begin - 1)
    return x.to(tl.int32)


@triton.jit
def span_tiles(b, h, x0, x1, low, size, args, nums, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Loop bounds for the rows x0 .. x1 of a mask whose visible positions are one run (everything, if TILES is None).

    Positions of the other axis begin at `low` and number `size`. Returns (begin, end) of the visited tiles and
    (full_begin, full_end) of those without a hidden pair; a tile that reaches beyond the last position is not full,
    since its bounds need checking.
    """
    first_any = 0 * x0
    last_any = first_any + (size - 1)
    first_all = first_any
    last_all = last_any
    if TILES is not None:
        first_any, last_any, first_all, last_all = TILES(b, h, x0, x1, args, nums)
        first_any = first_within(first_any - low, 0, size)
        last_any = last_within(last_any - low, 0, size)
        first_all = first_within(first_all - low, 0, size)
        last_all = last_within(last_all - low, 0, size)
    begin = first_any // BLOCK
    end = tl.where(last_any >= first_any, last_any // BLOCK + 1, begin)
    full_begin = tl.maximum((first_all + BLOCK - 1) // BLOCK, begin)
    full_end = tl.minimum((last_all + 1) // BLOCK, end)
    none = full_end <= full_begin
    return begin, end, tl.where(none, end, full_begin), tl.where(none, end, full_end)


@triton.jit
def visits(b, h, x0, x1, low, size, args, nums, listed, LISTS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """(first visited tile, first FULL tile, number of FULL ones, number of the others): from the row's list, whose
    tiles `visit` finds, or as `span_tiles`.
    """
    if LISTS:
        begin = b * 0
        full_begin = begin
        num_partial = tl.load(listed)
        num_full = tl.load(listed + 1)
    else:
        begin, end, full_begin, full_end = span_tiles(b, h, x0, x1, low, size, args, nums, TILES, BLOCK)
        num_full = full_end - full_begin
        num_partial = end - begin - num_full
    return begin, full_begin, num_full, num_partial


@triton.jit
def visit(t, begin, full_begin, num_full, listed, width, LISTS: tl.constexpr, MASKED: tl.constexpr):
    """The t-th FULL tile, or with MASKED the t-th of the others. A list holds the others from its front, behind the
    two numbers, and the FULL ones from its back.
    """
    if LISTS:
        at = 2 + t if MASKED else width - 1 - t
        tile = tl.load(listed + at)
    elif MASKED:
        tile = begin + t
        tile = tl.where(tile < full_begin, tile, tile + num_full)
    else:
        tile = full_begin + t
    return tile


@triton.jit
def visit_any(t, tiles, LISTS: tl.constexpr):
    """The t-th of all visited tiles, those that are not FULL first."""
    return tile_of_entry(entry_of(t, tiles, LISTS), tiles, LISTS)


@triton.jit
def entry_of(t, tiles, LISTS: tl.constexpr):
    """The t-th of all visited tiles, as a list has it."""
    begin, full_begin, num_full, num_partial, _last, listed, width = tiles
    if LISTS:
        entry = tl.load(listed + tl.where(t < num_partial, 2 + t, width - 1 - (t - num_partial)))
    else:
        entry = begin + t
        entry = tl.where(entry < full_begin, entry, entry + num_full)
        entry = tl.where(t < num_partial, entry, full_begin + (t - num_partial))
    return entry


@triton.jit
def tile_of_entry(entry, tiles, LISTS: tl.constexpr):
    """The number of a visited tile; where nothing is, the first tile has nothing in it."""
    return entry & TILE if LISTS else tl.maximum(tl.minimum(entry, tiles[4]), 0)


@triton.jit
def is_passed_over(entry, part):
    """Whether a part of a row sees nothing of a listed tile."""
    return (entry >> (TILE_BITS + part)) & 1 != 0


@triton.jit
def visit_ahead(t, ahead, count, begin, full_begin, num_full, listed, width, LISTS: tl.constexpr, MASKED: tl.constexpr):
    """(tile t, tile t + 1 if it comes from a list): a list's next tile is loaded while this one is worked on."""
    tile = ahead
    if LISTS:
        ahead = visit(tl.minimum(t + 1, count - 1), begin, full_begin, num_full, listed, width, LISTS, MASKED)
    else:
        tile = visit(t, begin, full_begin, num_full, listed, width, LISTS, MASKED)
    return tile, ahead


@triton.jit
def proved(rows, others):
    """Positions of a program's rows as formulas get them: 0 where the sequence has none on the other side. What
    formulas read is proved to be inside for sequences that have both, and for 0 (`ops.attention.problem`).
    """
    return tl.where(others > 0, rows, 0)


@triton.jit
def row_ends(b, h, rows, begin, end, args, nums, ROWS: tl.constexpr):
    """First and last visible position of the other axis for each row, int32, within [begin, end)."""
    none = rows * 0
    first = none + begin
    last = none + (end - 1)
    if ROWS is not None:
        row_first, row_last = ROWS(b, h, rows, args, nums)
        first = first_within(row_first, begin, end) + none
        last = last_within(row_last, begin, end) + none
    return first, last


@triton.jit
def call_once(b, h, rows, args, nums, ONCE: tl.constexpr):
    """What a formula computes once for a program's rows, as a tuple."""
    once = (b,)
    if ONCE is not None:
        once = ONCE(b, h, rows, args, nums)
    return once
