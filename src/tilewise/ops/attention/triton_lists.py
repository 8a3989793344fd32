"""Tile lists on the device: which tiles of the other side each tile visits, from the mask's interval bounds, without
a host sync.
"""

import triton
import triton.language as tl

from tilewise.tiles.visit import locate


@triton.jit(do_not_specialize=["size", "blocks"])
def block_extrema(X, LOW, HIGH, size, blocks, BLOCK: tl.constexpr):
    """Smallest and largest of each run of BLOCK elements along the last dimension of a contiguous tensor; NaN of a run
    that holds one.
    """
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    offs = tl.minimum((pid % blocks) * BLOCK + tl.arange(0, BLOCK), size - 1)
    x = tl.load(X + row * size + offs)
    low = tl.min(x, 0)
    high = tl.max(x, 0)
    if x.dtype.is_floating():
        undefined = tl.max((x != x).to(tl.int32), 0) > 0
        low = tl.where(undefined, float("nan"), low)
        high = tl.where(undefined, float("nan"), high)
    tl.store(LOW + pid, low)
    tl.store(HIGH + pid, high)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "slots", "width", "nums"])
def tile_lists(
    LISTED, CU_Q, CU_K, args, nums, width, batch, seqlen_q, seqlen_k, slots,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    CLASSIFY: tl.constexpr, PACKED: tl.constexpr, FOR_KEYS: tl.constexpr,
):  # fmt: skip
    """One program per row: a tile of queries lists its tiles of keys, or with FOR_KEYS a tile of keys its tiles of
    queries. A row is laid out as `tiles.visit.visit` says, and has one more number behind the tiles that are not FULL:
    the row whose turn it is when this one's comes. The first keys and the last queries have the first turn.

    Rows are (batch, head, slot), or (head, slot) when packed; a tile that reaches beyond the other side's end is
    PARTIAL.
    """
    pid = tl.program_id(0)
    slot = pid % slots
    h = (pid // slots) % HEADS
    b = pid // slots // HEADS
    listed = LISTED + pid.to(tl.int64) * width
    tile = slot
    if PACKED:
        if FOR_KEYS:
            b, tile = locate(slot, CU_K, batch, BLOCK_N)
        else:
            b, tile = locate(slot, CU_Q, batch, BLOCK_M)
        seqlen_q = tl.load(CU_Q + b + 1) - tl.load(CU_Q + b)
        seqlen_k = tl.load(CU_K + b + 1) - tl.load(CU_K + b)
    shift = seqlen_k - seqlen_q
    if FOR_KEYS:
        others = (seqlen_q + BLOCK_M - 1) // BLOCK_M
        mine = tile * BLOCK_N < seqlen_k
    else:
        others = (seqlen_k + BLOCK_N - 1) // BLOCK_N
        mine = tile * BLOCK_M < seqlen_q
    others = tl.where(mine, others, 0)
    block_i = tl.full([], BLOCK_M, tl.int64)
    block_j = tl.full([], BLOCK_N, tl.int64)
    num_partial = 0
    num_full = 0
    for start in range(0, others, CHUNK):
        other = start + tl.arange(0, CHUNK)
        exists = other < others
        if FOR_KEYS:
            m = tl.where(exists, other, 0)
            n = tile
        else:
            m = tile
            n = tl.where(exists, other, 0)
        i0 = (m * BLOCK_M).to(tl.int64) + shift
        i1 = tl.minimum(m * BLOCK_M + BLOCK_M, seqlen_q).to(tl.int64) - 1 + shift
        j0 = (n * BLOCK_N).to(tl.int64)
        j1 = tl.minimum(n * BLOCK_N + BLOCK_N, seqlen_k).to(tl.int64) - 1
        sure, maybe = CLASSIFY(b, h, i0, i1, j0, j1, block_i, block_j, args, nums)
        whole = m * BLOCK_M + BLOCK_M <= seqlen_q if FOR_KEYS else n * BLOCK_N + BLOCK_N <= seqlen_k
        visited = exists & maybe
        full = visited & sure & whole
        partial = visited & (full == 0)
        full_at = num_full + tl.cumsum(full.to(tl.int32), 0) - 1
        partial_at = num_partial + tl.cumsum(partial.to(tl.int32), 0) - 1
        tl.store(listed + width - 1 - full_at, other, mask=full)
        tl.store(listed + 2 + partial_at, other, mask=partial)
        num_full += tl.sum(full.to(tl.int32), 0)
        num_partial += tl.sum(partial.to(tl.int32), 0)
    tl.store(listed, num_partial)
    tl.store(listed + 1, num_full)
    tl.store(listed + 2 + num_partial, slot if FOR_KEYS else slots - 1 - slot)


@triton.jit(do_not_specialize=["width", "slots"])
def sort_lists(LISTED, width, slots, SLOTS: tl.constexpr, SOME: tl.constexpr):
    """One program for the rows of a batch element and head, SLOTS at the most: the rows that visit most have the first
    turn, and those that visit as many go in order.
    """
    listed = LISTED + tl.program_id(0).to(tl.int64) * slots * width
    row = tl.arange(0, SLOTS)
    there = row < slots
    visits = tl.load(listed + row * width, mask=there, other=0)
    visits += tl.load(listed + row * width + 1, mask=there, other=0)
    turn = tl.zeros([SLOTS], tl.int32)
    for start in range(0, slots, SOME):
        other = start + tl.arange(0, SOME)
        exists = other < slots
        theirs = tl.load(listed + other * width, mask=exists, other=-1)
        theirs += tl.load(listed + other * width + 1, mask=exists, other=0)
        alike = (theirs[None, :] == visits[:, None]) & (other[None, :] < row[:, None])
        before = (theirs[None, :] > visits[:, None]) | alike
        turn += tl.sum(before.to(tl.int32), 1)
    place = turn * width + 2 + tl.load(listed + turn * width, mask=there, other=0)
    tl.store(listed + place, row, mask=there)
