"""Tokens chosen on a GPU. Of each row and head the sample says between which two keys the least that is read is likely
to lie, while other programs add the values of pages, which stand for what is not read; programs of two tiles of
tokens each count what is above these and collect what lies between, which is little; one program searches that, and
knows then how much of each tile is read, so that programs of a tile each write it. Where the sample was wrong, or too
much lies between, the one that searches goes through all tokens itself, bit by bit.

Keys are integers in the order of scores, for who searches; who only compares does so with scores, which is fewer
instructions. These bound all programs here: those of tiles, of which a multiprocessor has many, and those that search,
which are alone on theirs, and of whose comparisons and choices a multiprocessor begins two warps' in a cycle.

Histograms of all keys would need no sample, but Triton counts bins by ballots: 2048 of them take 64 population counts
of a warp for every 32 keys.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.token_choice.problem import FORCED, Call, within
from tilewise.ops.token_scores.problem import OF_SAMPLE, PLACE
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.log_sum import log_sum

_BETWEEN = (4096, 32768)  # keys that are searched: room for what a sample is expected to leave, within these bounds
_SAMPLE = 16384  # keys of a row, at most
_BLOCK = 8192  # tokens at a time where one program goes through all
_REGISTERS = {"maxnreg": 64}  # of a thread, so that a multiprocessor has 32 programs of a warp, which is all it takes
_PLANS = Plans()
TOP = tl.constexpr(0xFFFFFFFF)  # above the key of any score
LARGE = tl.constexpr(FORCED)
EACH, STEP = tl.constexpr(OF_SAMPLE), tl.constexpr(PLACE)


@triton.jit
def key_of(x):
    """Integers without sign in the order of numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def keys_of(x, n, length, local):
    """The keys of scores, 0 where a row has none."""
    x = tl.where((tl.abs(x) < float("inf")) & (n < length - local), x + 0.0, LARGE)  # both zeros are equal
    return tl.where(n < length, key_of(x), 0)


@triton.jit
def keys_at(TOTAL, n, tokens, length, local):
    """`keys_of` of what stands there. Where `tokens` is a multiple of what one load takes, masks that do not name
    `length` let loads be wide.
    """
    return keys_of(tl.load(TOTAL + n, mask=n < tokens, other=0.0), n, length, local)


