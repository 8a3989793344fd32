"""The warps that fetch for `gluon_sm90_fwd`: they take items, post their runs, ask for tiles as products need them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops.attention.gluon_sm90_meetings import meet, meetings_of
from tilewise.ops.attention.gluon_sm90_pages import fill_pages, fill_tile, gather_rows, pages_of_keys, table_of
from tilewise.ops.attention.gluon_sm90_runs import first_key, run_of_queries, where_of
from tilewise.tiles.gluon_api import async_load
from tilewise.tiles.hopper import at_row, deal, fill, post, posted, ring_turn, tile_bytes
from tilewise.tiles.visit import snake


@gluon.jit
def next_item(turn, NEXT, grid, fixed):
    """A program's item in its `turn`-th turn, which is not the first: dealt out, or known before. Programs ask until
    there is none, as often in all as there are items: who asks last makes the count 0 again, for the next launch.
    """
    if fixed.dealt:
        item = deal(NEXT)
        if item == gl.num_programs(0) + grid[0][6] - 1:
            gl.store(NEXT, 0)
    else:
        item = snake(turn, gl.program_id(0), gl.num_programs(0))
    return item


@gluon.jit
def find_run(item, turn, NEXT, grid, fixed):
    """(item, its turn, its run): the first from `item` on that visits something, or a run that visits nothing."""
    nothing = 0 * item
    run = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    looking = item < grid[0][6]
    while looking:
        run = run_of_queries(item, grid, fixed, 64 * fixed.consumers, fixed.block_n)
        looking = run[7] == 0
        if looking:
            turn += 1
            item = next_item(turn, NEXT, grid, fixed)
            looking = item < grid[0][6]
    return item, turn, run


@gluon.jit
def fetch_queries(Q, run, at, memory, bars, grid, fixed):
    """Fetch Q of the `at`-th item, if that visits anything, once there is a place."""
    q_ring = memory[0]
    q_full, q_empty = bars[0], bars[1]
    if run[7] > 0:
        queries, _keys, _lengths, _row0, _tiles = where_of(run, grid, fixed, fixed.block_n)
        first, phase = ring_turn(at, fixed.ahead)
        for c in gl.static_range(fixed.consumers):
            spot = first * fixed.consumers + c
            mbarrier.wait(q_empty.index(spot), phase ^ 1)
            mbarrier.expect(q_full.index(spot), tile_bytes(q_ring))
            async_load(Q, at_row(queries, run[1], run[3] + 64 * c), q_full.index(spot), q_ring.index(spot))


@gluon.jit
def fill_values(V, at, b, keys, h, start, memory, bars, grid, fixed):
    """Fetch V of the keys `start` on, unless a warp of its own does; codes of values stand by channel, in blocks of
    keys (`quant.blocks`).
    """
    v_ring, v_full, v_empty = memory[2], bars[4], bars[5]
    if fixed.codes:
        nowhere = 0 * b
        if fixed.packed:
            start += (gl.load(grid[3][1] + b) // fixed.block_n + b) * fixed.block_n
            b = nowhere
        fill(V, at, (b, nowhere, nowhere), h, 0, v_ring, v_full, v_empty, start)
    elif not fixed.in_boxes:
        fill(V, at, keys, h, start, v_ring, v_full, v_empty)


@gluon.jit
def fetch(inputs, memory, bars, grid, fixed):
    """The warp that fetches: K of a tile before V of the one before it, as the products ask for them; V of pages has a
    warp of its own (`fetch_values`). It finds items and posts their runs, of which one that visits nothing is the last:
    the next item, and where it has a place its Q, while two tiles of the present one are still to come.
    """
    Q, K, V, NEXT, pages = inputs
    k_ring, board = memory[1], memory[4]
    k_full, k_empty = bars[2], bars[3]
    EARLY: gl.constexpr = fixed.ahead == 2
    done = 0
    at = 0
    item, turn, run = find_run(gl.program_id(0), 0 * gl.program_id(0), NEXT, grid, fixed)
    patient = item >= 0
    post(run, 0, board)
    if EARLY:
        fetch_queries(Q, run, 0, memory, bars, grid, fixed)
    while run[7] > 0:
        count = run[7]
        _queries, keys, _lengths, _row0, tiles = where_of(run, grid, fixed, fixed.block_n)
        h = run[1] // fixed.group
        table = table_of(run[0], pages) if fixed.paged else 0
        start = first_key(0, tiles, fixed)
        after = first_key(gl.minimum(1, count - 1), tiles, fixed)
        fill_tile(K, done, keys, h, start, k_ring, k_full, k_empty, table, pages[3], fixed, 0)
        if not EARLY:
            fetch_queries(Q, run, at, memory, bars, grid, fixed)
        near = gl.maximum(count - 2, 1)
        meetings = meetings_of(at, near - 1, grid, fixed)
        for t in range(1, near):
            patient = meet(NEXT, t, meetings, patient, fixed)
            ahead = first_key(t + 1, tiles, fixed)
            fill_tile(K, done + t, keys, h, after, k_ring, k_full, k_empty, table, pages[3], fixed, 0)
            fill_values(V, done + t - 1, run[0], keys, h, start, memory, bars, grid, fixed)
            start = after
            after = ahead
        turn += 1
        item = next_item(turn, NEXT, grid, fixed)
        item, turn, coming = find_run(item, turn, NEXT, grid, fixed)
        post(coming, at + 1, board)
        if EARLY:
            fetch_queries(Q, coming, at + 1, memory, bars, grid, fixed)
        for t in range(near, count):
            ahead = first_key(gl.minimum(t + 1, count - 1), tiles, fixed)
            fill_tile(K, done + t, keys, h, after, k_ring, k_full, k_empty, table, pages[3], fixed, 0)
            fill_values(V, done + t - 1, run[0], keys, h, start, memory, bars, grid, fixed)
            start = after
            after = ahead
        fill_values(V, done + count - 1, run[0], keys, h, start, memory, bars, grid, fixed)
        done += count
        at += 1
        run = coming


@gluon.jit
def fetch_values(inputs, memory, bars, grid, fixed):
    """The warp that fetches V out of pages: one thread asks for their boxes, and as many are K's."""
    _Q, _K, V, _NEXT, pages = inputs
    v_ring, board = memory[2], memory[4]
    v_full, v_empty = bars[4], bars[5]
    done = 0
    at = 0
    run = posted(0, board, 1)
    while run[7] > 0:
        _queries, keys, _lengths, _row0, tiles = where_of(run, grid, fixed, fixed.block_n)
        table = table_of(run[0], pages)
        h = run[1] // fixed.group
        for t in range(run[7]):
            start = first_key(t, tiles, fixed)
            fill_pages(V, done + t, keys, h, start, v_ring, v_full, v_empty, table, pages[3], fixed, 1)
        done += run[7]
        at += 1
        run = posted(at, board, 1)


