"""Prefixes that requests share, found in the block table on the device: computed once, and merged with the rest of each
request in the same launch (Ye et al., "FlashInfer": composable formats; Juravsky et al., "Hydragen").

Neighbours in the batch whose rows of the block table begin alike make a *group*, where that saves more than it costs.
The rows of SHARED requests of a group at a time are a *prefix unit*: as if one request had all their queries behind the
keys that they share. It stands in the line before these requests' own units, which begin where it ends. Both leave
parts, and whoever leaves the last part of a request merges it. `schedule.sharing` is the same on the host.
"""

import triton
import triton.language as tl

from tilewise.ops.attention.triton_work import FIELD, UNIT, row_pieces

PREFIX = tl.constexpr(7)  # a number of a unit: how many before it its prefix unit is, 0 of none; -1 of a prefix unit
MOST = tl.constexpr(2**20)  # tiles of a prefix, at most


@triton.jit(do_not_specialize=["stride_t", "seqlen_q"])
def common_prefixes(
    TABLE, FIRST, SEQLENS, COMMON, ARRIVED, stride_t, seqlen_q, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    COUNTERS: tl.constexpr, ROOM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write how many tiles of keys a request has in common with the one before it, all of them before the queries of
    both, and zeros to its COUNTERS counters. A program for each request.
    """
    b = tl.program_id(0)
    counters = tl.arange(0, ROOM)
    tl.store(ARRIVED + 1 + b * COUNTERS + counters, 0, mask=counters < COUNTERS)
    if b == 0:
        tl.store(ARRIVED, 0)
    other = tl.maximum(b - 1, 0)
    keys = tl.minimum(tl.load(SEQLENS + b), tl.load(SEQLENS + other)) - seqlen_q
    keys = tl.where(b > 0, tl.maximum(keys, 0), 0)
    pages = (keys + PAGE - 1) // PAGE
    mine = TABLE + b.to(tl.int64) * stride_t if FIRST is None else TABLE + tl.load(FIRST + b)
    others = TABLE + other.to(tl.int64) * stride_t if FIRST is None else TABLE + tl.load(FIRST + other)
    seen = 0 * pages
    common = seen
    while (common == seen) & (seen < pages):
        n = seen + tl.arange(0, AT_ONCE)
        differ = tl.load(mine + n, mask=n < pages, other=-1) != tl.load(others + n, mask=n < pages, other=-1)
        seen = tl.minimum(seen + AT_ONCE, pages)
        common = tl.min(tl.where(differ, n, seen), 0)
    tl.store(COMMON + b, tl.minimum(tl.minimum(common * PAGE, keys) // BLOCK_N, MOST - 1))


@triton.jit
def least(a, b):
    return tl.minimum(a, b)


@triton.jit
def least_upto(x, group):
    """The least x of a group so far: x, below MOST, is moved so that each group is below those before it."""
    return tl.associative_scan(x - group * MOST, 0, least) + group * MOST


@triton.jit
def least_onward(x, group):
    """The least x of the rest of a group."""
    return tl.associative_scan(x + group * MOST, 0, least, reverse=True) - group * MOST


@triton.jit
def groups_of(COMMON, at, batch, token_bytes, part_bytes, SHARED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first request, number of requests, tiles of the prefix or 0) of the group that each of all requests is in.

    A request goes with the one before it, unless either has more than twice as much in common with its other neighbour.
    A group shares what all its neighbours have in common, if the keys that are not read again are 1.3 times the bytes
    of the parts that are written and read instead.
    """
    there = (at > 0) & (at < batch)
    common = tl.load(COMMON + at, mask=there, other=0)
    before = tl.load(COMMON + at - 1, mask=there, other=0)
    behind = tl.load(COMMON + at + 1, mask=at + 1 < batch, other=0)
    goes = (common > 0) & (2 * common >= before) & (2 * common >= behind)
    group = tl.cumsum((~goes).to(tl.int32), 0)
    tiles = tl.where(goes, common, MOST - 1)
    tiles = tl.minimum(least_upto(tiles, group), least_onward(tiles, group))
    first = least_upto(at, group)
    count = 1 - least_onward(-at, group) - first
    saved = (count - (count + SHARED - 1) // SHARED).to(tl.int64) * tiles * BLOCK_N * token_bytes
    return first, count, tl.where((count > 1) & (10 * saved > 13 * count.to(tl.int64) * part_bytes), tiles, 0)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "slots", "token_bytes", "part_bytes"])
