"""Tokens chosen on a GPU. Of each row and head a sample says between which two keys the least that is read is likely to
lie; programs of a tile of tokens each count what is above these and collect what lies between, which is little; one
program searches that bit by bit, and knows then how much of each tile is read, so that again programs of a tile each
write it. Where the sample was wrong, or too much lies between, the one that searches goes through all tokens itself.

Histograms of all keys would need no sample, but Triton counts bins by ballots: 2048 of them take 64 population counts
of a warp for every 32 keys.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.token_choice.problem import FORCED, Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.log_sum import log_sum

_TILE = 512  # tokens of a program: of one warp, which waits for no other
_BETWEEN = (4096, 32768)  # keys that are searched: room for an eighth of the tokens, at least and at most so many
_SAMPLE = (2048, 16384)  # a sixteenth of the tokens, likewise
_BLOCK = 8192  # tokens at a time where one program goes through all
_VALUES = 1024  # of means of pages that it adds at a time
_CHANNELS = 32  # of means of values, of who puts tiles' together
_PLANS = Plans()
TOP = tl.constexpr(0xFFFFFFFF)  # above the key of any score
LARGE = tl.constexpr(FORCED)


@triton.jit
def keys_of(x, n, length, local):
    """Integers without sign in the order of scores, 0 where a row has none."""
    x = tl.where((tl.abs(x) < float("inf")) & (n < length - local), x + 0.0, LARGE)  # both zeros are equal
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(n < length, (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True), 0)


@triton.jit
def keys_at(TOTAL, n, tokens, length, local):
    """`keys_of` of what stands there. Where `tokens` is a multiple of what one load takes, masks that do not name
    `length` let loads be wide.
    """
    return keys_of(tl.load(TOTAL + n, mask=n < tokens, other=0.0), n, length, local)


@triton.jit
def bracket(TOTAL, length, width, local, SAMPLE: tl.constexpr):
    """Two keys, the second not included, between which the least that is read is likely to lie."""
    # keys at steps that are not even, since scores may be periodic
    i = tl.arange(0, SAMPLE)
    step = tl.maximum(length // SAMPLE, 1)
    n = i * (length // SAMPLE) + i * (length % SAMPLE) // SAMPLE + (((i * 40503) & 0xFFFF) * step >> 16)
    key = keys_at(TOTAL, n, length, length, local)

    # the largest keys at and above which there are `more` and `fewer` of them, bit by bit, both at once, until few are
    # too many: `at_low` are at and above the first, `at_end` at and above the end of where the second still may be
    rank = width.to(tl.float32) * SAMPLE / length
    off = 4.0 * tl.sqrt(rank * (1.0 - rank / SAMPLE)) + 8.0
    more = (rank + off).to(tl.int32)
    fewer = (rank - off).to(tl.int32)
    slack = (more - fewer) // 8
    low = tl.full([], 0, tl.uint32)
    high = low
    end = low | TOP
    at_low = SAMPLE + 0 * more
    at_end = 0 * more
    bit = tl.full([], 0x80000000, tl.uint32)
    while (bit > 0) & ((at_low - more > slack) | (fewer - at_end > slack)):
        counts = tl.sum((key >= (low | bit)).to(tl.int32) + ((key >= (high | bit)).to(tl.int32) << 16), 0)
        enough = (counts & 0xFFFF) >= more
        low = tl.where(enough, low | bit, low)
        at_low = tl.where(enough, counts & 0xFFFF, at_low)
        enough = (counts >> 16) >= fewer
        end = tl.where(enough, end, high | bit)
        at_end = tl.where(enough, at_end, counts >> 16)
        high = tl.where(enough, high | bit, high)
        bit = bit >> 1
    return tl.maximum(low, 1), end


@triton.jit(do_not_specialize=["tokens", "width", "local"])
def guess_least(
    TOTAL, LENGTHS, ENDS, tokens, width, local,
    HEADS: tl.constexpr, SAMPLE: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """Writes between which two keys the least lies, and that none of what lies there is collected yet."""
    at = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    low = tl.full([], 1, tl.uint32)
    high = tl.where(length <= width, low, low | TOP)  # without a choice to make all are above
    if (length > width) & (length > BETWEEN):
        low, high = bracket(TOTAL + at * tokens, length, width, local, SAMPLE)
    tl.store(ENDS + 3 * at, low.to(tl.int32, bitcast=True))
    tl.store(ENDS + 3 * at + 1, high.to(tl.int32, bitcast=True))
    tl.store(ENDS + 3 * at + 2, 0)


@triton.jit(do_not_specialize=["tiles", "local"])
def collect_keys(
    TOTAL, LENGTHS, ENDS, COUNTS, KEYS, tokens, tiles, local,
    HEADS: tl.constexpr, TILE: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """Of a tile: how many keys are above both, how many lie between, and, side by side, which these are."""
    tile = tl.program_id(0) % tiles
    at = (tl.program_id(0) // tiles).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    low = tl.load(ENDS + 3 * at).to(tl.uint32, bitcast=True)
    high = tl.load(ENDS + 3 * at + 1).to(tl.uint32, bitcast=True)
    n = tile * TILE + tl.arange(0, TILE)
    key = keys_at(TOTAL + at * tokens, n, tokens, length, local)
    inside = (key - low < high - low).to(tl.int32)
    counts = tl.sum(inside + ((key >= high).to(tl.int32) << 16), 0)
    within = counts & 0xFFFF
    first = 0 * within
    if within > 0:
        # which tile comes first changes between runs, and changes nothing: keys are counted, never taken in this order
        first = tl.atomic_add(ENDS + 3 * at + 2, within, sem="relaxed")
        if first + within <= BETWEEN:
            to = KEYS + at * BETWEEN + first
            tl.store(to + tl.cumsum(inside, 0) - 1, key.to(tl.int32, bitcast=True), mask=inside > 0)
    to = COUNTS + (at * tiles + tile) * 3
    tl.store(to, counts >> 16)
    tl.store(to + 1, within)
    tl.store(to + 2, first)


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


@triton.jit(do_not_specialize=["tiles", "width", "local"])
def find_least(
    TOTAL, LENGTHS, ENDS, COUNTS, KEYS, LEAST, PARTS, tokens, tiles, width, local,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the least key that is read, and of each tile, where in the table what is read of it begins and ends, how
    many of these have that key, and how many have it at all.
    """
    at = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    low = tl.load(ENDS + 3 * at).to(tl.uint32, bitcast=True)
    high = tl.load(ENDS + 3 * at + 1).to(tl.uint32, bitcast=True)
    tile = tl.arange(0, TILES)
    of_tile = COUNTS + (at * tiles + tile) * 3
    more = tl.load(of_tile, mask=tile < tiles, other=0)
    same = tl.load(of_tile + 1, mask=tile < tiles, other=0)
    above = tl.sum(more, 0)
    between = tl.sum(same, 0)
    last = low
    right = (above < width) & (above + between >= width)
    if (length > width) & ((high - low != 1) | (right == 0)):
        if right & (between <= BETWEEN):
            # the largest key at and above which there are as many as are missing, until they are just as many
            i = tl.arange(0, BETWEEN)
            key = tl.load(KEYS + at * BETWEEN + i, mask=i < between, other=0).to(tl.uint32, bitcast=True)
            missing = width - above
            found = between
            bit = tl.full([], 0x80000000, tl.uint32)
            while bit >= high - low:
                bit = bit >> 1
            off = tl.where(i < between, key - low, 0)
            least = tl.full([], 0, tl.uint32)
            while (bit > 0) & (found != missing):
                count = tl.sum((off >= (least | bit)).to(tl.int32), 0)
                least = tl.where(count >= missing, least | bit, least)
                found = tl.where(count >= missing, count, found)
                bit = bit >> 1
            least = tl.min(tl.where((i < between) & (off >= least), off, TOP), 0)
            last = low + least
            sums = tl.cumsum((off > least).to(tl.int32) + ((off == least).to(tl.int32) << 16), 0)
            start = tl.load(of_tile + 2, mask=tile < tiles, other=0)
            end = start + same
            here = tl.where(end > 0, tl.gather(sums, tl.maximum(end - 1, 0), 0), 0)
            here -= tl.where(start > 0, tl.gather(sums, tl.maximum(start - 1, 0), 0), 0)
            here = tl.where(same > 0, here, 0)
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
    left = tl.where(length <= width, 0, width - tl.sum(more, 0)) - (tl.cumsum(same, 0) - same)
    ties = tl.minimum(tl.maximum(left, 0), same)
    end = tl.cumsum(more + ties, 0)
    to = PARTS + (at * tiles + tile) * 4
    tl.store(to, end - more - ties, mask=tile < tiles)
    tl.store(to + 1, end, mask=tile < tiles)
    tl.store(to + 2, ties, mask=tile < tiles)
    tl.store(to + 3, same, mask=tile < tiles)
    tl.store(LEAST + at, last.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["runs", "tiles", "width", "local", "by_page", "by_token", "by_head"])
