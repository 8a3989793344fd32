"""Tokens chosen on a GPU. A program of a row and head finds the least score that is read: a sample says between which
two it is likely to lie, one pass counts what is above and collects what lies between, and these are searched bit by
bit; where the sample was wrong, or too much lies between, the two draw closer and the pass is repeated. It leaves how
many tokens of each tile are read, so that then each tile of tokens is written by a program of its own.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.select.triton_select import ordered
from tilewise.ops.token_choice.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.largest import least_of

_TILE = 8192  # tokens of a program that writes tables
_SAMPLE = 8192
_BETWEEN = 8192  # scores that are searched
_CHUNK = 4096  # numbers of runs' sums, or of values' means, at a time
_PLANS = Plans()
TOP = tl.constexpr(0xFFFFFFFF)  # above the key of any score


@triton.jit
def keys_at(TOTAL, n, there):
    """What scores are compared by."""
    return tl.where(there, ordered(tl.load(TOTAL + n, mask=there, other=0.0)), 0)


@triton.jit
def bracket(TOTAL, length, width, SAMPLE: tl.constexpr):
    """Two integers between which the least key that is read is likely to lie, by some of the keys."""
    i = tl.arange(0, SAMPLE)
    n = i * (length // SAMPLE) + i * (length % SAMPLE) // SAMPLE
    key = keys_at(TOTAL, n, i < length)
    rank = width.to(tl.float32) * SAMPLE / length
    off = 4.0 * tl.sqrt(rank * (1.0 - rank / SAMPLE)) + 8.0
    low = least_of(key, i < length, tl.minimum(rank + off, SAMPLE).to(tl.int32))
    above = (rank - off).to(tl.int32)
    high = tl.where(above > 0, least_of(key, i < length, above) + 1, TOP)
    return low, high.to(tl.uint32)


@triton.jit(do_not_specialize=["tokens", "tiles", "width"])
def find_least(
    TOTAL, LENGTHS, LEAST, COUNTS, KEYS, BEFORE, tokens, tiles, width,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SAMPLE: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    # who am I
    at = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    TOTAL += at * tokens
    COUNTS += at * tiles * 2
    KEYS += at * BETWEEN
    BEFORE += at * BETWEEN

    # between which two keys the least lies that is read; without a choice to make all are above the first of them
    nothing = 0 * length
    bottom = nothing.to(tl.uint32)
    top = bottom | TOP
    low = bottom
    high = tl.where(length <= width, bottom + 1, top)
    if (length > BETWEEN) & (length > width):
        low, high = bracket(TOTAL, length, width, SAMPLE)
    above = nothing
    between = nothing
    looking = length >= 0
    while looking:
        above = nothing
        between = nothing
        for tile in range(tiles):
            n = tile * TILE + tl.arange(0, TILE)
            key = keys_at(TOTAL, n, n < length)
            inside = (n < length) & (key >= low) & (key < high)
            place = between + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(KEYS + place, key.to(tl.int32, bitcast=True), mask=inside & (place < BETWEEN))
            higher = tl.sum(((n < length) & (key >= high)).to(tl.int32), 0)
            within = tl.sum(inside.to(tl.int32), 0)
            tl.store(COUNTS + 2 * tile, higher)
            tl.store(COUNTS + 2 * tile + 1, within)
            above += higher
            between += within
        right = (above < width) & (above + between >= width)
        found = (length <= width) | (right & ((between <= BETWEEN) | (high - low == 1)))
        looking = found == 0
        if looking:
            bottom = tl.where(above >= width, high, tl.where(right, low, bottom))
            top = tl.where(above >= width, top, tl.where(right, high, low))
            third = (top - bottom) // 3
            low = bottom + third
            high = tl.where(third > 0, top - third, bottom + 1)

    # that key; of each tile, how many are above it and how many have it
    tl.debug_barrier()
    last = low
    if (length > width) & (high - low != 1):
        i = tl.arange(0, BETWEEN)
        key = tl.load(KEYS + i, mask=i < between, other=0).to(tl.uint32, bitcast=True)
        last = least_of(key, i < between, width - above)
        more = (i < between) & (key > last)
        same = (i < between) & (key == last)
        above += tl.sum(more.to(tl.int32), 0)
        tl.store(BEFORE + i, tl.cumsum(more.to(tl.int32) + (same.to(tl.int32) << 16), 0))
        tl.debug_barrier()
        tile = tl.arange(0, TILES)
        higher = tl.load(COUNTS + 2 * tile, mask=tile < tiles, other=0)
        within = tl.load(COUNTS + 2 * tile + 1, mask=tile < tiles, other=0)
        end = tl.cumsum(within, 0)
        start = end - within
        sums = tl.load(BEFORE + end - 1, mask=end > 0, other=0) - tl.load(BEFORE + start - 1, mask=start > 0, other=0)
        tl.debug_barrier()
        tl.store(COUNTS + 2 * tile, higher + (sums & 0xFFFF), mask=tile < tiles)
        tl.store(COUNTS + 2 * tile + 1, sums >> 16, mask=tile < tiles)
    tl.store(LEAST + 2 * at, last.to(tl.int32, bitcast=True))
    tl.store(LEAST + 2 * at + 1, tl.where(length <= width, 0, width - above))


@triton.jit
def log_sum(a, a_top, x, there):
    """(sum of exponentials, largest) of what came before and of x."""
    x = tl.where(there, x, float("-inf"))
    top = tl.maximum(a_top, tl.max(x, 0))
    use = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    return a * tl.exp(a_top - use) + tl.sum(tl.exp(x - use), 0), top


@triton.jit(do_not_specialize=["tokens", "runs", "pages", "tiles", "width", "by_page", "by_token", "by_head"])
def take_tokens(
    TOTAL, LENGTHS, LEAST, COUNTS, TABLE, REQUEST, TABLES, TOKENS, SCORES, LSE, SUMS, V_MEAN, MEANS, table_row, of_page,
    of_head, tokens, runs, pages, tiles, width, by_page, by_token, by_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, RUN: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, SOME: tl.constexpr, BLOCK_D: tl.constexpr,
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
    last = tl.load(LEAST + 2 * at).to(tl.uint32, bitcast=True)
    equal = tl.load(LEAST + 2 * at + 1)  # how many of those with this key are read
    i = tl.arange(0, TILES)
    above = tl.sum(tl.load(COUNTS + (at * tiles + i) * 2, mask=i < tile, other=0), 0)  # in tiles before
    same = tl.sum(tl.load(COUNTS + (at * tiles + i) * 2 + 1, mask=i < tile, other=0), 0)

    # which tokens are read, and where they stand
    n = tile * TILE + tl.arange(0, TILE)
    there = n < length
    key = keys_at(TOTAL + at * tokens, n, there)
    more = there & (key > last)
    tie = there & (key == last)
    before = tl.cumsum(more.to(tl.int32) + (tie.to(tl.int32) << 16), 0) - more.to(tl.int32) - (tie.to(tl.int32) << 16)
    left = tl.maximum(equal - same, 0)
    kept = more | (tie & ((before >> 16) < left))
    place = above + tl.minimum(same, equal) + (before & 0xFFFF) + tl.minimum(before >> 16, left)
    page = tl.load(TABLE + r * table_row + n // PAGE, mask=kept, other=0)
    tl.store(TABLES + at * width + place, page * by_page + n % PAGE * by_token + h.to(tl.int32) * by_head, mask=kept)
    read = tl.minimum(length, width)
    tl.store(TABLES + at * width + n, tl.zeros([TILE], tl.int32), mask=(n >= read) & (n < width))
    if tile == 0:
        tl.store(TOKENS + at, read)

    # what weights are read, and are there; the values of pages that begin here
    if V_MEAN is not None:
        first = (tile * TILE + RUN - 1) // RUN
        end = tl.minimum((tile * TILE + TILE + RUN - 1) // RUN, runs)
        for g in tl.static_range(GROUP):
            s = tl.load(SCORES + (at * GROUP + g) * tokens + n, mask=kept, other=float("-inf"))
            mine, mine_top = log_sum(0.0, float("-inf"), s, kept)
            whole = 0.0
            whole_top = float("-inf")
            for start in range(first, end, CHUNK):
                run = start + tl.arange(0, CHUNK)
                x = tl.load(LSE + (at * GROUP + g) * runs + run, mask=run < end, other=float("-inf"))
                whole, whole_top = log_sum(whole, whole_top, x, run < end)
            to = SUMS + ((at * GROUP + g) * tiles + tile) * 2
            tl.store(to, mine_top + tl.log(mine))
            tl.store(to + 1, whole_top + tl.log(whole))
        d = tl.arange(0, BLOCK_D)
        mean = tl.zeros([BLOCK_D], tl.float32)
        first = (tile * TILE + PAGE - 1) // PAGE
        end = tl.minimum((tile * TILE + TILE + PAGE - 1) // PAGE, (length + PAGE - 1) // PAGE)
        for start in range(first, end, SOME):
            p = start + tl.arange(0, SOME)
            its_page = tl.load(TABLE + r * table_row + p, mask=p < end, other=0).to(tl.int64)
            where = (its_page * of_page + h * of_head)[:, None] + d[None, :]
            v = tl.load(V_MEAN + where, mask=(p < end)[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
            count = tl.minimum(length - p * PAGE, PAGE).to(tl.float32)
            mean += tl.sum(tl.where((p < end)[:, None], v * count[:, None], 0.0), 0)
        tl.store(MEANS + (at * tiles + tile) * DIM + d, mean, mask=d < DIM)


@triton.jit(do_not_specialize=["tiles", "width"])
def join_tiles(
    SUMS, MEANS, LENGTHS, REST, MEAN, tiles, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + at // HEADS)
    i = tl.arange(0, TILES)
    for g in tl.static_range(GROUP):
        of_tile = SUMS + ((at * GROUP + g) * tiles + i) * 2
        mine, mine_top = log_sum(0.0, float("-inf"), tl.load(of_tile, mask=i < tiles, other=float("-inf")), i < tiles)
        whole, whole_top = log_sum(
            0.0, float("-inf"), tl.load(of_tile + 1, mask=i < tiles, other=float("-inf")), i < tiles
        )
        more = tl.maximum(whole_top + tl.log(whole) - mine_top - tl.log(mine), 0.0)
        rest = tl.where(more < 1e-3, tl.log(more + 0.5 * more * more), more + tl.log(1.0 - tl.exp(-more)))
        tl.store(REST + at * GROUP + g, tl.where(length <= width, float("-inf"), rest))
    d = tl.arange(0, BLOCK_D)
    inside = (i < tiles)[:, None] & (d < DIM)[None, :]
    total = tl.sum(tl.load(MEANS + (at * tiles + i)[:, None] * DIM + d[None, :], mask=inside, other=0.0), 0)
    tl.store(MEAN + at * DIM + d, total / tl.maximum(length, 1), mask=d < DIM)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    rows, heads, group, tokens = call.scores.shape
    device, tiles = call.total.device, max(1, -(-tokens // _TILE))
    numbers = {"dtype": torch.int32, "device": device}
    least, counts = torch.empty((rows, heads, 2), **numbers), torch.empty((rows, heads, tiles, 2), **numbers)
    keys, before = torch.empty((2, rows, heads, _BETWEEN), **numbers)
    sums = means = None
    if call.v_mean is not None:
        sums = torch.empty((rows, heads, group, tiles, 2), device=device)
        means = torch.empty((rows, heads, tiles, call.v_mean.shape[2]), device=device)
    found = (call.total, call.lengths, least, counts, keys, before)
    taken = (
        call.total, call.lengths, least, counts, call.table, call.request, results["tables"], results["tokens"],
        call.scores, call.lse, sums, call.v_mean, means,
    )  # fmt: skip
    joined = (sums, means, call.lengths, results["rest"], results["mean"])
    key = tensors_key(*(x for x in (*found, *taken, *joined) if x is not None))
    if key is not None:
        key = (key, call.page_size, call.width, call.by_page, call.by_token, call.by_head)
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS.put(key, _plans(call, tiles))
    with on_device(call.total):
        for plan, pointers in zip(plans, (found, taken, joined), strict=False):
            plan.launch(pointers, ())


def _plans(call: Call, tiles: int) -> tuple[Plan, ...]:
    rows, heads, group, tokens = call.scores.shape
    tile, many = min(_TILE, triton.next_power_of_2(max(16, tokens))), triton.next_power_of_2(tiles)
    warps = max(1, min(32, tile // 256))
    constants = (heads, tile, many, _SAMPLE, _BETWEEN)
    find = Plan(find_least, rows * heads, (), (tokens, tiles, call.width), constants, warps, 1)
    runs, pages = call.lse.shape[3], call.table.shape[1]
    v_mean = call.v_mean
    dim, strides = (0, (0, 0)) if v_mean is None else (v_mean.shape[2], v_mean.stride()[:2])
    block_d = triton.next_power_of_2(max(16, dim))
    sizes = (tokens, runs, pages, tiles, call.width, call.by_page, call.by_token, call.by_head)
    constants = (
        heads, group, call.page_size, call.run, dim, tile, many, min(_CHUNK, tile), max(1, _CHUNK // block_d), block_d,
    )  # fmt: skip
    warps = max(1, min(16, tile // 512))
    take = Plan(take_tokens, rows * heads * tiles, (call.table.stride(0), *strides), sizes, constants, warps, 1)
    if v_mean is None:
        return find, take
    constants = (heads, group, dim, many, block_d)
    return find, take, Plan(join_tiles, rows * heads, (), (tiles, call.width), constants, 4, 1)
