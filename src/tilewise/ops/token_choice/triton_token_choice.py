"""Tokens chosen on a GPU. Of each row and head a sample says between which two keys the least that is read is likely to
lie, while other programs add the values of pages, which stand for what is not read; programs of a tile of tokens each
count what is above these and collect what lies between, which is little; one program searches that bit by bit, and
knows then how much of each tile is read, so that again programs of a tile each write it. Where the sample was wrong, or
too much lies between, the one that searches goes through all tokens itself.

Keys are integers in the order of scores, for who searches bit by bit; who only compares does so with scores, which is
fewer instructions. These bound the programs of a tile, and so does how many of them a multiprocessor has.

Histograms of all keys would need no sample, but Triton counts bins by ballots: 2048 of them take 64 population counts
of a warp for every 32 keys.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewise.ops.token_choice.problem import FORCED, Call, within
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.log_sum import log_sum

_BETWEEN = (4096, 32768)  # keys that are searched: room for what a sample is expected to leave, within these bounds
_SAMPLE = (1024, 16384)  # keys of a row: one of 32 tokens, likewise
_BLOCK = 8192  # tokens at a time where one program goes through all
_REGISTERS = {"maxnreg": 64}  # of a thread, so that a multiprocessor has 32 programs of a tile
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
    off = 4.0 * tl.sqrt(rank * (1.0 - rank / SAMPLE)) + 4.0
    more = (rank + off).to(tl.int32)
    fewer = (rank - off).to(tl.int32)
    slack = (more - fewer) // 16
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


@triton.jit
def guess_least(
    TOTAL, LENGTHS, ENDS, at, tokens, width, local, HEADS: tl.constexpr, SAMPLE: tl.constexpr, BETWEEN: tl.constexpr
):
    """Writes between which two keys the least lies, and that none of what lies there is collected yet."""
    length = tl.load(LENGTHS + at // HEADS)
    low = tl.full([], 1, tl.uint32)
    high = tl.where(length <= width, low, low | TOP)  # without a choice to make all are above
    if (length > width) & (length > BETWEEN):
        low, high = bracket(TOTAL + at * tokens, length, width, local, SAMPLE)
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
    LENGTHS, COUNTED, LSE, TABLE, REQUEST, V_MEAN, SEEN, VALUES, at, part, table_row, of_page, of_head, runs, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, RUN: tl.constexpr,
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
    page = tl.load(TABLE + request * table_row + p, mask=there, other=0).to(tl.int64)
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


@triton.jit(do_not_specialize=["tokens", "width", "local", "runs", "parts"])
def guess_and_add(
    TOTAL, LENGTHS, ENDS, COUNTED, LSE, TABLE, REQUEST, V_MEAN, SEEN, VALUES, table_row, of_page, of_head, tokens,
    width, local, runs, parts,
    HEADS: tl.constexpr, SAMPLE: tl.constexpr, BETWEEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PAGE: tl.constexpr, RUN: tl.constexpr, DIM: tl.constexpr, SOME: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`guess_least`, and beside it, since few programs do that, `add_pages` where something stands for the rest."""
    rows = tl.num_programs(0) // (parts + 1)
    at = (tl.program_id(0) % rows).to(tl.int64)
    part = tl.program_id(0) // rows - 1
    if part < 0:
        guess_least(TOTAL, LENGTHS, ENDS, at, tokens, width, local, HEADS, SAMPLE, BETWEEN)
    elif V_MEAN is not None:
        add_pages(
            LENGTHS, COUNTED, LSE, TABLE, REQUEST, V_MEAN, SEEN, VALUES, at, part, table_row, of_page, of_head, runs,
            parts, HEADS, GROUP, GROUPS, PAGE, RUN, DIM, SOME, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "local"])
