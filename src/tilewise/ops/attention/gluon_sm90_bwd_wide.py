"""dK and dV on Hopper for head dimensions above 128, in Gluon: a program owns 64 keys, as registers hold no more of
their gradients. One warpgroup has the scores and dV, the other dP and dK; P goes from one to the other through shared
memory.

dQ has a kernel of its own: added up in memory from programs of 64 keys, it would be written more often than the L2
cache can take.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops.attention.gluon_sm90_meetings import meet, meetings_of
from tilewise.ops.attention.gluon_sm90_runs import RUN, first_tile_of, run_of, where_of
from tilewise.ops.attention.gluon_sm90_scores import (
    of_queries,
    own_rows,
    probabilities,
    product_from,
    start_scores,
    through_score,
)
from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.gluon_api import async_load, async_store, barrier
from tilewise.tiles.hopper import (
    at_row,
    deal,
    fill_with,
    filled,
    matrix,
    message_board,
    post,
    post_last,
    posted,
    product_layout,
    ring_turn,
    tile_bytes,
)
from tilewise.tiles.visit import visit_any

TILE = gl.constexpr(64)  # keys of a program, and queries of a tile
STAGES = gl.constexpr(2)  # tiles of queries, and of dO, in shared memory


@gluon.jit
def fetch(inputs, memory, bars, grid, fixed):
    """The warp that fetches: K and V of an item, then Q with its shifts and dO with its centres. It takes
    items as they are dealt out, and posts their runs; a run that visits nothing is the last.
    """
    Q, K, V, DO, SHIFT, CENTRE, COUNTS = inputs
    k_tile, v_tile, q_ring, do_ring, shift_ring, centre_ring, _, board = memory
    own_full, own_empty, q_full, q_empty, do_full, do_empty, _, _ = bars
    done = 0
    at = 0
    item = gl.program_id(0)
    patient = item >= 0
    while item < grid[0][6]:
        for g in range(fixed.group):
            run = run_of(item, g, grid, fixed, TILE, TILE)
            count = run[7]
            if not fixed.packed or count > 0:
                post(run, at, board)
                h, start = run[1], run[3]
                queries, keys, _lengths, row0, tiles = where_of(run, grid, fixed, TILE)
                tile0 = first_tile_of(run, row0, grid, fixed, TILE)
                if g == 0:
                    phase = (at // fixed.group) & 1
                    mbarrier.wait(own_empty.index(0), phase ^ 1)
                    mbarrier.expect(own_full.index(0), tile_bytes(k_tile))
                    async_load(K, at_row(keys, h // fixed.group, start), own_full.index(0), k_tile.index(0))
                meetings = meetings_of(at, count - 1, grid, fixed)
                for t in range(count):
                    patient = meet(COUNTS + 2, t, meetings, patient, fixed)
                    m = visit_any(t, tiles, fixed.lists)
                    row, tile = m * TILE, tile0 + m
                    fill_with(Q, SHIFT, done, queries, h, row, tile, q_ring, shift_ring, q_full, q_empty)
                    if g + t == 0:
                        phase = (at // fixed.group) & 1
                        mbarrier.wait(own_empty.index(1), phase ^ 1)
                        mbarrier.expect(own_full.index(1), tile_bytes(v_tile))
                        async_load(V, at_row(keys, h // fixed.group, start), own_full.index(1), v_tile.index(0))
                    fill_with(DO, CENTRE, done, queries, h, row, tile, do_ring, centre_ring, do_full, do_empty)
                    done += 1
                at += 1
        item = deal(COUNTS)
    post_last(at, board)


@gluon.jit
def add_dv(dv, done, m, k, own, memory, bars, formula, scalars, fixed, MASKED: gl.constexpr):
    """Add query tile m to dV of a program's keys, and hand over the factors by which dP becomes dS."""
    _, _, q_ring, do_ring, shift_ring, _, p_ring, _ = memory
    _, _, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    SCORES: gl.constexpr = product_layout(TILE)
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, product_layout(do_ring.shape[5]), 2)
    stage, q = filled(done, q_ring, q_full)
    shift = of_queries(shift_ring, stage, SCORES)
    s = warpgroup_mma_wait(0, deps=(start_scores(k, q, shift, own, scalars, fixed),))
    mbarrier.arrive(q_empty.index(stage))
    p, around = probabilities(s, shift, m, own, formula, scalars, fixed, MASKED)
    p16 = p.to(do_ring.dtype)
    factors = p16
    if fixed.slope is not None:
        factors = through_score(p, p, around, own, formula, fixed, MASKED).to(do_ring.dtype)
    stage, phase = ring_turn(done, STAGES)
    mbarrier.wait(p_empty.index(stage), phase ^ 1)
    p_ring.index(stage).store(factors)
    mbarrier.arrive(p_full.index(stage))
    stage, do = filled(done, do_ring, do_full)
    left = gl.convert_layout(p16, FROM_REGISTERS, assert_trivial=True)
    dv = warpgroup_mma_wait(0, deps=(warpgroup_mma(left, do, dv, is_async=True),))
    mbarrier.arrive(do_empty.index(stage))
    return dv


