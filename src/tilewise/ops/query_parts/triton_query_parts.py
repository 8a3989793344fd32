"""Queries' largest dimensions on a GPU: a program of a row and head of keys holds its queries."""

import torch
import triton
import triton.language as tl

from tilewise.ops.query_parts.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.early import early_for
from tilewise.tiles.largest import least_of

_PLANS = Plans()


@triton.jit(do_not_specialize=["scale"])
def part_queries(
    Q, DIMS, PARTS, q_row, q_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # who am I
    if EARLY > 0:
        tl.extra.cuda.gdc_launch_dependents()  # scores, which wait for this kernel's end
    at = tl.program_id(0).to(tl.int64)
    h = at % HEADS
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = Q + at // HEADS * q_row + (h * GROUP + g)[:, None] * q_head + d[None, :]
    q = tl.load(q, mask=inside, other=0.0).to(tl.float32)

    # the dimensions, of equal ones the first
    size = tl.abs(q)
    total = tl.sum(size, 0)
    total = tl.where(total < float("inf"), total, float("inf"))
    key = total.to(tl.uint32, bitcast=True)  # numbers without sign are in the order of their bits
    last = least_of(key, d < DIM, RANK)
    above = (d < DIM) & (key > last)
    ties = (d < DIM) & (key == last)
    kept = above | (ties & (tl.sum(above.to(tl.int32), 0) + tl.cumsum(ties.to(tl.int32), 0) <= RANK))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1

    # epilogue
    taken = tl.sum(tl.where(kept[None, :], size, 0.0), 1)
    warmer = scale * tl.sqrt(tl.sum(size, 1) / tl.maximum(taken, 1e-30))
    tl.store(DIMS + at * RANK + place, d, mask=kept)
    to = PARTS + (at * GROUP + g)[:, None] * RANK + place[None, :]
    tl.store(to, q * warmer[:, None], mask=inside & kept[None, :])


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
    tensors = (q, results["dims"], results["parts"])
    key = tensors_key(*tensors)
    key = None if key is None else (key, call.heads, call.rank)
    plan = _PLANS.get(key)
    if plan is None:
        rows, _, dim = q.shape
        blocks = (triton.next_power_of_2(call.group), max(16, triton.next_power_of_2(dim)))
        constants = (call.heads, call.group, call.rank, dim, *blocks, early_for(q.device))
        plan = Plan(part_queries, rows * call.heads, tuple(q.stride()[:2]), (), constants, 1, 1)
        plan = _PLANS.put(key, plan)
    with on_device(q):
        plan.launch(tensors, (), (call.scale,))
