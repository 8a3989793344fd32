"""Tiles taken on a GPU: a program holds a row of scores, and finds the least score that it takes bit by bit.

Floats become integers of the same order. The largest integer such that what is at or above it is still enough is found
from its highest bit down, a sum over the row each, until one key is left that has the bits so far; no row is sorted.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.select.problem import SLACK, Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.early import begin_early, early_for

SHARE = tl.constexpr(SLACK)
AT_ONCE = tl.constexpr(4)  # bits between looks whether one key is left
_EACH = 32  # elements of a thread: a row in one warp is summed without waiting for others
_PLANS = Plans()


@triton.jit
def ordered(s):
    """Integers without sign in the order of finite floats, 0 below them all."""
    s = tl.where(s == 0.0, 0.0, s)  # both zeros are equal
    bits = s.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit(do_not_specialize=["rows"])
def take_tiles(
    SCORES, CLASSES, SIMILAR_Q, SIMILAR_K, LEAST, AMOUNT, KEPT, classes_b, classes_h, rows, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)

    # who am I
    m = tl.program_id(0) % rows
    h = tl.program_id(0) // rows % HEADS
    b = (tl.program_id(0) // rows // HEADS).to(tl.int64)
    row = (b * HEADS + h) * rows + m
    n = tl.arange(0, BLOCK)
    inside = n < tiles

    # prologue: what the row sees, and which of it is judged by scores
    least = tl.load(LEAST + h)
    amount = tl.load(AMOUNT + h)
    classes = CLASSES + b * classes_b + h.to(tl.int64) * classes_h + m.to(tl.int64) * tiles
    seen = (tl.load(classes + n, mask=inside, other=0) != 0) & inside
    judged = seen
    if SIMILAR_K is not None:
        alike = SIMILAR_K + (b * (HEADS // GROUP) + h // GROUP) * tiles
        judged = judged & (tl.load(alike + n, mask=inside, other=0.0) > least)
    s = tl.load(SCORES + row * tiles + n, mask=judged, other=float("-inf"))
    strange = tl.max((judged & ((s != s) | (s == float("inf")))).to(tl.int32), 0) > 0
    if SIMILAR_Q is not None:
        strange = strange | ((tl.load(SIMILAR_Q + row) > least) == 0)

    # weights, and how much is enough
    s = tl.where(s == s, s, 0.0)
    top = tl.max(s, 0)
    weight = tl.where(judged, tl.math.exp2((s - tl.where(top == float("-inf"), 0.0, top)) * LOG2E), 0.0)
    total = tl.sum(weight, 0)
    if KIND == "mass":
        enough = tl.where((amount >= 1.0) | (total == 0.0), float("inf"), amount * total)
    elif KIND == "weight":
        floor = amount * total
        enough = 1.0
    elif KIND == "share":
        enough = tl.math.ceil(amount.to(tl.float64) * SHARE * tl.sum(seen.to(tl.int32), 0)).to(tl.float32)
    else:
        enough = amount
    each = weight if KIND == "mass" else judged.to(tl.float32)

    # the least key that is taken: the largest at and above which there is enough
    key = tl.where(judged, ordered(s), 0)
    last = tl.full([], 0, tl.uint32)
    bit = 32
    undecided = 2
    while undecided > 1:
        for _ in tl.static_range(AT_ONCE):
            bit -= 1
            higher = last | (tl.full([], 1, tl.uint32) << bit)
            last = tl.where(tl.sum(tl.where(key >= higher, each, 0.0), 0) >= enough, higher, last)
        near = judged & ((key >> bit) == (last >> bit))
        undecided = tl.where(bit == 0, 0, tl.sum(near.to(tl.int32), 0))
    last = tl.max(tl.where(judged & ((key >> bit) == (last >> bit)), key, last), 0)  # the only one, or all are equal

    # of those with this key, the first ones that are needed, at least one of all
    above = judged & (key > last)
    ties = judged & (key == last)
    before = tl.sum(tl.where(above, each, 0.0), 0) + tl.cumsum(tl.where(ties, each, 0.0), 0) - each
    taken = above | (ties & (before < enough))
    if KIND == "weight":
        taken = taken | (judged & (weight >= floor))
    kept = tl.where(strange, seen, taken | (seen & (judged == 0)))
    tl.store(KEPT + row * tiles + n, kept.to(tl.int8), mask=inside)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills kept."""
    scores, classes, kept = call.scores.contiguous(), call.classes, results["kept"]
    if classes.stride()[2:] != (classes.shape[3], 1):
        classes = classes.contiguous()
    similar = [None if x is None else x.contiguous() for x in (call.similar_q, call.similar_k)]
    tensors = (scores, classes, *(x for x in similar if x is not None), call.least, call.amount, kept)
    key = tensors_key(*tensors)
    key = None if key is None else (key, call.kind)
    plan = _PLANS.get(key)
    if plan is None:
        batch, heads, rows, tiles = scores.shape
        strides = tuple(
            0 if size == 1 else stride for size, stride in zip(classes.shape[:2], classes.stride()[:2], strict=True)
        )
        block = max(16, triton.next_power_of_2(tiles))
        warps = min(16, max(1, block // (32 * _EACH)))
        early = early_for(scores.device)
        constants, grid = (heads, call.group, call.kind, block, early), batch * heads * rows
        plan = Plan(take_tiles, grid, strides, (rows, tiles), constants, warps, 1, early=early > 0)
        _PLANS.put(key, plan)
    with on_device(scores):
        plan.launch((scores, classes, *similar, call.least, call.amount, kept.view(torch.int8)), ())
