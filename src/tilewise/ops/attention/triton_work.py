"""Who does which tile of a paged call: an even split of all tiles, planned on the device.

A *unit* is a tile of one request's queries, with the run of key tiles that any of its rows sees, and at least one. All
units' tiles, head by head, make one line of W positions. Of P programs the first W mod P have W // P + 1 of them, the
others W // P, whatever the lengths, as one *piece*, or as several of which others may take the last. A row of tiles
that pieces cut leaves a part in each of them, and whoever leaves the last one merges them by their log-sum-exp, in
order (Stream-K, Osama et al. 2023; LeanAttention, Sanovar et al. 2024). `schedule.worklist` is the same on the host.

Where pieces begin depends on the whole batch. With CHUNK above 1 a position is not a tile but a *chunk*: what a unit
visits of CHUNK tiles from a multiple of CHUNK on. Rows are then cut at these alone, whatever else is in the batch.
"""

import triton
import triton.language as tl

from tilewise.tiles.visit import proved, span_tiles

UNIT = tl.constexpr(8)  # numbers of a unit: request, tile, first key tile, their number, keys, queries, first row
FIELD = tl.constexpr(2**40)  # a unit, in numbers that count units above tiles
LARGE = tl.constexpr(96)  # positions of a share that is divided into several pieces
SLOWER = tl.constexpr(44)  # how many eighths of a tile of many rows one of few rows takes a multiprocessor
LOOK = tl.constexpr(1024)  # units that are looked through at a time


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


