"""Scores of tokens by columns of their keys on a GPU: a program has some pages of a row's request, of one head."""

import torch
import triton
import triton.language as tl

from tilewise.ops.token_scores.problem import FORCED, Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key

_TOKENS = 2048  # of a program
_EACH = 8  # tokens of a thread
_PLANS = Plans()
LARGE = tl.constexpr(FORCED)


@triton.jit(do_not_specialize=["pages", "parts", "local"])
def score_tokens(
    Q, DIMS, COLUMNS, LEAST, LARGEST, TABLE, REQUEST, LENGTHS, SCORES, TOTAL, LSE, of_page, of_head, table_row, pages,
    parts, local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # who am I
    part = tl.program_id(0) % parts
    h = tl.program_id(0) // parts % HEADS
    row = (tl.program_id(0) // parts // HEADS).to(tl.int64)
    r = row
    if REQUEST is not None:
        r = tl.load(REQUEST + row).to(tl.int64)
    length = tl.load(LENGTHS + row)
    n = part * PAGES + tl.arange(0, PAGES)
    there = n * PAGE < length
    page = tl.load(TABLE + r * table_row + n, mask=there, other=0).to(tl.int64)

    # one dimension after another, four heads at a time: a thread has some tokens, one after another, of a page
    each: tl.constexpr = PAGE * BITS // 8  # bytes of a column, which hold its tokens part by part
    byte = tl.arange(0, BLOCK)
    inside = there[:, None] & (byte < each)[None, :]
    of_row = row * HEADS + h
    ends = page * of_page + h.to(tl.int64) * of_head
    columns = ((page * HEADS + h) * DIM * each)[:, None] + byte[None, :]
    tokens = pages.to(tl.int64) * PAGE
    runs = pages.to(tl.int64) * (8 // BITS)
    for half in tl.static_range(8 // BITS):
        token = n[:, None] * PAGE + half * each + byte[None, :]
        seen = (token < length) & (byte < each)[None, :]
        stored = (n < pages)[:, None] & (byte < each)[None, :]
        total = tl.zeros([PAGES, BLOCK], tl.float32)
        for g in tl.static_range(0, GROUP, 4):
            s0 = tl.zeros([PAGES, BLOCK], tl.float32)
            s1, s2, s3 = s0, s0, s0
            q = Q + (of_row * GROUP + g) * RANK
            for i in tl.range(RANK, loop_unroll_factor=8):
                k = keys_of(
                    tl.load(DIMS + of_row * RANK + i), LEAST + ends, LARGEST + ends, COLUMNS + columns, there, inside,
                    half, each, BITS,
                )  # fmt: skip
                s0 += tl.load(q + i) * k
                if g + 1 < GROUP:
                    s1 += tl.load(q + RANK + i) * k
                if g + 2 < GROUP:
                    s2 += tl.load(q + 2 * RANK + i) * k
                if g + 3 < GROUP:
                    s3 += tl.load(q + 3 * RANK + i) * k
            at = SCORES + (of_row * GROUP + g) * tokens + token
            of_run = LSE + (of_row * GROUP + g) * runs + n * (8 // BITS) + half
            total += put(at, of_run, s0, seen, stored, n < pages)
            if g + 1 < GROUP:
                total += put(at + tokens, of_run + runs, s1, seen, stored, n < pages)
            if g + 2 < GROUP:
                total += put(at + 2 * tokens, of_run + 2 * runs, s2, seen, stored, n < pages)
            if g + 3 < GROUP:
                total += put(at + 3 * tokens, of_run + 3 * runs, s3, seen, stored, n < pages)

        # epilogue
        total = tl.where(tl.abs(total) < float("inf"), total, LARGE)
        total = tl.where(token >= length - local, LARGE, total)
        tl.store(TOTAL + of_row * tokens + token, tl.where(seen, total, float("-inf")), mask=stored)


@triton.jit
def keys_of(dim, LEAST, LARGEST, COLUMNS, there, inside, half: tl.constexpr, each: tl.constexpr, BITS: tl.constexpr):
    """The numbers that codes of one dimension stand for, [PAGES, BLOCK]."""
    most: tl.constexpr = 2**BITS - 1
    least = tl.load(LEAST + dim, mask=there, other=0.0).to(tl.float32)
    scale = (tl.load(LARGEST + dim, mask=there, other=0.0).to(tl.float32) - least) * (1.0 / most)
    code = tl.load(COLUMNS + dim * each, mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (4 * half)) & most
    # 2**23 + code, written as a float: a conversion takes four times as long
    number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return least[:, None] + number * scale[:, None]


@triton.jit
def put(at, of_run, s, seen, stored, there):
    """Write a head's scores, and the log-sum-exp of those of each page, and give the scores back  # [PAGES, BLOCK]"""
    score = tl.where(seen, s, float("-inf"))
    tl.store(at, score, mask=stored)
    top = tl.max(score, 1)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(of_run, top + tl.log(tl.sum(tl.exp(score - top[:, None]), 1)), mask=there)
    return s


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    q, dims = call.q.contiguous(), call.dims.contiguous()
    tensors = (
        q, dims, call.columns, call.least, call.largest, call.table, call.request, call.lengths, results["scores"],
        results["total"], results["lse"],
    )  # fmt: skip
    key = tensors_key(*(x for x in tensors if x is not None))
    key = None if key is None else (key, call.page_size, call.local)
    plan = _PLANS.get(key)
    if plan is None:
        rows, heads, group, rank = q.shape
        pages = call.table.shape[1]
        block = triton.next_power_of_2(call.page_size * call.bits // 8)
        some = max(1, min(_TOKENS // block, triton.next_power_of_2(max(1, pages))))
        parts = -(-pages // some)
        warps = min(8, max(1, some * block // (32 * _EACH)))
        strides = (*call.least.stride()[:2], call.table.stride(0))
        constants = (heads, group, rank, call.least.shape[2], call.page_size, call.bits, some, block)
        plan = Plan(score_tokens, rows * heads * parts, strides, (pages, parts, call.local), constants, warps, 1)
        plan = _PLANS.put(key, plan)
    with on_device(q):
        plan.launch(tensors, ())
