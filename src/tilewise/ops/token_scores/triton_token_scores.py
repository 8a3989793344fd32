"""Scores of tokens by columns of their keys on a GPU: a program has some pages of a row's request, of one head.

A key is least + code * step, so a score is the sum of q * least and of w * code, with w = q * step. A code that is put
behind the point of a float, 1 + code / 2**n, is a float without a conversion: sums of w times that, less the sum of w,
are off by what float32 rounds 2**n w by, n 15 for codes of 8 bits and 11 for 4: 2**-8 of a code's step at most, each.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.token_scores.problem import OF_SAMPLE, PLACE, Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.early import early_for
from tilewise.tiles.log_sum import log_sum

_BYTES = 512  # of a column, that a program has: with more, programs that wait for memory are too few
_SUMS = 64  # of a thread: of 16 tokens at most, of 4 where codes come byte by byte
_AT_ONCE = 4  # queries
_PLANS = Plans()
_ONE = 0x3F800000  # the bits of 1.0, which kernels are told: an instruction takes one number that is written down
AT_ONCE = tl.constexpr(_AT_ONCE)
EACH, STEP = tl.constexpr(OF_SAMPLE), tl.constexpr(PLACE)
FEW = tl.constexpr(4)  # pages of a program whose ends in all dimensions are loaded at once


@triton.constexpr_function
def place_in_mantissa(bit, bits):
    """Where a code goes that begins at a bit of a word, two of 4 bits by one shift."""
    return 8 if bits == 8 else 12 + bit % 8


@triton.constexpr_function
def bit_of(t, bits, of_word):
    """Where in a word, or byte, code t begins: bytes hold codes of 4 bits for tokens of either half of a page."""
    return 8 * (t % of_word) + 4 * (t // of_word)


@triton.constexpr_function
def worth(t, bits, of_word):
    """How often a code goes into what `as_number` adds to 1."""
    return float(2 ** (23 - place_in_mantissa(bit_of(t, bits, of_word), bits)))


@triton.jit
def as_number(words, one, t: tl.constexpr, BITS: tl.constexpr, OF_WORD: tl.constexpr):
    """1 and code t of a word over `worth`, as a float."""
    BIT: tl.constexpr = bit_of(t, BITS, OF_WORD)
    PLACE: tl.constexpr = place_in_mantissa(BIT, BITS)
    if PLACE > BIT:
        words = words << (PLACE - BIT)
    elif PLACE < BIT:
        words = words >> (BIT - PLACE)
    return ((words & (2**BITS - 1 << PLACE)) | one).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["pages", "parts", "one"])
def score_tokens(
    Q, DIMS, COLUMNS, LEAST, LARGEST, TABLE, REQUEST, LENGTHS, SCORES, TOTAL, LSE, SAMPLE, of_page, of_head,
    table_row, pages, parts, one,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BITS: tl.constexpr, PAGES: tl.constexpr, WORDS: tl.constexpr, OF_WORD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # who am I
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()  # for queries' parts
    h = tl.program_id(0) % HEADS
    part = tl.program_id(0) // HEADS % parts
    row = (tl.program_id(0) // HEADS // parts).to(tl.int64)
    r = row
    if REQUEST is not None:
        r = tl.load(REQUEST + row).to(tl.int64)
    length = tl.load(LENGTHS + row)
    n = part * PAGES + tl.arange(0, PAGES)
    there = n * PAGE < length
    page = tl.load(TABLE + r * table_row + n, mask=there, other=0).to(tl.int64)

    # one dimension after another, some heads at a time: a thread has some tokens, one after another, of a page
    of_row = row * HEADS + h
    each: tl.constexpr = PAGE * BITS // 8 // OF_WORD  # words of a column
    word = tl.arange(0, WORDS)
    inside = there[:, None] & (word < each)[None, :]
    ends = page * of_page + h.to(tl.int64) * of_head
    columns = ((page * HEADS + h) * DIM * each)[:, None] + word[None, :]
    columns = COLUMNS.to(tl.pointer_type(tl.int32)) + columns if OF_WORD == 4 else COLUMNS + columns
    tokens = pages.to(tl.int64) * PAGE
    runs = pages.to(tl.int64) * (8 // BITS)
    samples = tl.cdiv(tokens, EACH)
    totals = times(8 // BITS, tl.zeros([PAGES, WORDS * OF_WORD], tl.float32))
    for first in tl.static_range(0, GROUP, AT_ONCE):
        q = Q + (of_row * GROUP + first) * RANK
        base = times(GROUP - first if GROUP - first < AT_ONCE else AT_ONCE, tl.zeros([PAGES], tl.float32))
        weight = base
        if PAGES <= FEW:
            base, weight = of_pages(
                q, DIMS + of_row * RANK, LEAST + ends, LARGEST + ends, there, len(base), RANK, RANKS, BITS
            )
        sums, base, weight = over_dimensions(
            q, DIMS + of_row * RANK, columns, LEAST + ends, LARGEST + ends, base, weight, there, inside, one, RANK,
            each, BITS, OF_WORD,
        )  # fmt: skip
        for half in tl.static_range(8 // BITS):
            byte = tl.arange(0, WORDS * OF_WORD)
            token = n[:, None] * PAGE + half * (each * OF_WORD) + byte[None, :]
            # pages are written as a whole, which stores several tokens at once
            written = there[:, None] & (byte < each * OF_WORD)[None, :]
            more = tl.zeros([PAGES, WORDS * OF_WORD], tl.float32)
            for g in tl.static_range(len(base)):
                s = scores_of(sums, base[g], weight[g], g, len(base), half, BITS, OF_WORD)
                more += s
                at = of_row * GROUP + first + g
                tl.store(SCORES + at * tokens + token, s, mask=written)
                if (part * PAGES + PAGES) * PAGE > length or each != WORDS:
                    s = tl.where((token < length) & written, s, float("-inf"))
                tl.store(LSE + at * runs + n * (8 // BITS) + half, log_sum(s, 1), mask=there)
            if GROUP > 1:
                totals = with_part(totals, half, more)
                if first + AT_ONCE >= GROUP:
                    tl.store(TOTAL + of_row * tokens + token, totals[half], mask=written)
                    leave_sample(SAMPLE + of_row * samples, token, totals[half], written)
            else:
                leave_sample(SAMPLE + of_row * samples, token, more, written)


@triton.jit
def leave_sample(SAMPLE, token, total, written):
    """Writes one of EACH tokens, `problem.sample_of`."""
    token = token.to(tl.uint32)
    run = token // EACH
    tl.store(SAMPLE + run, total, mask=written & (((token ^ (run * STEP)) % EACH) == 0))


@triton.jit
def times(count: tl.constexpr, x):
    """A tuple of x so many times."""
    found = ()
    for _ in tl.static_range(count):
        found = found + (x,)  # noqa: RUF005 (unknown to Triton)
    return found


@triton.jit
def with_part(parts, n: tl.constexpr, more):
    """A tuple to whose n-th something is added."""
    found = ()
    for m in tl.static_range(len(parts)):
        found = found + (parts[m] + more if m == n else parts[m],)  # noqa: RUF005
    return found


@triton.jit
def steps(low, high, BITS: tl.constexpr):
    """What a code is worth."""
    return (high.to(tl.float32) - low) * (1.0 / (2**BITS - 1))


@triton.jit
def of_pages(
    q, dims, least, largest, there, SOME: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BITS: tl.constexpr
):
    """(sums of q times the least numbers, and of weights, [PAGES]), for some heads, as tuples"""
    i = tl.arange(0, RANKS)
    dim = tl.load(dims + i, mask=i < RANK, other=0)[None, :]
    inside = there[:, None] & (i < RANK)[None, :]
    low = tl.load(least[:, None] + dim, mask=inside, other=0.0).to(tl.float32)
    step = steps(low, tl.load(largest[:, None] + dim, mask=inside, other=0.0), BITS)
    base = ()
    weight = ()
    for g in tl.static_range(SOME):
        x = tl.load(q + g * RANK + i, mask=i < RANK, other=0.0)[None, :]
        base = base + (tl.sum(x * low, 1),)  # noqa: RUF005
        weight = weight + (tl.sum(x * step, 1),)  # noqa: RUF005
    return base, weight


@triton.jit
def over_dimensions(
    q, dims, columns, least, largest, base, weight, there, inside, one, RANK: tl.constexpr, each: tl.constexpr,
    BITS: tl.constexpr, OF_WORD: tl.constexpr,
):  # fmt: skip
    """(sums of weights times `as_number`, one code of all heads after the other, [PAGES, WORDS]; of q times the least
    numbers; and of weights, [PAGES]), for some heads, as tuples. Of few pages the last two are given: in the loop their
    ends would be loaded for these once more.
    """
    SOME: tl.constexpr = len(base)
    sums = times(OF_WORD * 8 // BITS * SOME, tl.zeros([inside.shape[0], inside.shape[1]], tl.float32))
    for i in tl.range(RANK, loop_unroll_factor=BITS):  # eight dimensions at once of 4 bits: too many registers
        dim = tl.load(dims + i)
        words = tl.load(columns + dim * each, mask=inside, other=0).to(tl.int32)
        low = tl.load(least + dim, mask=there, other=0.0).to(tl.float32)
        step = steps(low, tl.load(largest + dim, mask=there, other=0.0), BITS)
        weights = ()
        of_least = ()
        of_weight = ()
        for g in tl.static_range(SOME):
            x = tl.load(q + g * RANK + i)
            weights = weights + (x * step,)  # noqa: RUF005
            of_least = of_least + (base[g] + x * low,)  # noqa: RUF005
            of_weight = of_weight + (weight[g] + x * step,)  # noqa: RUF005
        found = ()
        for t in tl.static_range(OF_WORD * 8 // BITS):
            number = as_number(words, one, t, BITS, OF_WORD)
            for g in tl.static_range(SOME):
                found = found + (sums[t * SOME + g] + weights[g][:, None] * number,)  # noqa: RUF005
        sums = found
        if there.shape[0] > FEW:
            base, weight = of_least, of_weight
    return sums, base, weight


@triton.jit
def scores_of(
    sums, base, weight, g: tl.constexpr, SOME: tl.constexpr, half: tl.constexpr, BITS: tl.constexpr,
    OF_WORD: tl.constexpr,
):  # fmt: skip
    """Those of head g for the tokens of one half of the codes of words  # [PAGES, BLOCK]"""
    if OF_WORD == 4:
        a = score_of(sums[4 * half * SOME + g], base, weight, 4 * half, BITS, OF_WORD)
        b = score_of(sums[(4 * half + 1) * SOME + g], base, weight, 4 * half + 1, BITS, OF_WORD)
        c = score_of(sums[(4 * half + 2) * SOME + g], base, weight, 4 * half + 2, BITS, OF_WORD)
        d = score_of(sums[(4 * half + 3) * SOME + g], base, weight, 4 * half + 3, BITS, OF_WORD)
        return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4 * a.shape[1])
    else:
        return score_of(sums[half * SOME + g], base, weight, half, BITS, OF_WORD)