@gluon.jit
def add_dk(dk, done, v, memory, bars):
    """Add the queries of a tile to dK of a program's keys."""
    _, _, q_ring, do_ring, _, centre_ring, p_ring, _ = memory
    _, _, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    SCORES: gl.constexpr = product_layout(TILE)
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, product_layout(q_ring.shape[5]), 2)
    stage, do = filled(done, do_ring, do_full)
    dp = warpgroup_mma_wait(0, deps=(product_from(of_queries(centre_ring, stage, SCORES), v, do),))
    mbarrier.arrive(do_empty.index(stage))
    stage, phase = ring_turn(done, STAGES)
    mbarrier.wait(p_full.index(stage), phase)
    factors = p_ring.index(stage).load(SCORES)
    mbarrier.arrive(p_empty.index(stage))
    ds = (factors.to(gl.float32) * dp).to(q_ring.dtype)
    stage, q = filled(done, q_ring, q_full)
    left = gl.convert_layout(ds, FROM_REGISTERS, assert_trivial=True)
    dk = warpgroup_mma_wait(0, deps=(warpgroup_mma(left, q, dk, is_async=True),))
    mbarrier.arrive(q_empty.index(stage))
    return dk


@gluon.jit
def write_rows(x, tensor, keys, h, start, tile, empty):
    """Write 64 rows of a gradient through the place of what its warpgroup alone read."""
    barrier()
    matrix(tile.index(0)).store(x.to(tile.dtype))
    fence_async_shared()
    barrier()
    async_store(tensor, at_row(keys, h, start), tile.index(0))
    tma.store_wait(0)
    mbarrier.arrive(empty)