@triton.jit(do_not_specialize=["batch", "seqlen_q", "slots", "pieces", "others", "mask_nums"])
def plan_work(
    CU_Q, SEQLENS, UNITS, BEFORE, ARRIVED, SHARES, mask_args, mask_nums, batch, seqlen_q, slots, pieces, others,
    PACKED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BY_HEAD: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
    EARLY: tl.constexpr, CHUNK: tl.constexpr = 1, FEW: tl.constexpr = None, SMS: tl.constexpr = None,
):  # fmt: skip
    """Write the units that there are, one behind the other, how many tiles (or chunks) are before each, behind the last
    one all, and zeros to the counters. One program.

    With FEW, units are of requests with up to so many rows, and SHARES what `write_shares` says.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    counters = tl.arange(0, PIECES)
    tl.store(ARRIVED + counters, 0, mask=counters <= pieces)
    before = tl.zeros([], tl.int64)  # tiles or chunks, and units above
    elsewhere = tl.zeros([], tl.int64)  # tiles of requests with more than FEW rows
    for first in range(0, slots, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
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
        if FEW is not None:
            few = queries * GROUP <= FEW
            elsewhere += tl.sum(tl.where(few, 0, count).to(tl.int64), 0)
            there = there & few
            count = tl.where(few, count, 0)
        places = count
        if CHUNK > 1:
            places = tl.where(there, chunks_of(begin, count, CHUNK), 0)
        both = places.to(tl.int64) + there.to(tl.int64) * FIELD
        upto = tl.cumsum(both, 0) + before
        unit = (upto // FIELD).to(tl.int32) - 1
        to = UNITS + unit * UNIT
        tl.store(to, b, mask=there)
        tl.store(to + 1, tile, mask=there)
        tl.store(to + 2, begin, mask=there)
        tl.store(to + 3, count, mask=there)
        tl.store(to + 4, keys, mask=there)
        tl.store(to + 5, queries, mask=there)
        tl.store(to + 6, start, mask=there)
        tl.store(BEFORE + unit, (upto % FIELD).to(tl.int32) - places, mask=there)
        before += tl.sum(both, 0)
    units = (before // FIELD).to(tl.int32)
    for first in range(units, slots + 2, AT_ONCE):  # behind the last, where programs look but do not work
        at = first + tl.arange(0, AT_ONCE)
        tl.store(BEFORE + at, (before % FIELD).to(tl.int32), mask=at <= slots)
        for n in tl.static_range(UNIT):
            tl.store(UNITS + at * UNIT + n, 1 if n == 3 else 0, mask=at < slots + 2)
    if FEW is not None:
        write_shares(SHARES, before % FIELD, elsewhere, others, SMS)


@triton.jit
def write_shares(SHARES, tiles, elsewhere, others, SMS: tl.constexpr):
    """Divide SMS multiprocessors between `tiles` of few rows, which memory bounds, and those `elsewhere`, which
    products bound, so that both end together: a kernel of `others` programs does the latter, some of them idle.

    SHARES are what that kernel's counter of items begins with, how many of its programs have nothing to do, and how
    many multiprocessors are left for tiles of few rows.
    """
    few = tiles * SLOWER
    work = tl.maximum(few + elsewhere * 8, 1)
    share = (SMS * few + work - 1) // work  # rounded up: one more costs the other kernel less than one less this one
    share = tl.where(elsewhere > 0, tl.minimum(share, SMS * 2 // 3), share).to(tl.int32)  # memory's rate is reached
    idle = tl.maximum(share - (SMS - others), 0)
    tl.store(SHARES, -idle)
    tl.store(SHARES + 1, idle)
    tl.store(SHARES + 2, share)


@triton.jit
def piece_of_turn(turn, programs, rounds):
    """The piece that is taken in a turn: the first of each program, then the second of each, and so on."""
    return turn % programs * rounds + turn // programs


@triton.jit
def rounds_of(programs, work, MOST: tl.constexpr):
    """Of how many pieces a program's share is: small ones are not worth taking (benchmarks/NOTES.md)."""
    return tl.where(work // tl.maximum(programs, 1) >= LARGE, MOST, 1)


@triton.jit
def piece_span(piece, programs, rounds, work):
    """(the first position of a piece, how many it has).

    Programs have alike many positions, where there are more of them the last ones none. Of a program's pieces the first
    is most of them, and each next one half of the rest: whoever is early takes more of these, and all end together.
    """
    p = piece // rounds
    round = piece % rounds
    first = program_start(p, programs, work)
    count = program_start(p + 1, programs, work) - first
    before = piece_before(round, rounds, count)
    return first + before, piece_before(round + 1, rounds, count) - before


@triton.jit
def program_start(p, programs, work):
    """The first position of a program: the first ones have one more than the others, where they cannot be alike."""
    busy = tl.minimum(programs, work)
    p = tl.minimum(p, busy)
    each = work // tl.maximum(busy, 1)
    return p * each + tl.minimum(p, work - busy * each)


@triton.jit
def piece_before(round, rounds, count):
    """How many of a program's `count` positions are before its piece of a round."""
    return tl.where(round == 0, 0, tl.where(round == rounds, count, count - (count // 8 >> tl.maximum(round - 1, 0))))


@triton.jit
def piece_at(position, programs, rounds, work):
    """The piece that holds a position."""
    busy = tl.minimum(programs, work)
    each = work // tl.maximum(busy, 1)
    more = work - busy * each  # programs that have one position more
    upto = more * (each + 1)
    p = tl.where(position < upto, position // (each + 1), more + (position - upto) // each)
    first = p * each + tl.minimum(p, more)
    count = each + (p < more).to(tl.int32)
    round = 0 * position
    for n in range(1, rounds):
        round += (position - first >= piece_before(n, rounds, count)).to(tl.int32)
    return p * rounds + round


@triton.jit
def row_pieces(row_start, count, programs, rounds, work):
    """The first and the last piece that hold some of a row of `count` tiles."""
    return piece_at(row_start, programs, rounds, work), piece_at(row_start + count - 1, programs, rounds, work)


@triton.jit
def has_all_parts(ARRIVED, first, last, cut):
    """Count one more part of a row that is `cut` between the pieces `first` and `last`, behind a barrier: are all there
    now? Whoever finds so may read them, and has the counter set back. A row that is not cut is all there.
    """
    arrived = last - first
    if cut:
        arrived = tl.atomic_add(ARRIVED + first, 1, sem="acq_rel")  # releases this part, acquires the others
    whole = arrived == last - first
    if whole:
        tl.store(ARRIVED + first, 0, mask=cut)  # for the next run of the plan
        tl.debug_barrier()
    return whole


@triton.jit
def chunks_of(begin, count, CHUNK: tl.constexpr):
    """How many chunks `count` tiles from `begin` on are in."""
    return (begin + count - 1) // CHUNK - begin // CHUNK + 1


@triton.jit
def tile_at(position, BEFORE, UNITS, slots, look, HEADS_KV: tl.constexpr, CHUNK: tl.constexpr = 1):
    """(unit, head, tile of its run) at a position, of a chunk the first; `look` is 0 .. LOOK - 1."""
    unit = position * 0 - 1
    for first in range(0, slots + 1, LOOK):
        there = first + look <= slots
        before = tl.load(BEFORE + first + look, mask=there, other=0)
        unit += tl.sum((there & (before * HEADS_KV <= position)).to(tl.int32), 0)
    unit = tl.minimum(unit, slots)
    rest = position - tl.load(BEFORE + unit) * HEADS_KV
    count = tl.maximum(tl.load(UNITS + unit * UNIT + 3), 1)
    if CHUNK > 1:
        begin = tl.load(UNITS + unit * UNIT + 2)
        count = chunks_of(begin, count, CHUNK)
        tile = tl.maximum((begin // CHUNK + rest % count) * CHUNK - begin, 0)
    else:
        tile = rest % count
    return unit, rest // count, tile


@triton.jit
def unit_of(UNITS, unit):
    """(request, tile, first key tile, their number, keys, queries, first row of q) of a unit."""
    at = UNITS + unit * UNIT
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6),
    )  # fmt: skip


@triton.jit
def next_tile(u, hk, t, unit, coming, HEADS_KV: tl.constexpr):
    """(unit, head, tile) behind this one, and what the unit is; `coming` is the next one."""
    last = t + 1 == unit[3]
    t = tl.where(last, 0, t + 1)
    hk = tl.where(last, hk + 1, hk)
    move = hk == HEADS_KV
    hk = tl.where(move, 0, hk)
    u = tl.where(move, u + 1, u)
    after = (
        tl.where(move, coming[0], unit[0]), tl.where(move, coming[1], unit[1]), tl.where(move, coming[2], unit[2]),
        tl.where(move, coming[3], unit[3]), tl.where(move, coming[4], unit[4]), tl.where(move, coming[5], unit[5]),
        tl.where(move, coming[6], unit[6]),
    )  # fmt: skip
    return u, hk, t, after


@triton.jit
def rows_of_unit(unit, hk, r, GROUP: tl.constexpr):
    """(which rows r of a unit are there, their query, head and position) for a key/value head."""
    keys = unit[4]
    queries = unit[5]
    in_r = r < queries * GROUP
    r = tl.maximum(tl.minimum(r, queries * GROUP - 1), 0)
    m = r // GROUP
    return in_r, m, hk * GROUP + r % GROUP, proved(m + keys - queries, tl.minimum(keys, queries))