def take_tokens(
    TOTAL, LENGTHS, COUNTED, LEAST, PARTS, TABLE, REQUEST, TABLES, TOKENS, SCORES, LSE, SUMS, V_MEAN, MEANS, table_row,
    of_page, of_head, tokens, runs, tiles, width, local, by_page, by_token, by_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, SOME: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # who am I
    tile = tl.program_id(0) % tiles
    at = (tl.program_id(0) // tiles).to(tl.int64)
    h = at % HEADS
    row = at // HEADS
    r = row
    if REQUEST is not None:
        r = tl.load(REQUEST + row).to(tl.int64)
    length = tl.load(LENGTHS + row)
    last = tl.load(LEAST + at).to(tl.uint32, bitcast=True)
    PARTS += (at * tiles + tile) * 4
    first = tl.load(PARTS)
    ties = tl.load(PARTS + 2)
    same = tl.load(PARTS + 3)

    # which tokens are read, and where they stand, side by side
    n = tile * TILE + tl.arange(0, TILE)
    x = tl.load(TOTAL + at * tokens + n, mask=n < tokens, other=0.0)
    key = keys_of(x, n, length, local)
    kept = (key > tl.where(ties == same, last - 1, last)).to(tl.int32)
    if (ties > 0) & (ties < same):  # in one tile of a row at most
        tie = (key == last).to(tl.int32)
        kept += tie & (tl.cumsum(tie, 0) <= ties).to(tl.int32)
    TABLES += at * width
    page = tl.load(TABLE + r * table_row + n // PAGE, mask=n < length, other=0)
    place = page * by_page + n % PAGE * by_token + h.to(tl.int32) * by_head
    tl.store(TABLES + first + tl.cumsum(kept, 0) - 1, place, mask=kept > 0)

    # nothing after the last one
    read = tl.minimum(length, width)
    if (tile * TILE < width) & (tile * TILE + TILE > read):
        n = tile * TILE + tl.arange(0, TILE)
        tl.store(TABLES + n, tl.zeros([TILE], tl.int32), mask=(n >= read) & (n < width))
    if tile == 0:
        tl.store(TOKENS + at, read)

    if V_MEAN is not None:
        # of each query the sum of the weights that are read, and of all, by runs that begin here
        run = (tile * TILE + RUN - 1) // RUN + tl.arange(0, RUNS)
        of_tile = (run < (tile * TILE + TILE + RUN - 1) // RUN) & (run * RUN < length)
        for g in range(GROUP):
            weights = x  # of one query alone, whose score is the sum
            if GROUP > 1:
                weights = tl.load(SCORES + (at * GROUP + g) * tokens + n, mask=kept > 0, other=0.0)
            of_runs = tl.load(LSE + (at * GROUP + g) * runs + run, mask=of_tile, other=float("-inf"))
            to = SUMS + ((at * GROUP + g) * tiles + tile) * 2
            tl.store(to, log_sum(tl.where(kept > 0, weights, float("-inf")), 0))
            tl.store(to + 1, log_sum(of_runs, 0))

        # the values of pages that begin here
        counted = length
        if COUNTED is not None:
            counted = tl.load(COUNTED + row)
        d = tl.arange(0, BLOCK_D)
        total = tl.zeros([SOME, BLOCK_D], tl.float32)
        end = tl.minimum((tile * TILE + TILE + PAGE - 1) // PAGE, (counted + PAGE - 1) // PAGE)
        for start in range((tile * TILE + PAGE - 1) // PAGE, end, SOME):
            p = start + tl.arange(0, SOME)
            its_page = tl.load(TABLE + r * table_row + p, mask=p < end, other=0).to(tl.int64)
            where = (its_page * of_page + h * of_head)[:, None] + d[None, :]
            v = tl.load(V_MEAN + where, mask=(p < end)[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
            count = tl.minimum(counted - p * PAGE, PAGE).to(tl.float32)
            total += tl.where((p < end)[:, None], v * count[:, None], 0.0)
        tl.store(MEANS + (at * tiles + tile) * DIM + d, tl.sum(total, 0), mask=d < DIM)


@triton.jit(do_not_specialize=["tiles", "width"])
def join_tiles(
    SUMS, MEANS, LENGTHS, REST, MEAN, tiles, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr,
    SOME: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Puts together what tiles have: a program has some channels of a row and head, the first one its weights, too."""
    channels: tl.constexpr = tl.cdiv(DIM, BLOCK_D)
    part = tl.program_id(0) % channels
    at = (tl.program_id(0) // channels).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    if part == 0:
        g = tl.arange(0, GROUPS)
        i = tl.arange(0, TILES)
        of_tile = SUMS + (((at * GROUP + g) * tiles)[:, None] + i[None, :]) * 2
        there = (g < GROUP)[:, None] & (i < tiles)[None, :]
        mine = log_sum(tl.load(of_tile, mask=there, other=float("-inf")), 1)
        whole = log_sum(tl.load(of_tile + 1, mask=there, other=float("-inf")), 1)
        more = tl.maximum(whole - mine, 0.0)
        rest = tl.where(more < 1e-3, tl.log(more + 0.5 * more * more), more + tl.log(1.0 - tl.exp(-more)))
        tl.store(REST + at * GROUP + g, tl.where(length <= width, float("-inf"), rest), mask=g < GROUP)
    d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([SOME, BLOCK_D], tl.float32)
    for start in range(0, tiles, SOME):
        tile = start + tl.arange(0, SOME)
        inside = (tile < tiles)[:, None] & (d < DIM)[None, :]
        total += tl.load(MEANS + (at * tiles + tile)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    tl.store(MEAN + at * DIM + d, tl.sum(total, 0) / tl.maximum(length, 1), mask=d < DIM)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    rows, heads, group, tokens = call.scores.shape
    device, tiles, between = call.total.device, max(1, -(-tokens // _TILE)), _within(_BETWEEN, tokens // 8)
    numbers = {"dtype": torch.int32, "device": device}
    ends, counts = torch.empty((rows, heads, 3), **numbers), torch.empty((rows, heads, tiles, 3), **numbers)
    least, parts = torch.empty((rows, heads), **numbers), torch.empty((rows, heads, tiles, 4), **numbers)
    keys = torch.empty((rows, heads, between), **numbers)
    sums = means = None
    if call.v_mean is not None:
        sums = torch.empty((rows, heads, group, tiles, 2), device=device)
        means = torch.empty((rows, heads, tiles, call.v_mean.shape[2]), device=device)
    tensors = (
        (call.total, call.lengths, ends),
        (call.total, call.lengths, ends, counts, keys),
        (call.total, call.lengths, ends, counts, keys, least, parts),
        (call.total, call.lengths, call.counted, least, parts, call.table, call.request, results["tables"],
         results["tokens"], call.scores, call.lse, sums, call.v_mean, means),
        (sums, means, call.lengths, results["rest"], results["mean"]),
    )  # fmt: skip
    key = tensors_key(*(x for some in tensors for x in some if x is not None))
    if key is not None:
        key = (key, call.page_size, call.width, call.local, call.by_page, call.by_token, call.by_head)
        key += (call.request is None, call.counted is None)
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS.put(key, _plans(call, tiles, between))
    with on_device(call.total):
        for plan, pointers in zip(plans, tensors, strict=False):
            plan.launch(pointers, ())


def _within(bounds: tuple[int, int], size: int) -> int:
    """The power of two at or above a size, within bounds."""
    return min(bounds[1], max(bounds[0], triton.next_power_of_2(max(1, size))))


def _plans(call: Call, tiles: int, between: int) -> tuple[Plan, ...]:
    rows, heads, group, tokens = call.scores.shape
    tile, many = min(_TILE, triton.next_power_of_2(max(16, tokens))), triton.next_power_of_2(tiles)
    sample, warps, sizes = _within(_SAMPLE, tokens // 16), _warps(tile, 512), (tokens, tiles, call.width, call.local)
    constants = (heads, sample, between)
    guess = Plan(guess_least, rows * heads, (), (tokens, call.width, call.local), constants, _warps(sample, 256), 1)
    constants = (heads, tile, between)
    collect = Plan(collect_keys, rows * heads * tiles, (), (tokens, tiles, call.local), constants, warps, 1)
    constants = (heads, tile, many, between, max(tile, min(_BLOCK, tile * many)))
    find = Plan(find_least, rows * heads, (), sizes, constants, _warps(between, 512), 1)
    v_mean, run = call.v_mean, call.run
    dim, strides = (0, (0, 0)) if v_mean is None else (v_mean.shape[2], v_mean.stride()[:2])
    block_d, groups = triton.next_power_of_2(max(16, dim)), triton.next_power_of_2(group)
    some, runs = max(1, _VALUES // block_d), triton.next_power_of_2(-(-tile // run))
    sizes = (tokens, call.lse.shape[3], tiles, call.width, call.local, call.by_page, call.by_token, call.by_head)
    constants = (heads, group, call.page_size, run, runs, dim, tile, some, block_d)
    take = Plan(take_tokens, rows * heads * tiles, (call.table.stride(0), *strides), sizes, constants, warps, 1)
    if v_mean is None:
        return guess, collect, find, take
    block_d = min(block_d, _CHANNELS)
    warps = min(8, max(4, many * block_d // 1024))
    constants = (heads, group, groups, dim, many, max(1, warps * 1024 // block_d), block_d)
    join = Plan(join_tiles, rows * heads * -(-dim // block_d), (), (tiles, call.width), constants, warps, 1)
    return guess, collect, find, take, join


def _warps(numbers: int, each: int) -> int:
    """Of a program that holds some numbers, `each` in a warp."""
    return max(1, min(32, numbers // each))
