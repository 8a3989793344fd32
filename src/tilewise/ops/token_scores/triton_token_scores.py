"""Scores of tokens by columns of their keys on a GPU: a program has some pages of a row's request, of one head."""

import torch
import triton
import triton.language as tl

from tilewise.ops.token_scores.problem import FORCED, Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key

_ELEMENTS = 8192  # codes of a program's pages
_EACH = 64  # elements of a thread
_PLANS = Plans()
LARGE = tl.constexpr(FORCED)


@triton.jit(do_not_specialize=["pages", "parts", "local"])
def score_tokens(
    Q, DIMS, COLUMNS, LEAST, LARGEST, TABLE, REQUEST, LENGTHS, SCORES, TOTAL, of_page, of_head, table_row, pages, parts,
    local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, PAGES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
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

    # keys of these dimensions  # [PAGES, BLOCK_R, BLOCK_T]
    each: tl.constexpr = PAGE * BITS // 8  # bytes of a column
    most: tl.constexpr = 2**BITS - 1
    rank = tl.arange(0, BLOCK_R)
    dims = tl.load(DIMS + (row * HEADS + h) * RANK + rank, mask=rank < RANK, other=0)
    page = tl.load(TABLE + r * table_row + n, mask=there, other=0).to(tl.int64)
    inside = there[:, None] & (rank < RANK)[None, :]
    at = (page * of_page + h.to(tl.int64) * of_head)[:, None] + dims[None, :]
    least = tl.load(LEAST + at, mask=inside, other=0.0).to(tl.float32)
    scale = (tl.load(LARGEST + at, mask=inside, other=0.0).to(tl.float32) - least) * (1.0 / most)
    place = tl.arange(0, BLOCK_T)
    byte = place % each
    at = ((page * HEADS + h)[:, None] * DIM + dims[None, :])[:, :, None] * each + byte[None, None, :]
    code = tl.load(COLUMNS + at, mask=inside[:, :, None] & (place < PAGE)[None, None, :], other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> ((place // each) * 4)[None, None, :]) & most
    k = least[:, :, None] + code.to(tl.float32) * scale[:, :, None]

    # products, each head's and their sum
    token = n[:, None] * PAGE + place[None, :]
    seen = (token < length) & (place < PAGE)[None, :]
    stored = (n < pages)[:, None] & (place < PAGE)[None, :]
    tokens = pages.to(tl.int64) * PAGE
    total = tl.zeros([PAGES, BLOCK_T], tl.float32)
    for g in tl.static_range(GROUP):
        q = tl.load(Q + ((row * HEADS + h) * GROUP + g) * RANK + rank, mask=rank < RANK, other=0.0)
        s = tl.sum(q[None, :, None] * k, 1)
        total += s
        at = ((row * HEADS + h) * GROUP + g) * tokens + token
        tl.store(SCORES + at, tl.where(seen, s, float("-inf")), mask=stored)

    # epilogue
    total = tl.where(tl.abs(total) < float("inf"), total, LARGE)
    total = tl.where(token >= length - local, LARGE, total)
    tl.store(TOTAL + (row * HEADS + h) * tokens + token, tl.where(seen, total, float("-inf")), mask=stored)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills scores and total."""
    q, dims = call.q.contiguous(), call.dims.contiguous()
    tensors = (
        q, dims, call.columns, call.least, call.largest, call.table, call.request, call.lengths, results["scores"],
        results["total"],
    )  # fmt: skip
    key = tensors_key(*(x for x in tensors if x is not None))
    key = None if key is None else (key, call.page_size, call.local)
    plan = _PLANS.get(key)
    if plan is None:
        rows, heads, group, rank = q.shape
        pages = call.table.shape[1]
        block_r, block_t = triton.next_power_of_2(rank), triton.next_power_of_2(call.page_size)
        some = max(1, min(_ELEMENTS // (block_r * block_t), triton.next_power_of_2(max(1, pages))))
        parts = -(-pages // some)
        warps = min(8, max(1, some * block_r * block_t // (32 * _EACH)))
        strides = (*call.least.stride()[:2], call.table.stride(0))
        constants = (
            heads, group, rank, call.least.shape[2], call.page_size, call.bits, some, block_r, block_t,
        )  # fmt: skip
        plan = Plan(score_tokens, rows * heads * parts, strides, (pages, parts, call.local), constants, warps, 1)
        plan = _PLANS.put(key, plan)
    with on_device(q):
        plan.launch(tensors, ())
