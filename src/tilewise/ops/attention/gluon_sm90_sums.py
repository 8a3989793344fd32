"""Float32 sums of dQ: how programs that own keys add to them, and how those that are complete become dQ meanwhile. A
few heads at a time have memory for sums, a place each; who makes dQ leaves there what the next head begins with.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.tiles.arithmetic import LOG2E, lse_of_weights
from tilewise.tiles.gluon_api import async_load, async_store, barrier, reinterpret
from tilewise.tiles.hopper import at_row, matrix, read_by_tma, sequence, take, tile_bytes, wait_for_count
from tilewise.tiles.visit import locate, visit_any

TAKEN = gl.constexpr(4)  # counts before those of heads: what two roles or kernels have taken, who came to meetings
KEEPERS = gl.constexpr(2)  # warps that keep places
ROWS = gl.constexpr(128)  # of a share, which is one warpgroup's 64 x 64 of a tile of dQ, as the TMA sees the sums
COLUMNS = gl.constexpr(32)


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
def ready_of(head, sums):
    """The count of a head's tiles whose place is ready: sums that are 0, and what queries begin with."""
    return sums[3] + (TAKEN + 1 + 2 * head)


@gluon.jit
def place_is_ready(run, sums, grid, fixed):
    """Whether a run's head has its place."""
    ready = run[7] >= 0
    if fixed.sums:
        ready = gl.atomic_add(ready_of(head_of(run, fixed), sums), 0, sem="acquire") >= grid[0][3]
        read_by_tma(1)
    return ready


@gluon.jit
def wait_for_place(run, sums, grid, fixed):
    """Wait until a run's head has its place.

    All items of the head that had it before come before this run's in the order in which items are taken, and tiles are
    made ready in order of heads. So who has the first item that is not done waits at most for tiles whose runs are all
    counted, however many programs the GPU runs at a time.
    """
    if fixed.sums:
        wait_for_count(ready_of(head_of(run, fixed), sums), grid[0][3], 1)
        read_by_tma(1)


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
def count_addition(t, run, g, done, tiles, sums, bars, grid, fixed):
    """Say how far a run is when both warpgroups have added its t-th tile, behind the last one beyond all tiles."""
    if fixed.ordered:
        HEADS_KV: gl.constexpr = fixed.heads // fixed.group
        added, counted = bars
        pair = run[1] // fixed.group
        if not fixed.packed:
            pair += run[0] * HEADS_KV
        at = sums[5] + (pair * grid[0][4] + run[2])
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
def keep_places(given, sums, memory, grid, scale, fixed):
    """The warps that keep places, tile by tile as they come to them: they make dQ of the sums of the head that has it,
    once all of its runs are counted, and leave there what the head that has it next begins with.
    """
    if fixed.sums:
        COUNTS, places = sums[3], sums[4]
        batch, _seqlen_q, _seqlen_k, slots_q, _slots, _together, _items = grid[0]
        CU_Q = grid[3][0]
        heads = fixed.heads * (1 if fixed.packed else batch)
        uses = 0
        tile = take(COUNTS + 1)  # that becomes ready; the one before it in its place is that of `places` heads before
        while tile < (heads + places) * slots_q:
            head = tile // slots_q
            m = tile % slots_q
            b = 0 * m
            if fixed.packed:
                b, m = locate(m, CU_Q, batch, fixed.block_m)
            start = m * fixed.block_m
            if head >= places:
                ask_for_sums(head - places, b, start, tile - places * slots_q, sums, memory, grid, fixed)
            coming = take(COUNTS + 1)  # meanwhile
            if head >= places:
                uses = convert(head - places, b, start, sums, memory, uses, grid, scale, fixed)
            if head < heads:
                uses = make_ready(head, b, start, tile, given, sums, memory, uses, grid, scale, fixed)
                gl.atomic_add(ready_of(head, sums), 1, sem="release")
            tile = coming


@gluon.jit
def rows_of_head(head, b, grid, fixed):
    """(how descriptors know a head's sequence, its first query, how many it has)"""
    if not fixed.packed:
        b = head // fixed.heads
    return sequence(b, grid[3][0], grid[0][1], fixed.packed)


