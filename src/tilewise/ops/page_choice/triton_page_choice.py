"""Pages chosen on a GPU: programs score some pages of a row's request for one head of keys, then others write the table
of what is read. Where pages are few (`Call.by_score`) each of those compares some with all of the row: how many score
more is a page's place. Elsewhere one program holds all scores of a row and finds the least that is read bit by bit.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.page_choice.problem import FORCED, Call
from tilewise.ops.select.triton_select import ordered
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key

_ELEMENTS = 4096  # of the pages of a program
_EACH = 32  # elements of a thread that scores pages,
_OF_ROW = 8  # pages of one that takes them from all of a row,
_RANKED = 16  # and of a program, one warp, that compares them with all of a row,
_LINES = 4  # so many lines of 32 at a time
_PLANS = Plans()
LARGE = tl.constexpr(FORCED)
AT_ONCE = tl.constexpr(4)  # bits between looks whether one key is left


@triton.jit(do_not_specialize=["pages", "parts", "first", "local"])
def score_pages(
    Q, LEAST, LARGEST, TABLE, REQUEST, LENGTHS, SCORES, q_row, q_head, of_page, of_head, table_row, pages, parts, first,
    local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, MEANS: tl.constexpr,
    STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # who am I
    part = tl.program_id(0) % parts
    h = tl.program_id(0) // parts % HEADS
    row = (tl.program_id(0) // parts // HEADS).to(tl.int64)
    r = row
    if REQUEST is not None:
        r = tl.load(REQUEST + row).to(tl.int64)
    count = (tl.load(LENGTHS + row) + PAGE - 1) // PAGE
    n = part * STEP + tl.arange(0, STEP)
    there = n < count

    # the largest score of the group's heads
    d = tl.arange(0, BLOCK_D)
    page = tl.load(TABLE + r * table_row + n, mask=there, other=0).to(tl.int64)
    at = (page * of_page + h.to(tl.int64) * of_head)[:, None] + d[None, :]
    inside = there[:, None] & (d < DIM)[None, :]
    least = tl.load(LEAST + at, mask=inside, other=0.0).to(tl.float32)
    largest = least
    if not MEANS:
        largest = tl.load(LARGEST + at, mask=inside, other=0.0).to(tl.float32)
    score = tl.full([STEP], float("-inf"), tl.float32)
    of_q = Q + row * q_row + h * GROUP * q_head + d
    coming = tl.load(of_q, mask=d < DIM, other=0.0)
    for g in range(GROUP):  # not unrolled: code that runs once is mostly waited for
        q = coming.to(tl.float32)[None, :]
        coming = tl.load(of_q + (g + 1) * q_head, mask=(d < DIM) & (g < GROUP - 1), other=0.0)
        each = tl.sum(q * tl.where(q > 0.0, largest, least), 1)
        score = tl.maximum(score, tl.where(tl.abs(each) < float("inf"), each, LARGE))

    # epilogue
    score = tl.where((n < first) | (n >= count - local), LARGE, score)
    score = tl.where(there, score + 0.0, float("-inf"))  # no zero has a sign
    tl.store(SCORES + (row * HEADS + h) * pages + n, score, mask=n < pages)


@triton.jit(do_not_specialize=["pages", "width", "parts"])
def rank_pages(
    SCORES, TABLE, REQUEST, LENGTHS, TABLES, TOKENS, KEPT, table_row, pages, width, by_page, by_head, parts,
    HEADS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    # who am I: programs of a head lie apart by HEADS, so that those of a multiprocessor mostly read the same scores
    h = tl.program_id(0) % HEADS
    part = tl.program_id(0) // HEADS % parts
    row = (tl.program_id(0) // HEADS // parts).to(tl.int64)
    at = row * HEADS + h
    r = row
    if REQUEST is not None:
        r = tl.load(REQUEST + row).to(tl.int64)
    length = tl.load(LENGTHS + row)
    count = (length + PAGE - 1) // PAGE
    read = tl.minimum(count, width)
    older = count - 1  # pages beside the newest, which is read
    first = part * STEP
    own = tl.arange(0, STEP)
    n = first + own
    page = tl.load(TABLE + r * table_row + n, mask=n < count, other=0)
    score = tl.load(SCORES + at * pages + n, mask=n < older, other=float("-inf"))[:, None, None]

    # how many score more, or the same and come before this program's: two instructions each, a difference and its sign
    lane = tl.arange(0, 32)
    more = tl.zeros([STEP, 32], tl.int32)
    line = tl.arange(0, LINES)[:, None] * 32 + lane[None, :]
    others = SCORES + at * pages
    coming = tl.load(others + line, mask=line < older, other=float("-inf"))
    for begin in range(0, tl.where(first < older, older, 0), LINES * 32):
        others += LINES * 32
        bits = coming.to(tl.int32, bitcast=True)
        coming = tl.load(others + line, mask=line < older - begin - LINES * 32, other=float("-inf"))
        bits += tl.where(line < first - begin, (bits >> 31) | 1, 0)  # the next larger number: it wins a tie
        less = score - bits.to(tl.float32, bitcast=True)[None, :, :]
        more += tl.sum((less.to(tl.uint32, bitcast=True) >> 31).to(tl.int32), 1)

    # those of this program that score the same and come before
    near = tl.load(SCORES + at * pages + first + lane, mask=first + lane < older, other=float("-inf"))
    ties = (near[None, None, :] == score) & (lane[None, None, :] < own[:, None, None])

    # epilogue
    place = tl.sum(more + tl.sum(ties.to(tl.int32), 1), 1)
    kept = ((n < older) & (place < read - 1)) | (n == older)
    place = tl.where(n == older, read - 1, place)
    tl.store(TABLES + at * width + place, page * by_page + h * by_head, mask=kept)
    tl.store(TABLES + at * width + n, tl.zeros([STEP], tl.int32), mask=(n >= read) & (n < width))
    tl.store(KEPT + at * pages + n, kept.to(tl.int8), mask=n < pages)
    tl.store(TOKENS + at, read * PAGE - (count * PAGE - length), mask=part == 0)


@triton.jit(do_not_specialize=["pages", "width"])
def take_pages(
    SCORES, TABLE, REQUEST, LENGTHS, TABLES, TOKENS, KEPT, table_row, pages, width, by_page, by_head,
    HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # who am I
    h = tl.program_id(0) % HEADS
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    at = row * HEADS + h
    r = row
    if REQUEST is not None:
        r = tl.load(REQUEST + row).to(tl.int64)
    length = tl.load(LENGTHS + row)
    count = (length + PAGE - 1) // PAGE
    read = tl.minimum(count, width)
    n = tl.arange(0, BLOCK)
    there = n < count - 1  # beside the newest, which is read

    # the least key that is read: the largest at and above which there are enough
    key = tl.where(there, ordered(tl.load(SCORES + at * pages + n, mask=there, other=0.0)), 0)
    last = tl.full([], 0, tl.uint32)
    bit = 32
    undecided = 2
    while undecided > 1:
        for _ in tl.static_range(AT_ONCE):
            bit -= 1
            higher = last | (tl.full([], 1, tl.uint32) << bit)
            last = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= read - 1, higher, last)
        near = there & ((key >> bit) == (last >> bit))
        undecided = tl.where(bit == 0, 0, tl.sum(near.to(tl.int32), 0))
    last = tl.max(tl.where(there & ((key >> bit) == (last >> bit)), key, last), 0)  # the only one, or all are equal

    # of those with this key, the first ones that are needed
    above = there & (key > last)
    ties = there & (key == last)
    before = tl.sum(above.to(tl.int32), 0) + tl.cumsum(ties.to(tl.int32), 0)
    kept = above | (ties & (before < read)) | (n == count - 1)

    # epilogue
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    page = tl.load(TABLE + r * table_row + n, mask=kept, other=0)
    tl.store(TABLES + at * width + place, page * by_page + h * by_head, mask=kept)
    tl.store(TABLES + at * width + n, tl.zeros([BLOCK], tl.int32), mask=(n >= read) & (n < width))
    tl.store(TOKENS + at, read * PAGE - (count * PAGE - length))
    tl.store(KEPT + at * pages + n, kept.to(tl.int8), mask=n < pages)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    scores = results["scores"]
    scored = (call.q, call.least, call.largest, call.table, call.request, call.lengths, scores)
    taken = (scores, call.table, call.request, call.lengths, results["tables"], results["tokens"])
    taken = (*taken, results["kept"].view(torch.int8))
    key = tensors_key(*(x for x in (*scored, *taken[4:]) if x is not None))
    if key is not None:
        key = (key, call.means, call.page_size, call.first, call.local, call.by_page, call.by_head, call.by_score)
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS.put(key, _plans(call))
    with on_device(call.q):
        for plan, pointers in zip(plans, (scored, taken), strict=True):
            plan.launch(pointers, ())


def _plans(call: Call) -> tuple[Plan, Plan]:
    rows, pages, dim = call.q.shape[0], call.table.shape[1], call.q.shape[2]
    block_d = max(16, triton.next_power_of_2(dim))
    step = max(1, min(_ELEMENTS // block_d, triton.next_power_of_2(pages)))
    parts = -(-pages // step)
    strides = (*call.q.stride()[:2], *call.least.stride()[:2], call.table.stride(0))
    constants = (call.heads, call.group, call.page_size, dim, call.means, step, block_d)
    warps = min(8, max(1, step * block_d // (32 * _EACH)))
    sizes = (pages, parts, call.first, call.local)
    score = Plan(score_pages, rows * call.heads * parts, strides, sizes, constants, warps, 1)
    if call.by_score:
        parts = -(-max(pages, call.width) // _RANKED)
        sizes = (pages, call.width, call.by_page, call.by_head, parts)
        constants = (call.heads, call.page_size, _RANKED, _LINES)
        return score, Plan(rank_pages, rows * call.heads * parts, strides[-1:], sizes, constants, 1, 1)
    block = max(16, triton.next_power_of_2(max(pages, call.width)))
    sizes = (pages, call.width, call.by_page, call.by_head)
    constants = (call.heads, call.page_size, block)
    warps = min(16, max(1, block // (32 * _OF_ROW)))
    return score, Plan(take_pages, rows * call.heads, strides[-1:], sizes, constants, warps, 1)
