"""What goes before Hopper's backward, and float32 sums of dQ: how programs that own keys add to them, and how those
that are complete become dQ meanwhile.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.tiles.gluon_api import async_load, async_store, barrier, reinterpret
from tilewise.tiles.hopper import at_row, matrix, read_by_tma, sequence, take, wait_for_count
from tilewise.tiles.load import POINTER, load_rows, rows_of
from tilewise.tiles.visit import locate, visit_any

TAKEN = gl.constexpr(4)  # counts before those of heads: what two roles or kernels have taken, who came to meetings
CONVERTERS = gl.constexpr(2)  # warps
ROWS = gl.constexpr(128)  # of a share, which is one warpgroup's 64 x 64 of a tile of dQ, as the TMA sees the sums
COLUMNS = gl.constexpr(32)


@triton.jit(do_not_specialize=["batch", "rows_q", "slots", "places", "unit"])
def prepare(
    O, DO, LSE, DLSE, SHIFT, CENTRE, SUM, COUNTS, CU_Q, stride_ob, stride_os, stride_oh, stride_db, stride_ds,
    stride_dh, batch, rows_q, slots, places, unit,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What the scores and dP of each query begin with, -lse (times `unit`) and -delta, tile by tile, and what begins at
    0: sums of dQ, of the first heads only, which leave their places to others (`convert`), and what is counted: what
    has been taken, and for each head runs that have added to its sums, and tiles of them that are converted.
    """
    tl.extra.cuda.gdc_launch_dependents()
    h = tl.program_id(0) % HEADS  # heads of a row lie beside each other
    slot = tl.program_id(0) // HEADS % slots
    b = tl.program_id(0) // HEADS // slots
    head = b * HEADS + h
    tile = (head * slots + slot).to(tl.int64)
    m = slot
    row0 = b * 0
    seqlen_q = rows_q
    if PACKED:
        b, m = locate(slot, CU_Q, batch, BLOCK_M)
        row0 = tl.load(CU_Q + b)
        seqlen_q = tl.load(CU_Q + b + 1) - row0
    start = m * BLOCK_M
    offs = start + tl.arange(0, BLOCK_M)
    inside = offs < seqlen_q
    rows = (row0 + offs).to(tl.int64)
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    O_rows = rows_of(O, b, row0, h, seqlen_q, stride_ob, stride_os, stride_oh, HEAD_DIM_V, BLOCK_M, D, POINTER)
    DO_rows = rows_of(DO, b, row0, h, seqlen_q, stride_db, stride_ds, stride_dh, HEAD_DIM_V, BLOCK_M, D, POINTER)
    o = load_rows(O_rows, start, stride_os, inside, HEAD_DIM_V, BLOCK_M, D, True, POINTER)
    do = load_rows(DO_rows, start, stride_ds, inside, HEAD_DIM_V, BLOCK_M, D, True, POINTER)
    at = (h64 if PACKED else b64 * HEADS + h64) * rows_q + rows
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + at, mask=inside, other=0.0)
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(SHIFT + at, tl.where(lse == float("-inf"), 0.0, -lse * unit))
    tl.store(CENTRE + at, -delta)
    if SUM is not None:
        within = tl.arange(0, BLOCK_M * D)
        at = tile * (BLOCK_M * D) + within
        seen = (start + 0 * within < seqlen_q) & (head < places)  # packed sequences have tiles to spare
        tl.store(SUM + at, tl.zeros([BLOCK_M * D], tl.float32), mask=seen)
        if slot == 0:
            tl.store(COUNTS + TAKEN + 2 * head, 0)
            tl.store(COUNTS + TAKEN + 2 * head + 1, 0)
    if tl.program_id(0) == 0:
        for n in tl.static_range(TAKEN):
            tl.store(COUNTS + n, 0)


@gluon.jit
def head_of(run, fixed):
    """Which of all heads of the batch a run belongs to."""
    return run[1] if fixed.packed else run[0] * fixed.heads + run[1]


@gluon.jit
def tile_of_sums(tile, head, sums, grid):
    """Where the sums have a tile, by its number among the tiles of all heads."""
    places = sums[4]
    return tile - head // places * places * grid[0][3]


