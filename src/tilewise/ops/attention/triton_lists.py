"""Tile lists on the device: which tiles of the other side each tile visits, from the mask's interval bounds, without
a host sync.
"""

import triton
import triton.language as tl

from tilewise.tiles.visit import call_once, locate

NOWHERE = tl.constexpr(2**30)  # beyond all positions


@triton.jit
def row_of(pid, CU_Q, CU_K, batch, seqlen_q, seqlen_k, slots, HEADS, BLOCK_M, BLOCK_N, PACKED, FOR_KEYS):
    """(batch element or sequence, head, slot, tile, its numbers of queries and of keys) of a row of lists."""
    slot = pid % slots
    h = (pid // slots) % HEADS
    b = pid // slots // HEADS
    tile = slot
    if PACKED:
        if FOR_KEYS:
            b, tile = locate(slot, CU_K, batch, BLOCK_N)
        else:
            b, tile = locate(slot, CU_Q, batch, BLOCK_M)
        seqlen_q = tl.load(CU_Q + b + 1) - tl.load(CU_Q + b)
        seqlen_k = tl.load(CU_K + b + 1) - tl.load(CU_K + b)
    return b, h, slot, tile, seqlen_q, seqlen_k


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

    Rows are (batch, head, slot), or (head, slot) when packed, and behind the last is a 0; a tile that reaches beyond
    the other side's end is PARTIAL.
    """
    pid = tl.program_id(0)
    b, h, slot, tile, seqlen_q, seqlen_k = row_of(
        pid, CU_Q, CU_K, batch, seqlen_q, seqlen_k, slots, HEADS, BLOCK_M, BLOCK_N, PACKED, FOR_KEYS
    )
    listed = LISTED + pid.to(tl.int64) * width
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
    if pid == 0:
        tl.store(LISTED + tl.num_programs(0).to(tl.int64) * width, 0)


@triton.jit
def sort_rows(listed, width, slots, SLOTS: tl.constexpr, SOME: tl.constexpr):
    """Of the rows of a batch element and head, SLOTS at the most, those that visit most have the first turn, and those
    that visit as many go in order.
    """
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


@triton.jit
def find_runs(
    listed, b, h, tile, args, nums, width, seqlen_q, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    FOR_KEYS: tl.constexpr,
):  # fmt: skip
    """Write behind the turn of a row whether the positions that each of its queries sees (or each of its keys is seen
    by) are one run, the first of each, the last, and for each 64 of them the first of all, the last of all, and how
    many of the first tiles, and of the last ones where no tile is FULL, none of them sees.
    """
    OWN: tl.constexpr = BLOCK_N if FOR_KEYS else BLOCK_M
    OTHER: tl.constexpr = BLOCK_M if FOR_KEYS else BLOCK_N
    num_partial = tl.load(listed)
    num_full = tl.load(listed + 1)
    shift = seqlen_k - seqlen_q
    low, size = (shift, seqlen_q) if FOR_KEYS else (0 * shift, seqlen_k)
    own = tile * OWN + tl.arange(0, OWN)
    own = tl.minimum(own, tl.maximum((seqlen_k if FOR_KEYS else seqlen_q) - 1, 0)) + (0 if FOR_KEYS else shift)
    once = call_once(b, h, own[:, None], args, nums, ONCE)
    first = tl.full([OWN], NOWHERE, tl.int32)
    last = tl.full([OWN], -1, tl.int32)
    count = tl.full([OWN], 0, tl.int32) + num_full * OTHER
    began = tl.zeros([OWN // 64], tl.int32)
    front = tl.zeros([OWN // 64], tl.int32)
    back = tl.zeros([OWN // 64], tl.int32)
    for t in range(num_partial):
        row = tl.load(listed + 2 + t) * OTHER + tl.arange(0, OTHER)
        other = tl.minimum(row, size - 1) + low
        if FOR_KEYS:
            seen = VISIBLE(b, h, other[None, :], own[:, None], once, args, nums)
        else:
            seen = VISIBLE(b, h, own[:, None], other[None, :], once, args, nums)
        seen = seen & (row < size)[None, :]
        first = tl.minimum(first, tl.min(tl.where(seen, other[None, :], NOWHERE), 1))
        last = tl.maximum(last, tl.max(tl.where(seen, other[None, :], -1), 1))
        seen = tl.sum(seen.to(tl.int32), 1)
        count += seen
        some = tl.max(seen.reshape(OWN // 64, 64), 1) > 0
        began = began | some.to(tl.int32)
        front += 1 - began
        back = tl.where(some, 0, back + 1)
    for start in range(0, num_full, CHUNK):
        at = start + tl.arange(0, CHUNK)
        full = tl.load(listed + width - 1 - at, mask=at < num_full, other=0)
        first = tl.minimum(first, tl.min(tl.where(at < num_full, full * OTHER + low, NOWHERE), 0))
        last = tl.maximum(last, tl.max(tl.where(at < num_full, full * OTHER + (OTHER - 1) + low, -1), 0))
    broken = (count > 0) & (last - first + 1 != count)
    behind = listed + 3 + tl.maximum(num_partial, 1 - num_full)  # who sees nothing visits one tile
    tl.store(behind, 1 - tl.max(broken.to(tl.int32), 0))
    tl.store(behind + 1 + tl.arange(0, OWN), first)
    tl.store(behind + 1 + OWN + tl.arange(0, OWN), last)
    of_part = behind + 1 + 2 * OWN + 4 * tl.arange(0, OWN // 64)
    tl.store(of_part, tl.min(first.reshape(OWN // 64, 64), 1))
    tl.store(of_part + 1, tl.max(last.reshape(OWN // 64, 64), 1))
    tl.store(of_part + 2, front)
    tl.store(of_part + 3, tl.where(num_full > 0, 0, back))


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "slots", "width", "sets", "nums"])
def finish_lists(
    LISTED, CU_Q, CU_K, args, nums, width, batch, seqlen_q, seqlen_k, slots, sets,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr,
    ONCE: tl.constexpr, VISIBLE: tl.constexpr, PACKED: tl.constexpr, FOR_KEYS: tl.constexpr,
):  # fmt: skip
    """What is known when all rows of `tile_lists` are: the first programs, `sets`, sort the rows of a batch element and
    head each, unless SLOTS is None; each of the others finds the runs of a row, unless VISIBLE is None.
    """
    pid = tl.program_id(0)
    if pid < sets:
        if SLOTS is not None:
            sort_rows(LISTED + pid.to(tl.int64) * slots * width, width, slots, SLOTS, CHUNK // 4)
    elif VISIBLE is not None:
        pid -= sets
        b, h, _slot, tile, seqlen_q, seqlen_k = row_of(
            pid, CU_Q, CU_K, batch, seqlen_q, seqlen_k, slots, HEADS, BLOCK_M, BLOCK_N, PACKED, FOR_KEYS
        )
        listed = LISTED + pid.to(tl.int64) * width
        find_runs(
            listed, b, h, tile, args, nums, width, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CHUNK, ONCE, VISIBLE, FOR_KEYS
        )
