"""Prefixes that requests share, found in the block table on the device and computed once (Ye et al., "FlashInfer":
composable formats; Juravsky et al., "Hydragen").

Neighbours in the batch whose rows of the block table begin alike make a *group*, where that saves more than it costs.
The rows of SHARED requests of a group at a time are a *prefix unit*: as if one request had all their queries behind the
keys that they share. These units stand in a line of their own, and so does what is left of each request, which begins
where its prefix ends, a multiple of both launches' tiles of keys. One launch does the first line, in tiles of many
rows, and leaves parts of everything; the next one does the second, on Hopper beside it on multiprocessors that it
leaves free, and merges. `schedule.sharing` and `schedule.worklist` are the same on the host.
"""

import triton
import triton.language as tl

from tilewise.ops.attention.triton_work import FIELD, UNIT, row_pieces
from tilewise.schedule.sharing import FASTER as FASTER_KEYS
from tilewise.schedule.sharing import PIECE_KEYS

PREFIX = tl.constexpr(7)  # a number of a request's unit: which unit of the prefixes' line has its prefix, -1 if none
MOST = tl.constexpr(2**20)  # tiles of a prefix, at most
LEAST = tl.constexpr(PIECE_KEYS)
FASTER = tl.constexpr(FASTER_KEYS)