@gluon.jit
def runs_of(head, sums):
    """The count of a head's runs that have added to its sums."""
    return sums[3] + (TAKEN + 2 * head)


@gluon.jit
def converted_of(head, sums):
    """The count of a head's tiles that are converted."""
    return sums[3] + (TAKEN + 1 + 2 * head)


@gluon.jit
def place_is_free(run, sums, grid, fixed):
    """Whether the sums of the head that had the place of this run's are converted, and zeros again."""
    free = run[7] >= 0
    if fixed.sums:
        places = sums[4]
        head = head_of(run, fixed)
        if head >= places:
            free = gl.atomic_add(converted_of(head - places, sums), 0, sem="acquire") >= grid[0][3]
    return free


@gluon.jit
def wait_for_place(run, sums, grid, fixed):
    """Wait until a run's place is free.

    All items of the head that had it come before this run's in the order in which items are taken, and tiles to convert
    are taken in order of heads. So who has the first item that is not done waits at most for tiles whose runs are all
    counted, however many programs the GPU runs at a time.
    """
    if fixed.sums:
        places = sums[4]
        wait_for_count(converted_of(head_of(run, fixed) - places, sums), grid[0][3], 1)


@gluon.jit
def add_to_sums(dq, SUM, tile, C: gl.constexpr):
    """Add a share of dQ to the sums, which memory has warp by warp, each with eight columns at a time, and there of
    each thread four side by side: two rows, two columns.
    """
    FOURS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    fours = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([8, 128, 4])
    fours = gl.convert_layout(fours, FOURS, assert_trivial=True)
    eight = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, FOURS)))[:, None, None]
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, FOURS)))[None, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, FOURS)))[None, None, :]
    share = SUM + (tile * 2 + C).to(gl.int64) * (ROWS * COLUMNS)
    gl.atomic_add(share + (thread // 32 * 1024 + eight * 128 + thread % 32 * 4 + four), fours, sem="relaxed")


@gluon.jit
def order_of(run, g, first_sums, length, sums, grid, fixed, KEYS: gl.constexpr):
    """How a run's additions are ordered, where they are: (how far the run of the next keys is, number of a tile of sums
    from which that is counted). Runs of keys that are last wait for nobody.
    """
    order = (0, 0 * first_sums)
    if fixed.ordered:
        HEADS_KV: gl.constexpr = fixed.heads // fixed.group
        pair = run[1] // fixed.group
        if not fixed.packed:
            pair += run[0] * HEADS_KV
        last = run[3] + KEYS >= length
        at = sums[5] + (pair * grid[0][4] + run[2] + gl.where(last, 0, 1))
        order = (at, gl.where(last, -(2**30), g * grid[0][3] + 1 - first_sums))
    return order


@gluon.jit
def seen_of(order, fixed):
    """How far the run of the next keys was when this was read."""
    seen = order[1]
    if fixed.ordered:
        seen = gl.load(order[0], volatile=True)
    return seen


@gluon.jit
def await_order(order, seen, tile, fixed):
    """Wait until the run of the next keys has added to a tile of sums, if it does: each adds when those have that are
    before it, and those begin before it (`run_of`), whatever runs at a time.
    """
    if fixed.ordered:
        while seen < order[1] + tile:
            seen = gl.load(order[0], volatile=True)


@gluon.jit
def has_added(at, bars, fixed):
    """Tell the warp that counts additions that a warpgroup has done its `at`-th."""
    if fixed.ordered:
        added, counted = bars
        mbarrier.wait(counted.index(at & 1), ((at >> 1) & 1) ^ 1)
        barrier()
        mbarrier.arrive(added.index(at & 1))


@gluon.jit
def count_additions(run, g, done, tiles, sums, bars, grid, fixed):
    """Say how far a run is, tile after tile, as both warpgroups add to the sums, and at its end beyond all tiles."""
    if fixed.ordered:
        HEADS_KV: gl.constexpr = fixed.heads // fixed.group
        added, counted = bars
        pair = run[1] // fixed.group
        if not fixed.packed:
            pair += run[0] * HEADS_KV
        at = sums[5] + (pair * grid[0][4] + run[2])
        for t in range(run[7]):
            n = done + t
            mbarrier.wait(added.index(n & 1), (n >> 1) & 1)
            mbarrier.arrive(counted.index(n & 1))
            far = g * grid[0][3] + 1 + visit_any(t, tiles, fixed.lists)
            gl.atomic_xchg(at, gl.where(t + 1 == run[7], (g + 1) * grid[0][3], far), sem="release")


@gluon.jit
def count_run(head, sums):
    """Count a run of a head, which has added to its sums all that it had."""
    gl.atomic_add(runs_of(head, sums), 1, sem="release")


@gluon.constexpr_function
def _of_warp():
    """Registers for what a warp added to a share, [32, 32]: a thread has two rows of eight columns, of four threads."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0]], [], [32, 32]
    )


@gluon.jit
def share_ring(SHARES, fixed):
    """Shared memory for both shares of a tile, with its barriers, where there are sums."""
    ring = 0
    full = 0
    if fixed.sums:
        ring = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], SHARES.layout)
        full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for n in gl.static_range(2):
            mbarrier.init(full.index(n), count=1)
    return ring, full


@gluon.jit
def convert(sums, memory, grid, scale, fixed):
    """The warps that make dQ of its sums, tile by tile as they come to them, once all runs of a head are counted. They
    leave zeros for the head that has the place next.
    """
    if fixed.sums:
        SUM, SHARES, DQ, COUNTS, places = sums[0], sums[1], sums[2], sums[3], sums[4]
        ring, full = memory
        CU_Q = grid[3][0]
        batch, seqlen_q, _seqlen_k, slots_q, slots, _together, _items = grid[0]
        heads = fixed.heads * (1 if fixed.packed else batch)
        done = 0
        tile = take(COUNTS + 1)
        while tile < heads * slots_q:
            head = tile // slots_q
            b = head // fixed.heads
            m = tile % slots_q
            if fixed.packed:
                b, m = locate(m, CU_Q, batch, fixed.block_m)
            queries, _row0, rows = sequence(b, CU_Q, seqlen_q, fixed.packed)
            start = m * fixed.block_m
            if start < rows:
                wait_for_count(runs_of(head, sums), slots, CONVERTERS)
                read_by_tma(CONVERTERS)
                share = tile_of_sums(tile, head, sums, grid) * 2
                for c in gl.static_range(2):
                    mbarrier.expect(full.index(c), ROWS * COLUMNS * 4)
                    async_load(SHARES, [(share + c) * ROWS, 0], full.index(c), ring.index(c))
                for c in gl.static_range(2):
                    mbarrier.wait(full.index(c), done & 1)
                    out = reinterpret(ring, 4, DQ).index(2 * c)
                    for warp in gl.static_range(4):
                        convert_rows(ring.index(c), out, warp, scale)
                    fence_async_shared()
                    barrier()
                    row, column = (start, 64 * c) if fixed.block_m == 64 else (start + 64 * c, 0)
                    async_store(DQ, at_row(queries, head % fixed.heads, row, column), out)
                    if head + places < heads:
                        leave_zeros(SUM + (share + c).to(gl.int64) * (ROWS * COLUMNS))
                tma.store_wait(0)
                barrier()  # zeros are on their way
                done += 1
            gl.atomic_add(converted_of(head, sums), 1, sem="release")
            tile = take(COUNTS + 1)


@gluon.jit
def convert_rows(share, out, warp: gl.constexpr, scale):
    """16 rows of a share, those of one of the warps that added to it. They take the places of rows before them."""
    dq = share.slice(warp * 32, 32).load(_of_warp())
    barrier()  # both have read
    # columns in eights, row (4 x 2), pair of columns, half of the rows, column
    dq = (dq * scale).to(out.dtype).reshape([8, 4, 2, 4, 2, 2]).permute((4, 1, 2, 0, 3, 5)).reshape([16, 64])
    matrix(out).slice(warp * 16, 16).store(dq)


@gluon.jit
def leave_zeros(SHARE):
    """Zeros in place of a share."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [CONVERTERS], [0])
    zeros = gl.zeros([ROWS * COLUMNS], gl.float32, layout=LAYOUT)
    gl.store(SHARE + gl.arange(0, ROWS * COLUMNS, layout=LAYOUT), zeros)
