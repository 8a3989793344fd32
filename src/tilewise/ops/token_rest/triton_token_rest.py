"""What stands for the rest on a GPU: a program of some queries of a row and head of keys puts together what tiles and
parts have, and adds it to their results.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.token_rest.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.early import early_for
from tilewise.tiles.log_sum import log_sum

_LOGS = 8192  # log-sum-exps at once, of all queries of a program
_NUMBERS = 4096  # of results that a program has
_VALUES = 8192  # of sums of values at once
_PLANS = Plans()


@triton.jit
def log_sum_of(LOGS, first, count, inside, SOME: tl.constexpr):
    """The log-sum-exp of `count` numbers each, those of a query from `first` on  # [QUERIES]"""
    n = tl.arange(0, SOME)
    of_query = LOGS + (first * count)[:, None] + n[None, :]
    total = log_sum(tl.load(of_query, mask=inside[:, None] & (n < count)[None, :], other=float("-inf")), 1)
    for start in range(SOME, count, SOME):
        there = inside[:, None] & (start + n < count)[None, :]
        more = log_sum(tl.load(of_query + start, mask=there, other=float("-inf")), 1)
        total = log_sum(tl.join(total, more), 1)
    return total


@triton.jit(do_not_specialize=["tiles", "parts", "width"])
def add_rest(
    O, LSE, READ, SEEN, VALUES, LENGTHS, LAST, TO, TO_LSE, o_row, o_head, tiles, parts, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr, SOME: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # who am I
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()  # for attention over what is read
    OF_HEAD: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    at = (tl.program_id(0) // OF_HEAD).to(tl.int64)
    row = at // HEADS
    g = tl.program_id(0) % OF_HEAD * QUERIES + tl.arange(0, QUERIES)
    inside = g < GROUP
    length = tl.load(LENGTHS + row)
    d = tl.arange(0, BLOCK_D)
    both = inside[:, None] & (d < DIM)[None, :]
    o = tl.load(O + row * o_row + (at % HEADS * GROUP + g)[:, None] * o_head + d[None, :], mask=both, other=0.0)
    lse = tl.load(LSE + at * GROUP + g, mask=inside, other=float("-inf"))

    # how much more all weighs than what is read, and the mean of all values
    seen = log_sum_of(SEEN, at * GROUP + g, parts, inside, PARTS)
    more = seen - log_sum_of(READ, at * GROUP + g, tiles, inside, TILES)
    total = tl.zeros([SOME, BLOCK_D], tl.float32)
    for start in range(0, parts, SOME):
        some = start + tl.arange(0, SOME)
        of_parts = VALUES + (at * parts + some)[:, None] * DIM + d[None, :]
        total += tl.load(of_parts, mask=(some < parts)[:, None] & (d < DIM)[None, :], other=0.0)
    total = tl.sum(total, 0)
    if LAST is not None:
        total += tl.load(LAST + at * DIM + d, mask=d < DIM, other=0.0)
    mean = total / tl.maximum(length, 1)

    # epilogue
    added = (more > 0.0) & (lse > float("-inf")) & (length > width)
    share = tl.exp(-more)[:, None]
    found = tl.where(added[:, None], share * o.to(tl.float32) + (1.0 - share) * mean[None, :], o.to(tl.float32))
    tl.store(TO + (at * GROUP + g)[:, None] * DIM + d[None, :], found.to(TO.dtype.element_ty), mask=both)
    tl.store(TO_LSE + at * GROUP + g, tl.where(added, lse + more, lse), mask=inside)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    o = call.o if call.o.stride(-1) == 1 else call.o.contiguous()
    lse, last = call.lse.contiguous(), None if call.last is None else call.last.contiguous()
    tensors = (o, lse, call.read, call.seen, call.values, call.lengths, last, results["o"], results["lse"])
    key = tensors_key(*(x for x in tensors if x is not None))
    key = None if key is None else (key, call.width, last is None)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(call, o))
    with on_device(o):
        plan.launch(tensors, ())


def _plan(call: Call, o: torch.Tensor) -> Plan:
    (rows, heads, group, tiles), (parts, dim) = call.read.shape, call.values.shape[2:]
    block_d = triton.next_power_of_2(max(16, dim))
    queries = min(triton.next_power_of_2(group), max(1, _NUMBERS // block_d))
    logs = (min(triton.next_power_of_2(max(1, n)), max(1, _LOGS // queries)) for n in (tiles, parts))
    some = min(triton.next_power_of_2(max(1, parts)), max(1, _VALUES // block_d))
    early = early_for(o.device)
    constants = (heads, group, queries, dim, *logs, some, block_d, early)
    grid = rows * heads * -(-group // queries)
    return Plan(add_rest, grid, tuple(o.stride()[:2]), (tiles, parts, call.width), constants, 4, 1, early=early > 0)