@gluon.jit
def ask_for_sums(head, b, start, tile, sums, memory, grid, fixed):
    """Have a tile of a head's sums brought, once all of its runs are counted."""
    SHARES = sums[1]
    ring, full = memory
    _queries, _row0, rows = rows_of_head(head, b, grid, fixed)
    if start < rows:
        if gl.atomic_add(runs_of(head, sums), 0, sem="acquire") < grid[0][4]:
            wait_for_count(runs_of(head, sums), grid[0][4], KEEPERS)
        if fixed.packed:  # runs that visit nothing have not waited for it
            wait_for_count(ready_of(head, sums), grid[0][3], KEEPERS)
        read_by_tma(KEEPERS)
        share = tile_of_sums(tile, head, sums, grid) * 2
        for c in gl.static_range(2):
            mbarrier.expect(full.index(c), ROWS * COLUMNS * 4)
            async_load(SHARES, [(share + c) * ROWS, 0], full.index(c), ring.index(c))


@gluon.jit
def convert(head, b, start, sums, memory, uses, grid, scale, fixed):
    """dQ of a head's tile, whose sums are brought; how often the tiles of shared memory have been used."""
    DQ = sums[2]
    ring, full = memory
    queries, _row0, rows = rows_of_head(head, b, grid, fixed)
    if start < rows:
        for c in gl.static_range(2):
            mbarrier.wait(full.index(c), uses & 1)
            out = reinterpret(ring, 4, DQ).index(2 * c)
            for warp in gl.static_range(4):
                convert_rows(ring.index(c), out, warp, scale)
            fence_async_shared()
            barrier()
            row, column = (start, 64 * c) if fixed.block_m == 64 else (start + 64 * c, 0)
            async_store(DQ, at_row(queries, head % fixed.heads, row, column), out)
        tma.store_wait(0)
        barrier()  # for all of these warps
        uses += 1
    return uses


@gluon.jit
def make_ready(head, b, start, tile, given, sums, memory, uses, grid, scale, fixed):
    """What a head's tile of queries begins with: sums that are 0; of scores -lse, in units of what they are before they
    are scaled; of dP -delta, of which o and dO are brought. How often the tiles of shared memory have been used.
    """
    O, DO, LSE, DLSE, NUMBERS = given
    SUM = sums[0]
    ring, full = memory
    BLOCK_M: gl.constexpr = fixed.block_m
    OF_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [KEEPERS, 1], [1, 0])
    ROWS_OF: gl.constexpr = gl.BlockedLayout([1], [32], [KEEPERS], [0])
    queries, row0, rows = rows_of_head(head, b, grid, fixed)
    if (start < rows) | (start == 0):  # keys of a sequence without queries visit its first tile, too
        h = head % fixed.heads
        brought = reinterpret(ring, 2, DO)
        mbarrier.expect(full.index(0), tile_bytes(brought))
        async_load(O, at_row(queries, h, start), full.index(0), brought.index(0))
        mbarrier.expect(full.index(1), tile_bytes(brought))
        async_load(DO, at_row(queries, h, start), full.index(1), brought.index(1))
        total = grid[0][1]  # queries of a head in lse
        lse_rows = (head.to(gl.int64) * total + row0) + start
        row = gl.arange(0, BLOCK_M, layout=ROWS_OF)
        lse = gl.load(LSE + lse_rows + row, mask=start + row < rows, other=float("inf"))
        share = tile_of_sums(tile, head, sums, grid) * 2
        for c in gl.static_range(2):
            leave_zeros(SUM + (share + c).to(gl.int64) * (ROWS * COLUMNS))
        unit = LOG2E if fixed.scale_first else 1.0 / scale
        shifts = NUMBERS + tile.to(gl.int64) * BLOCK_M
        gl.store(shifts + row, -lse_of_weights(lse, unit))
        heads = fixed.heads * (1 if fixed.packed else grid[0][0])
        centres = shifts + (heads * grid[0][3]).to(gl.int64) * BLOCK_M
        for n in gl.static_range(2):
            mbarrier.wait(full.index(n), uses & 1)
        of_eight = gl.arange(0, 8, layout=gl.SliceLayout(1, OF_ROWS))
        for eight in gl.static_range(BLOCK_M // 8):
            o = matrix(brought.index(0)).slice(8 * eight, 8).load(OF_ROWS).to(gl.float32)
            do = matrix(brought.index(1)).slice(8 * eight, 8).load(OF_ROWS).to(gl.float32)
            centre = -gl.sum(o * do, 1)
            if DLSE is not None:
                inside = start + 8 * eight + of_eight < rows
                centre += gl.load(DLSE + lse_rows + 8 * eight + of_eight, mask=inside, other=0.0)
            gl.store(centres + 8 * eight + of_eight, centre)
        uses += 1
    barrier()  # for all of these warps
    return uses


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
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [KEEPERS], [0])
    zeros = gl.zeros([ROWS * COLUMNS], gl.float32, layout=LAYOUT)
    gl.store(SHARE + gl.arange(0, ROWS * COLUMNS, layout=LAYOUT), zeros)