def collect_keys(
    TOTAL, LENGTHS, ENDS, COUNTS, FOUND, tokens, tiles, local,
    HEADS: tl.constexpr, TILE: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """Of a tile: how many keys are above both, how many lie between, and, side by side, what these are of."""
    tile = tl.program_id(0) % tiles
    at = (tl.program_id(0) // tiles).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    n = tokens_of_tile(tile, TILE)
    x = tl.load(TOTAL + at * tokens + n, mask=n < tokens, other=0.0)
    low = least_number(tl.load(ENDS + 3 * at).to(tl.uint32, bitcast=True))
    high = least_number(tl.load(ENDS + 3 * at + 1).to(tl.uint32, bitcast=True))
    y = compared(x, n, tile * TILE, length, local)
    more = tl.sum((y >= high).to(tl.int32).reshape(TILE), 0)
    inside = (y >= low) & (y < high)
    places, within = places_of(inside.to(tl.int32))
    # which tile comes first changes between runs, and changes nothing: keys are counted, never taken in this order
    first = tl.atomic_add(ENDS + 3 * at + 2, within, sem="relaxed")
    room = first + within <= BETWEEN
    tl.store(FOUND + at * BETWEEN + first - 1 + places, y, mask=inside & room)
    to = COUNTS + (at * tiles + tile) * 3
    tl.store(to, more)
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
    TOTAL, LENGTHS, ENDS, COUNTS, FOUND, LEAST, PARTS, tokens, tiles, width, local,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the least key that is read, and of each tile, where in the table what is read of it begins, how many of
    these have that key, and how many have it at all.
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
            key = keys_of(tl.load(FOUND + at * BETWEEN + i, mask=i < between, other=0.0), i, between, 0)
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
    to = PARTS + (at * tiles + tile) * 3
    tl.store(to, end - more - ties, mask=tile < tiles)
    tl.store(to + 1, ties, mask=tile < tiles)
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
    page = tl.load(TABLE + request * table_row + m // PAGE, mask=m < length, other=0)
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


@dataclass(frozen=True)
class _Sizes:
    """What the shapes of a call decide."""

    tile: int
    tiles: int
    sample: int
    between: int
    some: int
    parts: int


def _sizes(call: Call) -> _Sizes:
    tokens = call.total.shape[2]
    sample = within(_SAMPLE, tokens // 32)
    share = min(1.0, call.width / max(1, tokens))
    off = 4.0 * math.sqrt(sample * share * (1.0 - share)) + 4.0  # as `bracket` has it, and up to an eighth more
    left = 2.125 * off
    between = within(_BETWEEN, math.ceil((left + 4.0 * math.sqrt(left)) / sample * tokens))
    return _Sizes(call.tile, call.tiles, sample, between, call.some, call.parts)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    rows, heads = call.total.shape[:2]
    device, sizes = call.total.device, _sizes(call)
    tiles = (rows, heads, sizes.tiles)
    numbers = {"dtype": torch.int32, "device": device}
    ends, counts = torch.empty((rows, heads, 3), **numbers), torch.empty((*tiles, 3), **numbers)
    least, parts = torch.empty((rows, heads), **numbers), torch.empty((*tiles, 3), **numbers)
    found = torch.empty((rows, heads, sizes.between), device=device)
    read = seen = values = None
    if call.v_mean is not None:
        read, seen, values = results["read"], results["seen"], results["values"]
    tensors = (
        (call.total, call.lengths, ends, call.counted, call.lse, call.table, call.request, call.v_mean, seen, values),
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
        plans = _PLANS.put(key, _plans(call, sizes))
    with on_device(call.total):
        for plan, pointers in zip(plans, tensors, strict=True):
            plan.launch(pointers, ())


def _plans(call: Call, sizes: _Sizes) -> tuple[Plan, ...]:
    rows, heads, group, tokens = call.scores.shape
    tile, tiles, between, width, local = sizes.tile, sizes.tiles, sizes.between, call.width, call.local
    many, warps = triton.next_power_of_2(tiles), _warps(tile, 512)
    v_mean, run = call.v_mean, call.run
    dim, strides = (0, (0, 0)) if v_mean is None else (v_mean.shape[2], v_mean.stride()[:2])
    block_d, groups, programs = triton.next_power_of_2(max(16, dim)), triton.next_power_of_2(group), rows * heads
    constants: tuple[int, ...] = (heads, sizes.sample, between, group, groups, call.page_size, run, dim)
    constants += (sizes.some, block_d)
    numbers: tuple[int, ...] = (tokens, width, local, call.lse.shape[3], sizes.parts)
    strides = (call.table.stride(0), *strides)
    guess = Plan(guess_and_add, programs * (sizes.parts + 1), strides, numbers, constants, 4, 1)
    constants = (heads, tile, between)
    collect = Plan(collect_keys, programs * tiles, (), (tokens, tiles, local), constants, warps, 1, options=_REGISTERS)
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
