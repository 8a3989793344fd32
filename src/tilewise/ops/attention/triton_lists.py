"""Tile lists on the device: which tiles of the other side each tile visits, from the mask's interval bounds, without
a host sync.
"""

import triton
import triton.language as tl

from tilewise.tiles.early import begin_early
from tilewise.tiles.visit import TILE_BITS, locate


@triton.jit(do_not_specialize=["size", "blocks"])
def block_extrema(X, LOW, HIGH, size, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Smallest and largest of each run of BLOCK elements along the last dimension of a contiguous tensor; NaN of a run
    that holds one.
    """
    begin_early(EARLY)
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    offs = tl.minimum((pid % blocks) * BLOCK + tl.arange(0, BLOCK), size - 1)
    x = tl.load(X + row * size + offs)
    low = tl.min(x, 0)
    high = tl.max(x, 0)
    if x.dtype.is_floating():
        undefined = tl.max((x != x).to(tl.int32), 0) > 0
        low = tl.where(undefined, float("nan"), low)
        high = tl.where(undefined, float("nan"), high)
    tl.store(LOW + pid, low)
    tl.store(HIGH + pid, high)


@triton.jit
def looks(other, offset, end, row, rule, BLOCK: tl.constexpr, CLASSIFY: tl.constexpr, FOR_KEYS: tl.constexpr):
    """(what parts of a row see something of, what any does, what all see whole) of tiles of the other side, whose first
    begins at `offset`; a tile that reaches beyond the `end` is not seen whole.
    """
    b, h, shift, own0, own1, has_rows = row
    block_i, block_j, args, nums = rule
    exists = other * BLOCK + offset < end
    first = tl.where(exists, other * BLOCK + offset, 0)
    x0 = first.to(tl.int64)[None, :]
    x1 = tl.minimum(first + BLOCK, end).to(tl.int64)[None, :] - 1
    if FOR_KEYS:
        sure, maybe = CLASSIFY(b, h, x0 + shift, x1 + shift, own0, own1, block_i, block_j, args, nums)
    else:
        sure, maybe = CLASSIFY(b, h, own0 + shift, own1 + shift, x0, x1, block_i, block_j, args, nums)
    whole = first + BLOCK <= end
    seen = exists[None, :] & has_rows & maybe
    clear = (seen & sure & whole[None, :]) | (has_rows == 0)
    visited = tl.max(seen.to(tl.int32), 0) > 0
    return seen, visited, visited & (tl.min(clear.to(tl.int32), 0) > 0)


@triton.jit
def count_tiles(offset, end, row, rule, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CLASSIFY: tl.constexpr):
    """(first position of the tiles of keys that a row visits, how many there are, how many of them are FULL)."""
    low = end
    num_visited = 0
    num_full = 0
    for start in range(0, (end - offset + BLOCK - 1) // BLOCK, CHUNK):
        other = start + tl.arange(0, CHUNK)
        _seen, visited, full = looks(other, offset, end, row, rule, BLOCK, CLASSIFY, False)
        low = tl.minimum(low, tl.min(tl.where(visited, other * BLOCK + offset, end), 0))
        num_visited += tl.sum(visited.to(tl.int32), 0)
        num_full += tl.sum(full.to(tl.int32), 0)
    return low, num_visited, num_full


@triton.jit
def best_offset(end, row, rule, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CLASSIFY: tl.constexpr):
    """Where tiles of keys best begin for a row, at 0 or at the first key that it sees, modulo BLOCK: whichever it
    visits fewer tiles with, or as many of which more are FULL.
    """
    b, h, shift, own0, own1, has_rows = row
    block_i, block_j, args, nums = rule
    low, num_visited, num_full = count_tiles(0 * end, end, row, rule, BLOCK, CHUNK, CLASSIFY)
    low = tl.maximum(tl.minimum(low, end - 1), 0)
    more = tl.arange(0, BLOCK)
    x0 = (low + 0 * more).to(tl.int64)[None, :]
    x1 = tl.maximum(tl.minimum(low + more, end - 1), 0).to(tl.int64)[None, :]
    _sure, maybe = CLASSIFY(b, h, own0 + shift, own1 + shift, x0, x1, block_i, block_j, args, nums)
    seen = tl.max((has_rows & maybe).to(tl.int32), 0) > 0
    offset = tl.min(tl.where(seen, more, BLOCK), 0) % BLOCK
    _low, visited_so, full_so = count_tiles(offset, end, row, rule, BLOCK, CHUNK, CLASSIFY)
    better = (visited_so < num_visited) | ((visited_so == num_visited) & (full_so > num_full))
    return tl.where(better, offset, 0)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "slots", "width", "nums"])
def tile_lists(
    LISTED, CU_Q, CU_K, args, nums, width, batch, seqlen_q, seqlen_k, slots,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    CLASSIFY: tl.constexpr, PACKED: tl.constexpr, FOR_KEYS: tl.constexpr, MOVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row: a tile of queries lists its tiles of keys, or with FOR_KEYS a tile of keys its tiles of
    queries. A row is laid out as `tiles.visit.visit` says, and has one more number behind the tiles that are not FULL
    (a row that sees nothing has the first): the row whose turn it is when this one's comes. The first keys and the last
    queries have the first turn.

    With PARTS, a power of two, the positions of a row are in as many parts, each of which is classified. Tiles that are
    not FULL have a bit for each above their number, 1 if the part sees nothing of it.

    With MOVED, in lists of queries without parts, tiles begin where it is best for the row (`best_offset`): all of them
    have the position at which the first begins above their number.

    Rows are (batch, head, slot), or (head, slot) when packed, and behind the last is a 0, to count with; a tile that
    reaches beyond the other side's end is PARTIAL.
    """
    begin_early(EARLY)
    OWN: tl.constexpr = BLOCK_N if FOR_KEYS else BLOCK_M
    BLOCK: tl.constexpr = BLOCK_M if FOR_KEYS else BLOCK_N
    PART: tl.constexpr = OWN // PARTS
    pid = tl.program_id(0)
    slot = pid % slots
    h = (pid // slots) % HEADS
    b = pid // slots // HEADS
    listed = LISTED + pid.to(tl.int64) * width
    tile = slot
    if PACKED:
        if FOR_KEYS:
            b, tile = locate(slot, CU_K, batch, BLOCK_N)
        else:
            b, tile = locate(slot, CU_Q, batch, BLOCK_M)
        seqlen_q = tl.load(CU_Q + b + 1) - tl.load(CU_Q + b)
        seqlen_k = tl.load(CU_K + b + 1) - tl.load(CU_K + b)
    shift = seqlen_k - seqlen_q
    if FOR_KEYS:
        size, end = seqlen_k, seqlen_q
    else:
        size, end = seqlen_q, seqlen_k
    end = tl.where(tile * OWN < size, end, 0)
    block_i = tl.full([], BLOCK_M if FOR_KEYS else PART, tl.int64)
    block_j = tl.full([], PART if FOR_KEYS else BLOCK_N, tl.int64)
    part = tl.arange(0, PARTS)
    own0 = tile * OWN + part * PART
    has_rows = (own0 < size)[:, None]
    own1 = tl.minimum(own0 + PART, size).to(tl.int64)[:, None] - 1
    own0 = tl.minimum(own0, size - 1).to(tl.int64)[:, None]
    row = (b, h, shift, own0, own1, has_rows)
    rule = (block_i, block_j, args, nums)
    bit = tl.full([PARTS], 1, tl.int32) << (part + TILE_BITS)
    hidden = tl.sum(bit, 0)  # the one tile that who sees nothing visits
    offset = 0
    if MOVED:
        tl.static_assert(PARTS == 1 and not FOR_KEYS)
        hidden = 0
        offset = 0 * end
        if end > 0:  # who sees nothing may be no tile, of whose positions nothing is proved
            offset = best_offset(end, row, rule, BLOCK, CHUNK, CLASSIFY)
    num_partial = 0
    num_full = 0
    for start in range(0, (end - offset + BLOCK - 1) // BLOCK, CHUNK):
        other = start + tl.arange(0, CHUNK)
        seen, visited, full = looks(other, offset, end, row, rule, BLOCK, CLASSIFY, FOR_KEYS)
        partial = visited & (full == 0)
        full_at = num_full + tl.cumsum(full.to(tl.int32), 0) - 1
        partial_at = num_partial + tl.cumsum(partial.to(tl.int32), 0) - 1
        entry = other | (offset << TILE_BITS)
        if PARTS > 1:
            entry += tl.sum(tl.where(seen, 0, bit[:, None]), 0)
        tl.store(listed + width - 1 - full_at, other | (offset << TILE_BITS), mask=full)
        tl.store(listed + 2 + partial_at, entry, mask=partial)
        num_full += tl.sum(full.to(tl.int32), 0)
        num_partial += tl.sum(partial.to(tl.int32), 0)
    tl.store(listed, num_partial)
    tl.store(listed + 1, num_full)
    if num_partial + num_full == 0:
        tl.store(listed + 2, hidden)
    turn = 2 + tl.maximum(num_partial, 1 - num_full)
    tl.store(listed + turn, slot if FOR_KEYS else slots - 1 - slot)
    if pid == 0:
        tl.store(LISTED + tl.num_programs(0).to(tl.int64) * width, 0)


@triton.jit(do_not_specialize=["width", "slots"])
def sort_lists(LISTED, width, slots, SLOTS: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr):
    """One program for the rows of a batch element and head, SLOTS at the most: the rows that visit most have the first
    turn, and those that visit as many go in order.
    """
    begin_early(EARLY)
    listed = LISTED + tl.program_id(0).to(tl.int64) * slots * width
    row = tl.arange(0, SLOTS)
    there = row < slots
    visits = tl.load(listed + row * width, mask=there, other=0)
    visits += tl.load(listed + row * width + 1, mask=there, other=0)
    turn = tl.zeros([SLOTS], tl.int32)
    for start in range(0, slots, SOME):
        other = start + tl.arange(0, SOME)
        exists = other < slots
        theirs = tl.load(listed + other * width, mask=exists, other=-1)
        theirs += tl.load(listed + other * width + 1, mask=exists, other=0)
        alike = (theirs[None, :] == visits[:, None]) & (other[None, :] < row[:, None])
        before = (theirs[None, :] > visits[:, None]) | alike
        turn += tl.sum(before.to(tl.int32), 1)
    num_partial = tl.load(listed + turn * width, mask=there, other=0)
    num_full = tl.load(listed + turn * width + 1, mask=there, other=0)
    place = turn * width + 2 + tl.maximum(num_partial, 1 - num_full)
    tl.store(listed + place, row, mask=there)