@triton.jit(do_not_specialize=["stride_t", "seqlen_q"])
def common_prefixes(
    TABLE, FIRST, SEQLENS, COMMON, stride_t, seqlen_q, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    PREFIX_N: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write how many tiles of keys a request has in common with the one before it, all of them before the queries of
    both, and where tiles of PREFIX_N keys are larger, whole ones of these. A program for each request.
    """
    TOGETHER: tl.constexpr = PREFIX_N // BLOCK_N if PREFIX_N > BLOCK_N else 1
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0)
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
    tiles = tl.minimum(tl.minimum(common * PAGE, keys) // (BLOCK_N * TOGETHER), (MOST - 1) // TOGETHER)
    tl.store(COMMON + b, tiles * TOGETHER)


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
    A group shares what all its neighbours have in common, if the keys that are not read again are more bytes than the
    parts that are written and read instead: a request's own, one of its prefix, and one more for each LEAST keys.
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
    tokens = tiles.to(tl.int64) * BLOCK_N
    saved = (count - (count + SHARED - 1) // SHARED) * tokens * token_bytes
    parts = count * (2 + tokens // LEAST)
    return first, count, tl.where((count > 1) & (saved > parts * part_bytes), tiles, 0)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "pieces", "token_bytes", "part_bytes"])
def plan_shared_work(
    SEQLENS, COMMON, UNITS, BEFORE, ARRIVED, PREFIX_UNITS, PREFIX_BEFORE, batch, seqlen_q, pieces, token_bytes,
    part_bytes, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX_N: tl.constexpr, REQUESTS: tl.constexpr,
    PIECES: tl.constexpr, HEADS_KV: tl.constexpr, PROGRAMS: tl.constexpr, OWN_PROGRAMS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """As `plan_work`, for requests of alike many queries, under no mask or a causal one, that may share prefixes: a
    unit for each, and in the prefixes' line one for each tile of rows of those that share one, of PREFIX_N keys a tile.
    Behind all tiles each line says how many programs have some, of PROGRAMS and of OWN_PROGRAMS. One program.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # for what is in common
    counters = tl.arange(0, PIECES)
    tl.store(ARRIVED + counters, 0, mask=counters <= pieces)
    at = tl.arange(0, REQUESTS)
    there = at < batch
    first, count, shared = groups_of(COMMON, at, batch, token_bytes, part_bytes, SHARED, BLOCK_N)
    heads = there & (shared > 0) & ((at - first) % SHARED == 0)  # a prefix unit's first request
    tiles = tl.where(heads, shared * BLOCK_N // PREFIX_N, 0)
    both = tiles.to(tl.int64) + heads.to(tl.int64) * FIELD
    upto = tl.cumsum(both, 0)
    unit = (upto // FIELD).to(tl.int32) - 1
    queries = tl.minimum(SHARED, first + count - at) * seqlen_q
    before = (upto % FIELD).to(tl.int32) - tiles
    write_unit(
        PREFIX_UNITS, PREFIX_BEFORE, unit, heads, at, 0 * at, tiles, shared * BLOCK_N + queries, queries, 0 * at - 1,
        before,
    )  # fmt: skip
    total = tl.sum(both, 0)
    end_units(PREFIX_UNITS, PREFIX_BEFORE, (total // FIELD).to(tl.int32), batch, (total % FIELD).to(tl.int32), at)
    keys = tl.load(SEQLENS + at, mask=there, other=0)
    own = tl.where(there, tl.maximum((keys + BLOCK_N - 1) // BLOCK_N - shared, 1), 0)
    before = tl.cumsum(own, 0) - own
    unit = tl.where(shared > 0, unit, -1)
    write_unit(UNITS, BEFORE, at, there, at, shared, own, keys, 0 * at + seqlen_q, unit, before)
    of_own = tl.sum(own, 0)
    end_units(UNITS, BEFORE, batch, batch, of_own, at)
    tiles = (total % FIELD).to(tl.int32) * HEADS_KV
    programs, own_programs = programs_of_lines(
        tiles, of_own * HEADS_KV, PROGRAMS, OWN_PROGRAMS, PREFIX_N, BLOCK_N, EARLY
    )
    tl.store(PREFIX_BEFORE + batch + 1, programs)
    tl.store(BEFORE + batch + 1, own_programs)


@triton.jit
def programs_of_lines(
    tiles, own, PROGRAMS: tl.constexpr, OWN_PROGRAMS: tl.constexpr, PREFIX_N: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`schedule.sharing.programs_of_lines`: EARLY, the launch over requests begins while prefixes are done."""
    FEW: tl.constexpr = (LEAST + PREFIX_N - 1) // PREFIX_N
    FAST: tl.constexpr = PREFIX_N * FASTER
    programs = tl.minimum(PROGRAMS, (tiles + FEW - 1) // FEW)
    own_programs = 0 * own + OWN_PROGRAMS
    if EARLY:
        each = tl.maximum((tiles + (own * BLOCK_N + FAST - 1) // FAST + PROGRAMS - 1) // PROGRAMS, FEW)
        needed = (tiles + each - 1) // each
        meanwhile = (tiles > 0) & (own * BLOCK_N <= tiles * PREFIX_N) & (needed < PROGRAMS)
        programs = tl.where(meanwhile, needed, programs)
        own_programs = tl.where(meanwhile, (PROGRAMS - needed) * (OWN_PROGRAMS // PROGRAMS), own_programs)
    return programs, own_programs


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


@triton.jit
def end_units(UNITS, BEFORE, units, slots, total, at):
    """What lies behind a line's last unit, where programs look but do not work; `at` is 0 to some power of two."""
    for start in range(units, slots + 2, at.shape[0]):
        tl.store(BEFORE + start + at, total, mask=start + at <= slots)
        for n in tl.static_range(UNIT):
            tl.store(UNITS + (start + at) * UNIT + n, 1 if n == 3 else 0, mask=start + at < slots + 2)


# parts ---------------------------------------------------------------------------------------------------------------


@triton.jit
def row_of_part(b, hk, rows, of_request, piece, HEADS_KV: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first row of what a piece leaves of a unit's `rows`, at most BLOCK_R, of requests from b on. Along a line
    either these rows change from part to part or the piece, so that each lies behind the one before it.
    """
    return (b * HEADS_KV * of_request + hk * rows).to(tl.int64) + piece.to(tl.int64) * BLOCK_R


@triton.jit
def room_of_prefixes(batch, of_request, HEADS_KV: tl.constexpr, PREFIX_TILE: tl.constexpr):
    """The row behind all that the launch over prefixes leaves; PREFIX_TILE are its programs, a tile's rows and keys."""
    return row_of_part(batch, 0, 0, of_request, 0 * batch + PREFIX_TILE[0], HEADS_KV, PREFIX_TILE[1])


@triton.jit
def parts_of_prefix(
    PREFIXES, UNITS, u, unit, hk, rows_q, batch, HEADS_KV: tl.constexpr, GROUP: tl.constexpr, PREFIX_TILE: tl.constexpr,
):  # fmt: skip
    """(how many parts the launch before left of the prefix that a request's unit `u` shares, the first row of them that
    the request has); each is a tile's rows behind the one before it.
    """
    OF_PREFIX, BEFORE = PREFIXES
    p = tl.maximum(tl.load(UNITS + u * UNIT + PREFIX), 0)
    b = tl.load(OF_PREFIX + p * UNIT)
    count = tl.load(OF_PREFIX + p * UNIT + 3)
    queries = tl.load(OF_PREFIX + p * UNIT + 5)
    work = tl.load(BEFORE + batch) * HEADS_KV
    start = tl.load(BEFORE + p) * HEADS_KV + hk * count
    pieces = tl.load(BEFORE + batch + 1)
    first, last = row_pieces(start, count, pieces, 1, tl.maximum(work, 1))
    of_request = rows_q * GROUP
    at = row_of_part(b, hk, queries * GROUP, of_request, first, HEADS_KV, PREFIX_TILE[1])
    return tl.where(unit[2] > 0, last - first + 1, 0), at + (unit[0] - b) * of_request