@triton.jit
def least_number(key):
    """The least number whose key is at least this one, among those that scores are compared by."""
    key = tl.minimum(tl.maximum(key, 0x007FFFFF), 0xFF800000).to(tl.int32, bitcast=True)  # the keys of -inf and inf
    return (key ^ (~(key >> 31) | -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def tokens_of_tile(tile, TILE: tl.constexpr):
    """The tokens of a tile, [LANES, RUNS, AT_ONCE]: a warp's threads have AT_ONCE of each run, side by side."""
    AT_ONCE: tl.constexpr = 4
    LANES: tl.constexpr = min(32, TILE // AT_ONCE)
    RUNS: tl.constexpr = TILE // AT_ONCE // LANES
    lane = tl.arange(0, LANES)[:, None] + tl.arange(0, RUNS)[None, :] * LANES
    return tile * TILE + lane[:, :, None] * AT_ONCE + tl.arange(0, AT_ONCE)[None, None, :]


@triton.jit
def compared(x, n, start, length, local):
    """What tokens n from `start` on, whose scores are x, are compared by, NaN where a row has none."""
    y = tl.where(tl.abs(x) < float("inf"), x, LARGE)
    if start + x.numel > length - local:  # few tiles have any that are forced, or none
        y = tl.where(n < length - local, y, LARGE)
        y = tl.where(n < length, y, float("nan"))
    return y


@triton.jit
def places_of(kept):
    """(Of each token how many up to it are kept, in the order of tokens, and how many are) of [LANES, RUNS, AT_ONCE],
    with one sum across threads: a run's numbers, 128 at most, are a byte of it.
    """
    own = tl.cumsum(kept, 2)
    each = tl.sum(kept, 2)
    byte = 8 * tl.arange(0, kept.shape[1])
    packed = tl.sum(each.to(tl.uint32) << byte[None, :], 1)
    upto = tl.cumsum(packed, 0)
    total = tl.sum(packed, 0)
    a = (total & 255).to(tl.int32)
    b = a + ((total >> 8) & 255).to(tl.int32)
    c = b + ((total >> 16) & 255).to(tl.int32)
    before = tl.where(byte == 8, a, tl.where(byte == 16, b, tl.where(byte == 24, c, 0)))
    others = before[None, :] + ((upto[:, None] >> byte[None, :]) & 255).to(tl.int32) - each
    return others[:, :, None] + own, c + (total >> 24).to(tl.int32)


@triton.jit
def together(a, b):
    """Two counts as one number, whose sums are those of either."""
    return (a.to(tl.int64) << 32) + b


@triton.jit
def apart(x):
    """(a, b) of `together(a, b)`, int32"""
    return (x >> 32).to(tl.int32), x.to(tl.int32)


@triton.jit
def around(least, largest, at_forced, wanted, count):
    """(A key at and above which there are `wanted` of `count` at least, one where there are fewer, how many there are
    at either), by its least and largest keys and how many there are that are forced.
    """
    top = at_forced >= wanted
    low = tl.where(top, largest + 1, tl.where(wanted > count, 0, least))
    return low, tl.where(top, low | TOP, largest + 1), tl.where(top, at_forced, count), tl.where(top, 0, at_forced)


@triton.jit
def nearer(low, end, at_low, at_end, key, at, wanted):
    """`around` once it is known how many there are at a key, if that lies between."""
    inside = (key > low) & (key < end)
    above = inside & (at >= wanted)
    below = inside & (at < wanted)
    low, end = tl.where(above, key, low), tl.where(below, key, end)
    return low, end, tl.where(above, at, at_low), tl.where(below, at, at_end)


@triton.jit
def key_between(low, end, at_low, at_end, aim, turn):
    """A key above `low` and below `end` where there may be `aim` keys at and above it, if there are so many at these:
    the logarithm of how many there are falls evenly with a score, more or less. Each third time it is the one in the
    middle, which does for all scores.
    """
    share = octaves(at_low.to(tl.float32), aim) / octaves(at_low.to(tl.float32), tl.maximum(at_end.to(tl.float32), 0.5))
    x = least_number(low)
    x += (least_number(end) - x) * share
    key = tl.where(turn % 3 == 0, low + ((end - low) >> 1), key_of(x))
    return tl.minimum(tl.maximum(key, low + 1), end - 1)


@triton.jit
def not_below(key, a, b):
    """1 where a key is not below a, and 65536 more where it is not below b, which is a or above: two counts in one."""
    return tl.where(key >= b, 0x10001, tl.where(key >= a, 1, 0)).to(tl.uint32)


@triton.jit
def counts_of(both):
    """How many keys are not below a, and how many not below b, by `not_below`."""
    total = tl.sum(both, 0)
    return (total & 0xFFFF).to(tl.int32), (total >> 16).to(tl.int32)


@triton.jit
def octaves(a, b):
    """The logarithm of a / b, times a constant; between powers of two it is taken for a straight line, as bits are."""
    return (a.to(tl.int32, bitcast=True) - b.to(tl.int32, bitcast=True)).to(tl.float32)


@triton.jit
def bracket(SAMPLE, x, length, width, local, MOST: tl.constexpr):
    """Two keys, the second not included, between which the least that is read is likely to lie: by the first numbers of
    a sample, x, or by as many from all of it.
    """
    runs = length // EACH
    count = tl.minimum(runs, MOST)
    i = tl.arange(0, MOST)
    run = i
    if runs > MOST:
        run = i * (runs // MOST) + i * (runs % MOST) // MOST
        x = tl.load(SAMPLE + run)
    n = run * EACH + run * STEP % EACH
    key = tl.where(i < count, keys_of(x, n, length, local), 0)

    # keys at and above which there are `more` and `fewer` of them, or few more and few fewer, both at once
    rank = width.to(tl.float32) * count / length
    off = 4.0 * tl.sqrt(rank * (1.0 - rank / count)) + 4.0
    more = (rank + off).to(tl.int32)
    fewer = (rank - off).to(tl.int32)
    slack = (more - fewer) // 16
    least = tl.min(tl.where(key > 0, key, TOP), 0)
    forced = key >= key_of(tl.full([], LARGE, tl.float32))
    largest = tl.max(tl.where(forced, least, key), 0)
    at_forced = tl.sum(forced.to(tl.int32), 0)
    low, low_end, at_low, at_low_end = around(least, largest, at_forced, more, count)
    high, high_end, at_high, at_high_end = around(least, largest, at_forced, fewer, count)
    turn = 0
    while ((at_low - more > slack) & (low_end - low > 1)) | ((fewer - at_high_end > slack) & (high_end - high > 1)):
        turn += 1
        a = key_between(low, low_end, at_low, at_low_end, more + 0.5 * slack, turn)
        b = key_between(high, high_end, at_high, at_high_end, tl.maximum(fewer - 0.5 * slack, 0.5), turn)
        a, b = tl.minimum(a, b), tl.maximum(a, b)
        at_a, at_b = counts_of(not_below(key, a, b))
        low, low_end, at_low, at_low_end = nearer(low, low_end, at_low, at_low_end, a, at_a, more)
        low, low_end, at_low, at_low_end = nearer(low, low_end, at_low, at_low_end, b, at_b, more)
        high, high_end, at_high, at_high_end = nearer(high, high_end, at_high, at_high_end, a, at_a, fewer)
        high, high_end, at_high, at_high_end = nearer(high, high_end, at_high, at_high_end, b, at_b, fewer)
    return tl.maximum(low, 1), high_end


@triton.jit
def guess_least(
    SAMPLE, LENGTHS, ENDS, at, samples, width, local, HEADS: tl.constexpr, MOST: tl.constexpr, BETWEEN: tl.constexpr
):
    """Writes between which two keys the least lies, and that none of what lies there is collected yet."""
    i = tl.arange(0, MOST)
    SAMPLE += at * samples
    x = tl.load(SAMPLE + i, mask=i < samples, other=0.0)  # before it is known how many there are
    length = tl.load(LENGTHS + at // HEADS)
    low = tl.full([], 1, tl.uint32)
    high = tl.where(length <= width, low, low | TOP)  # without a choice to make all are above
    if (length > width) & (length > BETWEEN) & (length >= EACH):
        low, high = bracket(SAMPLE, x, length, width, local, MOST)
    tl.store(ENDS + 3 * at, low.to(tl.int32, bitcast=True))
    tl.store(ENDS + 3 * at + 1, high.to(tl.int32, bitcast=True))
    tl.store(ENDS + 3 * at + 2, 0)


@triton.jit
def who(at, REQUEST, HEADS: tl.constexpr):
    """(head of keys, row of queries, request)"""
    row = at // HEADS
    return at % HEADS, row, row if REQUEST is None else tl.load(REQUEST + row).to(tl.int64)


@triton.jit
def add_pages(
    LENGTHS, COUNTED, LSE, TABLE, REQUEST, V_MEAN, SEEN, VALUES, at, part, table_row, of_page, of_head, pages, runs,
    parts, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, RUN: tl.constexpr,
    DIM: tl.constexpr, SOME: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the sum of the values of some pages, and the log-sum-exp of each query's scores of their tokens."""
    h, row, request = who(at, REQUEST, HEADS)
    length = tl.load(LENGTHS + row)
    counted = length
    if COUNTED is not None:
        counted = tl.load(COUNTED + row)
    p = part * SOME + tl.arange(0, SOME)
    there = p * PAGE < counted
    page = tl.load(TABLE + request * table_row + p, mask=p < pages, other=0)  # before it is known how many there are
    page = tl.where(there, page, 0).to(tl.int64)
    g = tl.arange(0, GROUPS)
    run = part * (SOME * PAGE // RUN) + tl.arange(0, SOME * PAGE // RUN)
    of_runs = LSE + (at * GROUP + g)[:, None] * runs + run[None, :]
    of_runs = tl.load(of_runs, mask=(g < GROUP)[:, None] & (run * RUN < length)[None, :], other=float("-inf"))
    d = tl.arange(0, BLOCK_D)
    v = V_MEAN + (page * of_page + h * of_head)[:, None] + d[None, :]
    v = tl.load(v, mask=there[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
    count = tl.minimum(counted - p * PAGE, PAGE).to(tl.float32)
    total = tl.sum(tl.where(there[:, None], v * count[:, None], 0.0), 0)
    tl.store(VALUES + (at * parts + part) * DIM + d, total, mask=d < DIM)
    tl.store(SEEN + (at * GROUP + g) * parts + part, log_sum(of_runs, 1), mask=g < GROUP)


@triton.jit(do_not_specialize=["width", "local", "pages", "runs", "parts"])
def guess_and_add(
    SAMPLE, LENGTHS, ENDS, COUNTED, LSE, TABLE, REQUEST, V_MEAN, SEEN, VALUES, table_row, of_page, of_head, samples,
    width, local, pages, runs, parts,
    HEADS: tl.constexpr, MOST: tl.constexpr, BETWEEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PAGE: tl.constexpr, RUN: tl.constexpr, DIM: tl.constexpr, SOME: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`guess_least`, and beside it, since few programs do that, `add_pages` where something stands for the rest."""
    rows = tl.num_programs(0) // (parts + 1)
    at = (tl.program_id(0) % rows).to(tl.int64)
    part = tl.program_id(0) // rows - 1
    if part < 0:
        guess_least(SAMPLE, LENGTHS, ENDS, at, samples, width, local, HEADS, MOST, BETWEEN)
    elif V_MEAN is not None:
        add_pages(
            LENGTHS, COUNTED, LSE, TABLE, REQUEST, V_MEAN, SEEN, VALUES, at, part, table_row, of_page, of_head, pages,
            runs, parts, HEADS, GROUP, GROUPS, PAGE, RUN, DIM, SOME, BLOCK_D,
        )  # fmt: skip


@triton.jit
def between_ends(x, n, start, low, high, length, local):
    """(What tokens n from `start` on are compared by, which lie between both ends, how many do, how many are above)"""
    y = compared(x, n, start, length, local)
    inside = (y >= low) & (y < high)
    few = tl.sum(inside.to(tl.int32).reshape(x.numel), 0)
    return y, inside, few, tl.sum((y >= high).to(tl.int32).reshape(x.numel), 0)


@triton.jit
def leave_found(FOUND, COUNTS, found, first, there, BETWEEN: tl.constexpr):
    """Writes what `between_ends` found of a tile, what lies between from `first` on."""
    y, inside, few, more = found
    places, _ = places_of(inside.to(tl.int32))
    room = first + few <= BETWEEN
    tl.store(FOUND + first - 1 + places, y, mask=inside & room)
    tl.store(COUNTS, more, mask=there)
    tl.store(COUNTS + 1, few, mask=there)
    tl.store(COUNTS + 2, first, mask=there)


@triton.jit(do_not_specialize=["tiles", "local"])
def collect_keys(
    TOTAL, LENGTHS, ENDS, COUNTS, FOUND, tokens, tiles, local,
    HEADS: tl.constexpr, TILE: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """Of two tiles: how many keys are above both ends, how many lie between, and, side by side, what these are of."""
    pairs = (tiles + 1) // 2
    tile = tl.program_id(0) % pairs * 2
    at = (tl.program_id(0) // pairs).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    n = tokens_of_tile(tile, TILE)
    x = tl.load(TOTAL + at * tokens + n, mask=n < tokens, other=0.0)
    n_next = n + TILE
    x_next = tl.load(TOTAL + at * tokens + n_next, mask=n_next < tokens, other=0.0)
    low = least_number(tl.load(ENDS + 3 * at).to(tl.uint32, bitcast=True))
    high = least_number(tl.load(ENDS + 3 * at + 1).to(tl.uint32, bitcast=True))
    found = between_ends(x, n, tile * TILE, low, high, length, local)
    found_next = between_ends(x_next, n_next, tile * TILE + TILE, low, high, length, local)
    # which tiles come first changes between runs, and changes nothing: keys are counted, never taken in this order.
    # One thread of 32 asks, and what it is told is summed where it is used, so that nothing waits for it before
    lane = tl.arange(0, 32)
    few = found[2] + found_next[2]
    told = tl.atomic_add(ENDS + 3 * at + 2 + 0 * lane, few + 0 * lane, mask=lane == 0, sem="relaxed")
    first = tl.sum(tl.where(lane == 0, told, 0), 0)
    FOUND += at * BETWEEN
    COUNTS += (at * tiles + tile) * 3
    leave_found(FOUND, COUNTS, found, first, True, BETWEEN)
    leave_found(FOUND, COUNTS + 3, found_next, first + found[2], tile + 1 < tiles, BETWEEN)


@triton.jit
def least_of_all(TOTAL, tokens, length, width, local, BLOCK: tl.constexpr):
    """The least key that is read of all tokens, eight bits at a time."""
    last = tl.full([], 0, tl.uint32)
    missing = width
    digits = tl.arange(0, 256)
    shift = 32
    while shift > 0:
        shift -= 8
        counts = tl.zeros([256], tl.int32)
        for start in range(0, length, BLOCK):
            n = start + tl.arange(0, BLOCK)
            key = keys_at(TOTAL, n, tokens, length, local)
            digit = (key ^ last) >> shift  # below 256 where the bits before are alike, and `last` has none here yet
            alike = (key > 0) & (digit < 256)
            counts += tl.histogram((digit & 255).to(tl.int32), 256, mask=alike)
        enough = tl.cumsum(counts, 0, reverse=True) >= missing
        found = tl.sum(enough.to(tl.int32), 0) - 1
        missing -= tl.sum(tl.where(digits > found, counts, 0), 0)
        last = last | (found.to(tl.uint32) << shift)
    return last


@triton.jit
def key_within(least, end, share):
    """A number above `least` and below `end`, at a share of what lies between if there is one."""
    span = end - least
    far = tl.minimum(tl.maximum(share, 0.0), 0.999) * span.to(tl.float32)
    return least + tl.minimum(tl.maximum(far.to(tl.uint32), 1), span - 1)


@triton.jit
def halves(x):
    """The former and the latter numbers of [n]; no number moves, where threads have some of each."""
    return x.reshape(2, x.numel // 2).trans().split()


@triton.jit
def least_found(off, between, missing, size):
    """A number below `size` that `missing` of all are not below, or, where equal ones make that impossible, the largest
    that more are not below; `between` of all are not zero.

    Each turn looks on both sides of where it would lie if all were spread evenly, as far as it is likely to be off,
    further where it was not between them, and each eighth at thirds.
    """
    former, latter = halves(off)
    quarters = halves(former) + halves(latter)  # of which some have nothing
    least = tl.full([], 0, tl.uint32)
    end = size
    found = between  # not below `least`
    after = 0 * between  # not below `end`
    near = tl.full([], 0.7, tl.float32)
    times = near
    turn = 0
    while (end - least > 1) & (found != missing):
        turn += 1
        count = (found - after).to(tl.float32)
        share = (found - missing + 0.5) / count
        off_by = times * tl.sqrt(share * (1.0 - share) / count)
        thirds = turn % 8 == 0
        a = key_within(least, end, tl.where(thirds, 0.33, share - off_by))
        b = key_within(least, end, tl.where(thirds, 0.67, share + off_by))
        counts = tl.zeros([quarters[0].numel], tl.uint32)
        for n in tl.static_range(4):
            if n * quarters[0].numel < between:
                counts += not_below(quarters[n], a, b)
        at_a, at_b = counts_of(counts)
        times = tl.where((at_a >= missing) & (at_b < missing), near, 1.5 * times)
        end = tl.where(at_a < missing, a, tl.where(at_b < missing, b, end))
        after = tl.where(at_a < missing, at_a, tl.where(at_b < missing, at_b, after))
        least = tl.where(at_b >= missing, b, tl.where(at_a >= missing, a, least))
        found = tl.where(at_b >= missing, at_b, tl.where(at_a >= missing, at_a, found))
    return least


@triton.jit(do_not_specialize=["tiles", "width", "local"])
def find_least(
    TOTAL, LENGTHS, ENDS, COUNTS, FOUND, LEAST, PARTS, tokens, tiles, width, local,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes down to which key is read, which a token may have or not, and of each tile, where in the table what is
    read of it begins, how many of these have that key, and how many have it at all.
    """
    at = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    low = tl.load(ENDS + 3 * at).to(tl.uint32, bitcast=True)
    high = tl.load(ENDS + 3 * at + 1).to(tl.uint32, bitcast=True)
    i = tl.arange(0, BETWEEN)
    y = tl.load(FOUND + at * BETWEEN + i)  # before it is known how many there are
    tile = tl.arange(0, TILES)
    of_tile = COUNTS + (at * tiles + tile) * 3
    more = tl.load(of_tile, mask=tile < tiles, other=0)
    same = tl.load(of_tile + 1, mask=tile < tiles, other=0)
    start = tl.load(of_tile + 2, mask=tile < tiles, other=0)
    above, between = apart(tl.sum(together(more, same), 0))
    last = low
    right = (above < width) & (above + between >= width)
    if (length > width) & ((high - low != 1) | (right == 0)):
        if right & (between <= BETWEEN):
            off = tl.where(i < between, key_of(y + 0.0) - low, 0)  # both zeros are equal
            least = least_found(off, between, width - above, high - low)
            last = low + least
            # of the keys of a tile, which stand side by side, how many are above, and how many it is
            sums = tl.cumsum((off > least).to(tl.int32) + ((off == least).to(tl.int32) << 16), 0)
            ends = tl.join(start, start + same).reshape(2 * TILES)
            at_ends = tl.where(ends > 0, tl.gather(sums, tl.maximum(ends - 1, 0), 0), 0)
            before, after = tl.split(at_ends.reshape(TILES, 2))
            here = tl.where(same > 0, after - before, 0)
            more += here & 0xFFFF
            same = (here >> 16) & 0xFFFF
        else:
            last = least_of_all(TOTAL + at * tokens, tokens, length, width, local, BLOCK)
            for first in range(0, tiles, BLOCK // TILE):
                some = first + tl.arange(0, BLOCK // TILE)
                n = some[:, None] * TILE + tl.arange(0, TILE)[None, :]
                key = keys_at(TOTAL + at * tokens, n, tokens, length, local)
                to = COUNTS + (at * tiles + some) * 3
                tl.store(to, tl.sum((key > last).to(tl.int32), 1), mask=some < tiles)
                tl.store(to + 1, tl.sum((key == last).to(tl.int32), 1), mask=some < tiles)
            tl.debug_barrier()
            more = tl.load(of_tile, mask=tile < tiles, other=0)
            same = tl.load(of_tile + 1, mask=tile < tiles, other=0)

    # of equal ones the first are read
    counts = together(more, same)
    above, _ = apart(tl.sum(counts, 0))
    left = tl.where(length <= width, 0, tl.maximum(width - above, 0))
    more_upto, same_upto = apart(tl.cumsum(counts, 0))
    ties_before = tl.minimum(same_upto - same, left)
    to = PARTS + (at * tiles + tile) * 3
    tl.store(to, more_upto - more + ties_before, mask=tile < tiles)
    tl.store(to + 1, tl.minimum(same_upto, left) - ties_before, mask=tile < tiles)
    tl.store(to + 2, same, mask=tile < tiles)
    tl.store(LEAST + at, last.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["tiles", "width", "local", "by_page", "by_token", "by_head"])
def take_tokens(
    TOTAL, LENGTHS, LEAST, PARTS, TABLE, REQUEST, TABLES, TOKENS, SCORES, READ, table_row, tokens, tiles, width, local,
    by_page, by_token, by_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # who am I
    tile = tl.program_id(0) % tiles
    at = (tl.program_id(0) // tiles).to(tl.int64)
    h, row, request = who(at, REQUEST, HEADS)
    length = tl.load(LENGTHS + row)
    last = tl.load(LEAST + at).to(tl.uint32, bitcast=True)
    PARTS += (at * tiles + tile) * 3
    first = tl.load(PARTS)
    ties = tl.load(PARTS + 1)
    same = tl.load(PARTS + 2)

    # which tokens are read, and where they stand, side by side
    n = tokens_of_tile(tile, TILE)
    x = tl.load(TOTAL + at * tokens + n, mask=n < tokens, other=0.0)
    y = compared(x, n, tile * TILE, length, local)
    if (ties > 0) & (ties < same):  # in one tile of a row at most
        tie = (y == least_number(last)).to(tl.int32)
        places, _ = places_of(tie)
        y = tl.where((tie > 0) & (places > ties), float("nan"), y)
    kept = (y >= least_number(last + ((ties == 0) & (same > 0)).to(tl.uint32))).to(tl.int32)
    places, _ = places_of(kept)
    TABLES += at * width + first - 1
    AT_ONCE: tl.constexpr = 4 if PAGE % 4 == 0 else 1  # tokens of a thread that are of one page
    m = (n if AT_ONCE == 1 else tl.min(n, 2)[:, :, None]).to(tl.uint32)
    # pages of all tokens, without a wait for how many there are
    page = tl.load(TABLE + request * table_row + m // PAGE, mask=m < tokens, other=0)
    place = page * by_page + (m % PAGE).to(tl.int32) * by_token + h.to(tl.int32) * by_head
    if AT_ONCE > 1:
        place += tl.arange(0, AT_ONCE)[None, None, :] * by_token
    tl.store(TABLES + places, place, mask=kept > 0)

    # nothing after the last one
    read = tl.minimum(length, width)
    if (tile * TILE < width) & (tile * TILE + TILE > read):
        TABLES += 1 - first
        tl.store(TABLES + n, 0 * n, mask=(n >= read) & (n < width))
    if tile == 0:
        tl.store(TOKENS + at, read)

    if READ is not None:
        for g in range(GROUP):  # the log-sum-exp of what is read
            weights = x  # of one query alone, whose score is the sum
            if GROUP > 1:
                weights = tl.load(SCORES + (at * GROUP + g) * tokens + n, mask=kept > 0, other=0.0)
            weights = tl.where(kept > 0, weights, float("-inf"))
            tl.store(READ + (at * GROUP + g) * tiles + tile, log_sum(weights.reshape(TILE), 0))


def _sizes(call: Call) -> tuple[int, int]:
    """How many numbers of a sample are looked at, and how many keys between two of them there is room for."""
    tokens = call.total.shape[2]
    sample = within((1, _SAMPLE), call.sample.shape[2])
    count = max(1, min(sample, tokens // OF_SAMPLE))
    share = min(1.0, call.width / max(1, tokens))
    off = 4.0 * math.sqrt(count * share * (1.0 - share)) + 4.0  # as `bracket` has it, and up to an eighth more
    left = 2.125 * off
    between = within(_BETWEEN, math.ceil((left + 4.0 * math.sqrt(left)) / count * tokens))
    return sample, between


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    rows, heads = call.total.shape[:2]
    device, (sample, between) = call.total.device, _sizes(call)
    tiles = (rows, heads, call.tiles)
    numbers = {"dtype": torch.int32, "device": device}
    ends, counts = torch.empty((rows, heads, 3), **numbers), torch.empty((*tiles, 3), **numbers)
    least, parts = torch.empty((rows, heads), **numbers), torch.empty((*tiles, 3), **numbers)
    found = torch.empty((rows, heads, between), device=device)
    read = seen = values = None
    if call.v_mean is not None:
        read, seen, values = results["read"], results["seen"], results["values"]
    tensors = (
        (call.sample, call.lengths, ends, call.counted, call.lse, call.table, call.request, call.v_mean, seen, values),
        (call.total, call.lengths, ends, counts, found),
        (call.total, call.lengths, ends, counts, found, least, parts),
        (call.total, call.lengths, least, parts, call.table, call.request, results["tables"],
         results["tokens"], call.scores, read),
    )  # fmt: skip
    key = tensors_key(*(x for some in tensors for x in some if x is not None))
    if key is not None:
        key = (key, call.page_size, call.width, call.local, call.by_page, call.by_token, call.by_head)
        key += (call.request is None, call.counted is None)
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS.put(key, _plans(call, sample, between))
    with on_device(call.total):
        for plan, pointers in zip(plans, tensors, strict=True):
            plan.launch(pointers, ())


def _plans(call: Call, sample: int, between: int) -> tuple[Plan, ...]:
    rows, heads, group, tokens = call.scores.shape
    tile, tiles, width, local = call.tile, call.tiles, call.width, call.local
    many, warps = triton.next_power_of_2(tiles), _warps(tile, 512)
    v_mean, run = call.v_mean, call.run
    dim, strides = (0, (0, 0)) if v_mean is None else (v_mean.shape[2], v_mean.stride()[:2])
    block_d, groups, programs = triton.next_power_of_2(max(16, dim)), triton.next_power_of_2(group), rows * heads
    constants: tuple[int, ...] = (heads, sample, between, group, groups, call.page_size, run, dim)
    constants += (call.some, block_d)
    numbers: tuple[int, ...] = (call.sample.shape[2], width, local, call.table.shape[1], call.lse.shape[3], call.parts)
    strides = (call.table.stride(0), *strides)
    guess = Plan(guess_and_add, programs * (call.parts + 1), strides, numbers, constants, 4, 1)
    constants, pairs = (heads, tile, between), -(-tiles // 2)
    numbers = (tokens, tiles, local)
    collect = Plan(collect_keys, programs * pairs, (), numbers, constants, warps, 1, options=_REGISTERS)
    constants = (heads, tile, many, between, max(tile, min(_BLOCK, tile * many)))
    numbers = (tokens, tiles, width, local)
    find = Plan(find_least, programs, (), numbers, constants, _warps(between, 1024), 1)
    numbers = (tokens, tiles, width, local, call.by_page, call.by_token, call.by_head)
    constants = (heads, group, call.page_size, tile)
    capped = {} if call.page_size % 4 else _REGISTERS  # a page for each token is more than there is room for
    take = Plan(take_tokens, programs * tiles, (call.table.stride(0),), numbers, constants, warps, 1, options=capped)
    return guess, collect, find, take


def _warps(numbers: int, each: int) -> int:
    """Of a program that holds some numbers, `each` in a warp."""
    return max(1, min(32, numbers // each))
