"""Summaries of pages on a GPU: a program has a page of one head, some of its tokens at a time; once its ends are known,
columns are made of keys that it reads again.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.page_summaries.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key

_ELEMENTS = 4096  # of a step
_EACH = 32  # elements of a thread
_PLANS = Plans()


@triton.jit
def request_of(slot, CU, batch, PAGE: tl.constexpr):
    """The request that a slot belongs to, found by halving: request r has those from CU[r] // PAGE + 2 r on."""
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(CU + middle) // PAGE + 2 * middle <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["batch"])
def summarize(
    K, V, TABLE, SEQLENS, CU, FOUND, LEAST, LARGEST, K_MEAN, V_MEAN, COLUMNS, k_page, k_token, k_head, v_page, v_token,
    v_head, table_row, batch,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, STEP: tl.constexpr,
    BLOCK_D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    # who am I
    h = tl.program_id(0) % HEADS
    slot = tl.program_id(0) // HEADS
    r = request_of(slot, CU, batch, PAGE)
    start = tl.load(CU + r)
    count = tl.load(CU + r + 1) - start
    length = tl.load(SEQLENS + r)
    n = tl.maximum(length - count, 0) // PAGE + slot - (start // PAGE + 2 * r)
    there = (count > 0) & (n * PAGE < length)
    page = tl.load(TABLE + r.to(tl.int64) * table_row + n, mask=there, other=0).to(tl.int64)
    tokens = tl.where(there, tl.minimum(PAGE, length - n * PAGE), 0)

    # main loop
    d = tl.arange(0, BLOCK_D)
    offs = tl.arange(0, STEP)
    least = tl.full([BLOCK_D], float("inf"), tl.float32)
    largest = tl.full([BLOCK_D], float("-inf"), tl.float32)
    strange = tl.zeros([BLOCK_D], tl.int32)  # a maximum on a GPU leaves out NaN
    k_total = tl.zeros([BLOCK_D], tl.float32)
    v_total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, PAGE, STEP):
        row = first + offs
        inside = (row < tokens)[:, None] & (d < DIM)[None, :]
        at = page * k_page + h.to(tl.int64) * k_head + (row.to(tl.int64) * k_token)[:, None] + d[None, :]
        k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
        least = tl.minimum(least, tl.min(tl.where(inside, k, float("inf")), 0))
        largest = tl.maximum(largest, tl.max(tl.where(inside, k, float("-inf")), 0))
        strange = tl.maximum(strange, tl.max((k != k).to(tl.int32), 0))
        k_total += tl.sum(k, 0)
        inside = (row < tokens)[:, None] & (d < DIM_V)[None, :]
        at = page * v_page + h.to(tl.int64) * v_head + (row.to(tl.int64) * v_token)[:, None] + d[None, :]
        v_total += tl.sum(tl.load(V + at, mask=inside, other=0.0).to(tl.float32), 0)

    # epilogue: a slot that no page has holds 0
    least = tl.where(strange > 0, float("nan"), least)
    largest = tl.where(strange > 0, float("nan"), largest)
    share = 1.0 / tl.maximum(tokens, 1).to(tl.float32)
    at = (slot.to(tl.int64) * HEADS + h) * DIM + d
    dtype: tl.constexpr = LEAST.dtype.element_ty
    tl.store(LEAST + at, tl.where(there, least, 0.0).to(dtype), mask=d < DIM)
    tl.store(LARGEST + at, tl.where(there, largest, 0.0).to(dtype), mask=d < DIM)
    tl.store(K_MEAN + at, (k_total * share).to(dtype), mask=d < DIM)
    at = (slot.to(tl.int64) * HEADS + h) * DIM_V + d
    tl.store(V_MEAN + at, (v_total * share).to(dtype), mask=d < DIM_V)
    if BITS != 0:
        each: tl.constexpr = PAGE * BITS // 8  # bytes of a column
        most: tl.constexpr = 2**BITS - 1
        inv = tl.where(largest > least, most / (largest - least), 0.0)
        for first in range(0, each, STEP):
            place = first + offs
            codes = tl.zeros([STEP, BLOCK_D], tl.int32)
            for part in tl.static_range(PAGE // each):
                row = place + part * each
                inside = ((place < each) & (row < tokens))[:, None] & (d < DIM)[None, :]
                source = page * k_page + h.to(tl.int64) * k_head + (row.to(tl.int64) * k_token)[:, None] + d[None, :]
                k = tl.load(K + source, mask=inside, other=0.0).to(tl.float32)
                code = tl.where(inside, tl.floor((k - least[None, :]) * inv[None, :] + 0.5), 0.0)
                codes |= tl.minimum(tl.maximum(code, 0.0), most).to(tl.int32) << (part * BITS)
            target = ((slot.to(tl.int64) * HEADS + h) * DIM + d)[None, :] * each + place[:, None]
            tl.store(COLUMNS + target, codes.to(tl.uint8), mask=(place < each)[:, None] & (d < DIM)[None, :])
    if h == 0:
        tl.store(FOUND + slot, tl.where(there, page, -1).to(tl.int32))


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills page, and what stands in the slots of pages; other slots hold 0."""
    tensors = (call.k, call.v, call.table, call.seqlens, call.cu_seqlens_q, *results.values())
    key = tensors_key(*tensors)
    tensors = (*tensors, *([] if call.bits else [None]))
    plan = _PLANS.get(key)
    if plan is None:
        _, page, heads, dim = call.k.shape
        dim_v = call.v.shape[3]
        block_d = max(16, triton.next_power_of_2(max(dim, dim_v)))
        step = min(triton.next_power_of_2(page), max(1, _ELEMENTS // block_d))
        warps = min(8, max(1, step * block_d // (32 * _EACH)))
        strides = (*call.k.stride()[:3], *call.v.stride()[:3], call.table.stride(0))
        constants = (heads, page, dim, dim_v, step, block_d, call.bits)
        plan = Plan(summarize, call.slots * heads, strides, (call.table.shape[0],), constants, warps, 1)
        plan = _PLANS.put(key, plan)
    with on_device(call.k):
        plan.launch(tensors, ())