@triton.jit
def score_of(total, base, weight, t: tl.constexpr, BITS: tl.constexpr, OF_WORD: tl.constexpr):
    """Those of a head for code t of words  # [PAGES, WORDS]"""
    return base[:, None] + (total - weight[:, None]) * worth(t, BITS, OF_WORD)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    q, dims = call.q.contiguous(), call.dims.contiguous()
    tensors = (
        q, dims, call.columns, call.least, call.largest, call.table, call.request, call.lengths, results["scores"],
        results["total"], results["lse"], results["sample"],
    )  # fmt: skip
    key = tensors_key(*(x for x in tensors if x is not None))
    key = None if key is None else (key, call.page_size)
    plan = _PLANS.get(key)
    if plan is None:
        rows, heads, group, rank = q.shape
        pages, size = call.table.shape[1], call.columns.shape[3]
        of_word = 4 if size % 4 == 0 and not call.columns.data_ptr() % 4 else 1
        words = triton.next_power_of_2(size // of_word)
        most = _BYTES // 2 if call.bits == 8 and group > 1 else _BYTES
        some = max(1, min(most // (words * of_word), triton.next_power_of_2(max(1, pages))))
        parts = -(-pages // some)
        codes = some * words * of_word * 8 // call.bits
        each = min(4 * of_word, _SUMS // min(group, _AT_ONCE))  # tokens of a thread
        warps = min(8, max(1, codes // (32 * each)))
        strides = (*call.least.stride()[:2], call.table.stride(0))
        constants: tuple[int, ...] = (heads, group, rank, triton.next_power_of_2(rank), call.least.shape[2])
        early = early_for(q.device)
        constants += (call.page_size, call.bits, some, words, of_word, early)
        plan = Plan(
            score_tokens, rows * heads * parts, strides, (pages, parts, _ONE), constants, warps, 1, early=early > 0
        )
        plan = _PLANS.put(key, plan)
    with on_device(q):
        plan.launch(tensors, ())