@gluon.jit
def compute_dv(DV, memory, bars, grid, scalars, fixed):
    """The warpgroup of scores: dV of each item's keys."""
    k_tile, _, q_ring, _, _, _, _, board = memory
    own_full, own_empty, _, _, _, _, _, _ = bars
    formula = grid[1]
    D: gl.constexpr = q_ring.shape[5]
    dv = gl.zeros([TILE, D], gl.float32, layout=product_layout(D))
    k = matrix(k_tile.index(0))
    done = 0
    at = 0
    run = posted(0, board, 4)
    while run[7] > 0:
        h, start, num_partial, count = run[1], run[3], run[6], run[7]
        _queries, keys, lengths, _row0, tiles = where_of(run, grid, fixed, TILE)
        own = own_rows(run, lengths, start, formula, fixed, TILE)
        g = at % fixed.group
        dv = gl.where(g == 0, 0.0, dv)
        mbarrier.wait(own_full.index(0), (at // fixed.group) & 1)
        full = 0
        if fixed.guard:
            cut = gl.where(start + TILE > lengths[1], count, num_partial)
            for t in range(cut):
                m = visit_any(t, tiles, fixed.lists)
                dv = add_dv(dv, done + t, m, k, own, memory, bars, formula, scalars, fixed, True)
            full = cut
        for t in range(full, count):
            m = visit_any(t, tiles, fixed.lists)
            dv = add_dv(dv, done + t, m, k, own, memory, bars, formula, scalars, fixed, False)
        done += count
        if g == fixed.group - 1:
            write_rows(dv, DV, keys, h // fixed.group, start, k_tile, own_empty.index(0))
        at += 1
        run = posted(at, board, 4)


@gluon.jit
def compute_dk(DK, memory, bars, grid, scalars, fixed):
    """The warpgroup of dP: dK of each item's keys."""
    _, v_tile, q_ring, _, _, _, _, board = memory
    own_full, own_empty, _, _, _, _, _, _ = bars
    D: gl.constexpr = q_ring.shape[5]
    dk = gl.zeros([TILE, D], gl.float32, layout=product_layout(D))
    v = matrix(v_tile.index(0))
    done = 0
    at = 0
    run = posted(0, board, 4)
    while run[7] > 0:
        h, start, count = run[1], run[3], run[7]
        _queries, keys, _lengths, _row0, _tiles = where_of(run, grid, fixed, TILE)
        g = at % fixed.group
        dk = gl.where(g == 0, 0.0, dk)
        mbarrier.wait(own_full.index(1), (at // fixed.group) & 1)
        for t in range(count):
            dk = add_dk(dk, done + t, v, memory, bars)
        done += count
        if g == fixed.group - 1:
            write_rows(dk * scalars[0], DK, keys, h // fixed.group, start, v_tile, own_empty.index(1))
        at += 1
        run = posted(at, board, 4)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "slots_q", "slots", "together", "items", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale",
    ]
)  # fmt: skip
def attention_bwd_wide_sm90(
    Q, K, V, DO, SHIFT, CENTRE, DK, DV, COUNTS, CU_Q, CU_K, LISTED, list_stride_b, list_stride_h, list_stride_r,
    mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, slots_q, slots, together, items, scale, fixed,
):  # fmt: skip
    """dK and dV; `fixed` is what is known when the kernel is compiled (`gluon_fixed.Fixed`)."""
    D: gl.constexpr = Q.block_shape[4]
    k_tile = gl.allocate_shared_memory(K.dtype, [1, 1, 1, 1, TILE, D], K.layout)
    v_tile = gl.allocate_shared_memory(V.dtype, [1, 1, 1, 1, TILE, D], V.layout)
    q_ring = gl.allocate_shared_memory(Q.dtype, [STAGES, 1, 1, 1, TILE, D], Q.layout)
    do_ring = gl.allocate_shared_memory(DO.dtype, [STAGES, 1, 1, 1, TILE, D], DO.layout)
    shift_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], SHIFT.layout)
    centre_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], CENTRE.layout)
    p_ring = gl.allocate_shared_memory(Q.dtype, [STAGES, TILE, TILE], gl.NVMMASharedLayout(128, 16, rank=2))
    board = message_board(RUN, 2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)  # of K, of V
    own_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    p_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for n in gl.static_range(2):
        mbarrier.init(own_full.index(n), count=1)
        mbarrier.init(own_empty.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(do_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=2)
        mbarrier.init(do_empty.index(n), count=2)
        mbarrier.init(p_full.index(n), count=1)
        mbarrier.init(p_empty.index(n), count=1)
    fence_async_shared()

    memory = (k_tile, v_tile, q_ring, do_ring, shift_ring, centre_ring, p_ring, board)
    bars = (own_full, own_empty, q_full, q_empty, do_full, do_empty, p_full, p_empty)
    grid = (
        (batch, seqlen_q, seqlen_k, slots_q, slots, together, items),
        (mask_args, mask_nums, score_args, score_nums, 0),
        (LISTED if fixed.lists else 0, list_stride_b, list_stride_h, list_stride_r),
        (CU_Q, CU_K) if fixed.packed else (0, 0),
    )
    scalars = (scale, scale * LOG2E)
    gl.warp_specialize(
        [
            (compute_dv, (DV, memory, bars, grid, scalars, fixed)),
            (compute_dk, (DK, memory, bars, grid, scalars, fixed)),
            (fetch, ((Q, K, V, DO, SHIFT, CENTRE, COUNTS), memory, bars, grid, fixed)),
        ],
        [4, 1],
        [fixed.registers, 24],
    )