@gluon.jit
def fetch_rows(inputs, memory, bars, grid, fixed):
    """The four warps that fetch where keys are gathered: as `fetch`, but for V too. In which pages the next tile lies
    is looked up before this one is asked for.
    """
    Q, K, V, NEXT, pages = inputs
    strides = pages[3]
    _, k_ring, v_ring, _, board = memory
    k_full, k_empty, v_full, v_empty = bars[2], bars[3], bars[4], bars[5]
    BLOCK_N: gl.constexpr = fixed.block_n
    D: gl.constexpr = fixed.head_dim
    D_V: gl.constexpr = fixed.head_dim_v
    EARLY: gl.constexpr = fixed.ahead == 2
    of_k = (K, (strides[0], strides[1], strides[2]), k_ring, k_full, k_empty)
    of_v = (V, (strides[3], strides[4], strides[5]), v_ring, v_full, v_empty)
    r = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    done = 0
    at = 0
    item, turn, run = find_run(gl.program_id(0), 0 * gl.program_id(0), NEXT, grid, fixed)
    post(run, 0, board, 4)
    if EARLY:
        fetch_queries(Q, run, 0, memory, bars, grid, fixed)
    coming = run
    while run[7] > 0:
        count = run[7]
        _queries, keys, _lengths, _row0, tiles = where_of(run, grid, fixed, BLOCK_N)
        h = run[1] // fixed.group
        table = table_of(run[0], pages)
        first = first_key(0, tiles, fixed)
        here = pages_of_keys(table, keys, first, r, BLOCK_N, fixed)
        before = 0 * first  # not `first`: the loop would then be taken to leave it as it is
        there = 0 * here
        for t in range(count):
            after = first_key(gl.minimum(t + 1, count - 1), tiles, fixed)
            ahead = pages_of_keys(table, keys, after, r, BLOCK_N, fixed)
            gather_rows(of_k, (here, first, keys, h, r), done + t, D, fixed)
            if t == 0:
                if not EARLY:
                    fetch_queries(Q, run, at, memory, bars, grid, fixed)
            else:
                gather_rows(of_v, (there, before, keys, h, r), done + t - 1, D_V, fixed)
            before = first
            there = here
            first = after
            here = ahead
            if t == gl.maximum(count - 3, 0):
                turn += 1
                item = next_item(turn, NEXT, grid, fixed)
                item, turn, coming = find_run(item, turn, NEXT, grid, fixed)
                post(coming, at + 1, board, 4)
                if EARLY:
                    fetch_queries(Q, coming, at + 1, memory, bars, grid, fixed)
        gather_rows(of_v, (there, before, keys, h, r), done + count - 1, D_V, fixed)
        done += count
        at += 1
        run = coming