def plan_shared_work(
    SEQLENS, COMMON, UNITS, BEFORE, batch, seqlen_q, slots, token_bytes, part_bytes, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, REQUESTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `plan_work`, for requests of alike many queries, under no mask or a causal one, that may share prefixes: a
    unit for each, and one for each tile of a prefix before those that share it. One program.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, REQUESTS)
    there = at < batch
    first, count, shared = groups_of(COMMON, at, batch, token_bytes, part_bytes, SHARED, BLOCK_N)
    place = (at - first) % SHARED
    heads = there & (shared > 0) & (place == 0)  # whose unit the prefix unit stands before
    keys = tl.load(SEQLENS + at, mask=there, other=0)
    own = tl.maximum((keys + BLOCK_N - 1) // BLOCK_N - shared, 1)
    places = tl.where(there, own, 0) + tl.where(heads, shared, 0)
    both = places.to(tl.int64) + (there.to(tl.int64) + heads.to(tl.int64)) * FIELD
    upto = tl.cumsum(both, 0)
    before = (upto % FIELD).to(tl.int32) - own
    unit = (upto // FIELD).to(tl.int32) - 1
    write_unit(UNITS, BEFORE, unit, there, at, shared, own, keys, seqlen_q, tl.where(shared > 0, place + 1, 0), before)
    queries = tl.minimum(SHARED, first + count - at) * seqlen_q
    write_unit(
        UNITS, BEFORE, unit - 1, heads, at, 0 * at, shared, shared * BLOCK_N + queries, queries, 0 * at - 1,
        before - shared,
    )  # fmt: skip
    total = tl.sum(both, 0)
    for start in range((total // FIELD).to(tl.int32), slots + 2, REQUESTS):  # where programs look but do not work
        tl.store(BEFORE + start + at, (total % FIELD).to(tl.int32), mask=start + at <= slots)
        for n in tl.static_range(UNIT):
            tl.store(UNITS + (start + at) * UNIT + n, 1 if n == 3 else 0, mask=start + at < slots + 2)


@triton.jit
def write_unit(UNITS, BEFORE, unit, there, b, begin, count, keys, queries, prefix, before):
    """Units of which each is a request's only tile, and what is before each in the line."""
    to = UNITS + unit * UNIT
    tl.store(to, b, mask=there)
    tl.store(to + 1, 0, mask=there)
    tl.store(to + 2, begin, mask=there)
    tl.store(to + 3, count, mask=there)
    tl.store(to + 4, keys, mask=there)
    tl.store(to + 5, queries, mask=there)
    tl.store(to + 6, 0, mask=there)
    tl.store(to + PREFIX, prefix, mask=there)
    tl.store(BEFORE + unit, before, mask=there)


# parts ---------------------------------------------------------------------------------------------------------------
# `split` is how the line is cut: (programs, rounds, work). `room` is where parts lie: (pieces, requests, rows of one
# for a key/value head). First come two tiles of rows for each piece, of what it ends and of what it begins; behind
# them, for rows that were not cut, the rows of all requests of all heads, and these once more for prefixes.


@triton.jit
def cut_row(piece, begins, BLOCK_R: tl.constexpr):
    """The first row of what a piece leaves of a row of tiles that it begins, or ends."""
    return (2 * piece + begins.to(tl.int32)).to(tl.int64) * BLOCK_R


@triton.jit
def whole_row(b, hk, of_prefix, room, HEADS_KV: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first row of what is left of rows that were not cut, from request b on."""
    pieces, batch, rows = room
    return (2 * pieces * BLOCK_R).to(tl.int64) + ((of_prefix.to(tl.int32) * HEADS_KV + hk) * batch + b) * rows


@triton.jit
def parts_of(u, hk, UNITS, BEFORE, split, HEADS_KV: tl.constexpr):
    """(the first piece, how many) that hold some of a unit's row of tiles for a head."""
    programs, rounds, work = split
    count = tl.load(UNITS + u * UNIT + 3)
    start = tl.load(BEFORE + u) * HEADS_KV + hk * count
    first, last = row_pieces(start, count, programs, rounds, work)
    return first, last - first + 1


@triton.jit
def parts_of_request(u, hk, UNITS, BEFORE, split, HEADS_KV: tl.constexpr):
    """(its unit's PREFIX, then first piece and number of parts of its prefix, and the same of its own) of a request."""
    prefix = tl.load(UNITS + u * UNIT + PREFIX)
    first, count = parts_of(u - prefix, hk, UNITS, BEFORE, split, HEADS_KV)
    own_first, own_count = parts_of(u, hk, UNITS, BEFORE, split, HEADS_KV)
    return prefix, first, tl.where(prefix > 0, count, 0), own_first, own_count


@triton.jit
def first_rows(n, b, hk, parts, room, HEADS_KV: tl.constexpr, BLOCK_R: tl.constexpr):
    """Of a request's n-th parts the first row: those of its prefix, then its own."""
    prefix, first, count, own_first, own_count = parts
    of_prefix = n < count
    begin = tl.where(of_prefix, first, own_first)
    piece = begin + n - tl.where(of_prefix, 0, count)
    inside = tl.where(of_prefix, (prefix - 1) * room[2], 0)
    whole = tl.where(of_prefix, count, own_count) == 1
    cut = cut_row(piece, piece == begin, BLOCK_R) + inside
    return tl.where(whole, whole_row(b, hk, of_prefix, room, HEADS_KV, BLOCK_R), cut)


@triton.jit
def left_last(u, unit, hk, lanes, ARRIVED, UNITS, BEFORE, split, seqlen_q, HEADS_KV: tl.constexpr):
    """Count a part of a unit's rows for each request that has some of them: (the first one's own unit, how many they
    are, and of each of `lanes`, 0 .. SHARED - 1, whether this was its last part).
    """
    of_prefix = tl.load(UNITS + u * UNIT + PREFIX) < 0
    count = tl.where(of_prefix, unit[5] // seqlen_q, 1)
    first = u + of_prefix.to(tl.int32)
    there = lanes < count
    parts = parts_of_request(first + tl.where(there, lanes, 0), hk, UNITS, BEFORE, split, HEADS_KV)
    at = ARRIVED + (unit[0] + tl.where(there, lanes, 0)) * HEADS_KV + hk
    arrived = tl.atomic_add(at, 1 + 0 * lanes, mask=there, sem="acq_rel") + 1
    last = there & (arrived == parts[2] + parts[4])
    tl.store(at, 0 * lanes, mask=last)  # for the next run of the plan
    return first, count, last
