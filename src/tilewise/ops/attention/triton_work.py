"""Who does which tile of a paged call: an even split of all tiles, planned on the device.

A *unit* is a tile of one request's queries, with the run of key tiles that any of its rows sees, and at least one. All
units' tiles, head by head, make one line of W positions; of P programs the p-th takes those from p W / P to
(p + 1) W / P, whatever the lengths. So a row of tiles may be cut between neighbours, whose partial results merge by
their log-sum-exp, in order (Stream-K, Osama et al. 2023; LeanAttention, Sanovar et al. 2024). `schedule.worklist` is
the same on the host.
"""

import triton
import triton.language as tl

from tilewise.tiles.visit import span_tiles

UNIT = tl.constexpr(
    8
)  # numbers of a unit: request, tile, first key tile, their number, those before, lengths, first row
SHARE = tl.constexpr(4)  # numbers of a program's share: first position, and its unit, head and tile
FIELD = tl.constexpr(2**40)  # a unit, in numbers that count units above tiles


@triton.jit
def slot_of(slots, CU_Q, batch, seqlen_q, PACKED: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
            STEPS: tl.constexpr):  # fmt: skip
    """(request, tile of its rows, queries, first row of q) of each of `slots`. A packed request owns the slots from
    cu[b] * GROUP // BLOCK_R + b on, enough for its tiles (`tiles.visit.locate`).
    """
    if PACKED:
        low = 0 * slots
        high = low + batch
        for _ in range(STEPS):
            middle = (low + high) // 2
            first = tl.load(CU_Q + middle) * GROUP // BLOCK_R + middle
            more = high - low > 1
            low = tl.where(more & (first <= slots), middle, low)
            high = tl.where(more & (first > slots), middle, high)
        start = tl.load(CU_Q + low)
        queries = tl.load(CU_Q + low + 1) - start
        tile = slots - (start * GROUP // BLOCK_R + low)
    else:
        tiles = (seqlen_q * GROUP + BLOCK_R - 1) // BLOCK_R
        low = slots // tiles
        tile = slots % tiles
        queries = 0 * slots + seqlen_q
        start = 0 * slots
    return low, tile, queries, start


@triton.jit(do_not_specialize=["batch", "seqlen_q", "slots", "programs", "mask_nums"])
def plan_work(
    CU_Q, SEQLENS, UNITS, SHARES, DONE, mask_args, mask_nums, batch, seqlen_q, slots, programs,
    PACKED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BY_HEAD: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SHARES_OF: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write the units that there are, one behind the other, and the programs' shares, of which none is done. One
    program.
    """
    HEADS_KV: tl.constexpr = HEADS // GROUP
    before = tl.zeros([], tl.int64)  # tiles, and units above
    for first in range(0, slots, CHUNK):
        at = first + tl.arange(0, CHUNK)
        there = at < slots
        b, tile, queries, start = slot_of(
            tl.minimum(at, slots - 1), CU_Q, batch, seqlen_q, PACKED, GROUP, BLOCK_R, STEPS
        )
        keys = tl.load(SEQLENS + b)
        row = tile * BLOCK_R
        there = there & (row < queries * GROUP)
        x0 = row // GROUP + keys - queries
        x1 = (tl.minimum(row + BLOCK_R, queries * GROUP) - 1) // GROUP + keys - queries
        begin, end, _, _ = span_tiles(b, 0 * b, x0, x1, 0, keys, mask_args, mask_nums, TILES, BLOCK_N)
        if BY_HEAD:  # one run for all heads
            end = tl.where(end > begin, end, 0)
            begin = tl.where(end > begin, begin, 2**30)
            for h in range(1, HEADS):
                begin_h, end_h, _, _ = span_tiles(b, h + 0 * b, x0, x1, 0, keys, mask_args, mask_nums, TILES, BLOCK_N)
                begin = tl.where(end_h > begin_h, tl.minimum(begin, begin_h), begin)
                end = tl.where(end_h > begin_h, tl.maximum(end, end_h), end)
            begin = tl.where(end > 0, begin, 0)
        count = tl.where(there, tl.maximum(end - begin, 1), 0)
        both = count.to(tl.int64) + there.to(tl.int64) * FIELD
        upto = tl.cumsum(both, 0) + before
        unit = (upto // FIELD).to(tl.int32) - 1
        tiles_before = (upto % FIELD).to(tl.int32) - count
        to = UNITS + unit * UNIT
        tl.store(to, b, mask=there)
        tl.store(to + 1, tile, mask=there)
        tl.store(to + 2, begin, mask=there)
        tl.store(to + 3, count, mask=there)
        tl.store(to + 4, tiles_before, mask=there)
        tl.store(to + 5, keys, mask=there)
        tl.store(to + 6, queries, mask=there)
        tl.store(to + 7, start, mask=there)
        before += tl.sum(both, 0)
    units = (before // FIELD).to(tl.int32)
    tiles = (before % FIELD).to(tl.int32)
    for behind in range(2):  # units behind the last, at which programs look but do not work
        for n in tl.static_range(UNIT):
            tl.store(UNITS + (units + behind) * UNIT + n, tiles if n == 4 else (1 if n == 3 else 0))
    tl.debug_barrier()

    work = tiles * HEADS_KV
    p = tl.arange(0, SHARES_OF)
    first = share_start(p, programs, work)
    low = 0 * p
    high = low + units + 1
    for _ in range(STEPS):
        middle = (low + high) // 2
        tiles_before = tl.load(UNITS + middle * UNIT + 4)
        more = high - low > 1
        low = tl.where(more & (tiles_before * HEADS_KV <= first), middle, low)
        high = tl.where(more & (tiles_before * HEADS_KV > first), middle, high)
    count = tl.load(UNITS + low * UNIT + 3)
    rest = first - tl.load(UNITS + low * UNIT + 4) * HEADS_KV
    to = SHARES + p * SHARE
    tl.store(to, first, mask=p <= programs)
    tl.store(to + 1, low, mask=p <= programs)
    tl.store(to + 2, rest // count, mask=p <= programs)
    tl.store(to + 3, rest % count, mask=p <= programs)
    tl.store(DONE + p, 0, mask=p < programs)


@triton.jit
def share_start(p, programs, work):
    """The first position of program p; where there are more programs than positions, the last ones have none."""
    busy = tl.minimum(programs, work)
    return tl.where(p < busy, (p.to(tl.int64) * work // tl.maximum(busy, 1)).to(tl.int32), work)


@triton.jit
def owner_of(position, programs, work):
    """The program whose share holds a position."""
    busy = tl.minimum(programs, work)
    return (((position + 1).to(tl.int64) * busy - 1) // work).to(tl.int32)
