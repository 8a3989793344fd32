"""dQ on Hopper where no program adds to it in memory (`gluon_attention._sums` says where), in Gluon. A program owns 128
queries, 64 for each of two warpgroups, and takes scores and dP once more.
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
from tilewise.ops.attention.gluon_sm90_runs import RUN, first_tile_of, run_of_queries, where_of
from tilewise.ops.attention.gluon_sm90_scores import (
    own_rows,
    probabilities,
    product_from,
    start_scores,
    through_score,
)
from tilewise.tiles.arithmetic import LOG2E, lse_of_weights
from tilewise.tiles.gluon_api import async_load, async_store, barrier
from tilewise.tiles.hopper import (
    at_row,
    deal,
    fill,
    filled,
    keep_tile_before_wait,
    matrix,
    message_board,
    moving,
    post,
    post_last,
    posted,
    product_layout,
    tile_bytes,
)
from tilewise.tiles.visit import visit_any

OWN = gl.constexpr(128)  # queries of a program
HALF = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def fetch(inputs, memory, bars, grid, fixed):
    """The warp that fetches: Q and dO of an item, then tiles of K and V. It takes items as they are dealt out,
    and posts their runs; a run that visits nothing is the last.
    """
    Q, K, V, DO, COUNTS = inputs
    q_tile, do_tile, k_ring, v_ring, board = memory
    BLOCK_N: gl.constexpr = fixed.block_n
    own_full, own_empty, k_full, k_empty, v_full, v_empty = bars
    done = 0
    at = 0
    item = gl.program_id(0)
    patient = item >= 0
    while item < grid[0][6]:
        run = run_of_queries(item, grid, fixed, OWN, BLOCK_N)
        count = run[7]
        if not fixed.packed or count > 0:
            post(run, at, board)
            h, start = run[1], run[3]
            queries, keys, _lengths, _row0, tiles = where_of(run, grid, fixed, BLOCK_N)
            h_kv = h // fixed.group
            n = visit_any(0, tiles, fixed.lists)
            fill(K, done, keys, h_kv, n * BLOCK_N, k_ring, k_full, k_empty)
            for c in gl.static_range(2):
                mbarrier.wait(own_empty.index(c), (at & 1) ^ 1)
                mbarrier.expect(own_full.index(c), 2 * tile_bytes(q_tile))
                async_load(Q, at_row(queries, h, start + HALF * c), own_full.index(c), q_tile.index(c))
                async_load(DO, at_row(queries, h, start + HALF * c), own_full.index(c), do_tile.index(c))
            fill(V, done, keys, h_kv, n * BLOCK_N, v_ring, v_full, v_empty)
            meetings = meetings_of(at, count - 1, grid, fixed)
            for t in range(1, count):
                patient = meet(COUNTS + 3, t, meetings, patient, fixed)
                n = visit_any(t, tiles, fixed.lists)
                fill(K, done + t, keys, h_kv, n * BLOCK_N, k_ring, k_full, k_empty)
                fill(V, done + t, keys, h_kv, n * BLOCK_N, v_ring, v_full, v_empty)
            done += count
            at += 1
        item = deal(COUNTS + 1)
    post_last(at, board)


@gluon.jit
def add_dq(dq, done, n, begins, own, memory, bars, formula, scalars, fixed, C: gl.constexpr, MASKED: gl.constexpr):
    """Add key tile n to dQ of a warpgroup's queries; scores begin with `begins[0]`, dP with `begins[1]`."""
    q_tile, do_tile, k_ring, v_ring, _ = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    shift, centre = begins
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, product_layout(k_ring.shape[5]), 2)
    place_k, k = filled(done, k_ring, k_full)
    s = start_scores(moving(q_tile, C, done), k, shift, own, scalars, fixed)
    place_v, _ = filled(done, v_ring, v_full)
    dp = product_from(centre, moving(do_tile, C, done), moving(v_ring, place_v, done))
    s = warpgroup_mma_wait(1, deps=(s,))
    p, around = probabilities(s, shift, n, own, formula, scalars, fixed, MASKED)
    p = keep_tile_before_wait(p.to(k_ring.dtype)).to(gl.float32)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(place_v))
    ds = through_score(p * dp, p, around, own, formula, fixed, MASKED).to(k_ring.dtype)
    left = gl.convert_layout(ds, FROM_REGISTERS, assert_trivial=True)
    dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(left, k, dq, is_async=True),))
    mbarrier.arrive(k_empty.index(place_k))
    return dq


@gluon.jit
def begin_rows(given, outputs, run, first, lengths, row, do_tile, full, phase, scalars, grid, fixed):
    """What the scores and dP of a warpgroup's 64 queries begin with, -lse, in units of what scores are before they are
    scaled, and -delta, whose dO comes to shared memory; left for the kernel that owns keys, too.
    """
    O, o_strides, LSE, DLSE = given
    _, SHIFT, CENTRE = outputs
    D: gl.constexpr = do_tile.shape[4]
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(fixed.block_n))
    OF_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b, h = run[0], run[1]
    offs = gl.arange(0, HALF, layout=ROW)
    inside = first + offs < lengths[0]
    # counted from the sequence's first row, or offsets would be worked out before all items and kept in registers
    of_row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, OF_ROWS))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, OF_ROWS))
    rows = O + b.to(gl.int64) * o_strides[0] + h.to(gl.int64) * o_strides[2]
    there = (of_row < lengths[0])[:, None] & (column < fixed.head_dim_v)[None, :]
    o = gl.load(rows + of_row.to(gl.int64)[:, None] * o_strides[1] + column[None, :], mask=there, other=0.0)
    of_lse = (b * fixed.heads + h).to(gl.int64) * grid[0][1] + first
    lse = gl.load(LSE + of_lse + offs, mask=inside, other=float("inf"))
    unit = LOG2E if fixed.scale_first else 1.0 / scalars[0]
    shift = -lse_of_weights(lse, unit)
    mbarrier.wait(full, phase)
    do = matrix(do_tile).load(OF_ROWS)
    centre = -gl.convert_layout(gl.sum(o.to(gl.float32) * do.to(gl.float32), 1), ROW)
    if DLSE is not None:
        centre += gl.load(DLSE + of_lse + offs, mask=inside, other=0.0)
    kept = first + offs < (lengths[0] + fixed.block_m - 1) // fixed.block_m * fixed.block_m  # in whole tiles
    gl.store(SHIFT + row + offs, shift, mask=kept)
    gl.store(CENTRE + row + offs, centre, mask=kept)
    return shift[:, None], centre[:, None]


@gluon.jit
def compute_dq(given, outputs, memory, bars, grid, scalars, fixed, C: gl.constexpr):
    """One warpgroup: dQ of its 64 queries of every item."""
    DQ, SHIFT, CENTRE = outputs
    q_tile, do_tile, k_ring, _, board = memory
    own_full, own_empty, _, _, _, _ = bars
    formula = grid[1]
    D: gl.constexpr = k_ring.shape[5]
    BLOCK_N: gl.constexpr = fixed.block_n
    BLOCK_M: gl.constexpr = fixed.block_m  # of the tiles of SHIFT and CENTRE
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    q = matrix(q_tile.index(C))
    done = 0
    at = 0
    run = posted(0, board, 4)
    while run[7] > 0:
        h, num_partial, count = run[1], run[6], run[7]
        first = run[3] + HALF * C
        queries, _keys, lengths, row0, tiles = where_of(run, grid, fixed, BLOCK_N)
        own = own_rows(run, lengths, first, formula, fixed, BLOCK_N)
        row = first_tile_of(run, row0, grid, fixed, BLOCK_M).to(gl.int64) * BLOCK_M + first
        if fixed.begins:
            mine, full = do_tile.index(C), own_full.index(C)
            begins = begin_rows(given, outputs, run, first, lengths, row, mine, full, at & 1, scalars, grid, fixed)
        else:
            mbarrier.wait(own_full.index(C), at & 1)
            offs = gl.arange(0, HALF, layout=ROW)
            inside = first + offs < lengths[0]
            begins = (
                gl.load(SHIFT + row + offs, mask=inside, other=float("-inf"))[:, None],
                gl.load(CENTRE + row + offs, mask=inside, other=0.0)[:, None],
            )
        dq = gl.zeros([HALF, D], gl.float32, layout=product_layout(D))
        whole = 0
        if fixed.guard:
            for t in range(num_partial):
                n = visit_any(t, tiles, fixed.lists)
                dq = add_dq(dq, done + t, n, begins, own, memory, bars, formula, scalars, fixed, C, True)
            whole = num_partial
        for t in range(whole, count):
            n = visit_any(t, tiles, fixed.lists)
            dq = add_dq(dq, done + t, n, begins, own, memory, bars, formula, scalars, fixed, C, False)
        done += count
        barrier()
        q.store((dq * scalars[0]).to(k_ring.dtype))
        fence_async_shared()
        barrier()
        async_store(DQ, at_row(queries, h, first), q_tile.index(C))
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(C))
        at += 1
        run = posted(at, board, 4)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "slots_q", "slots", "together", "items", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale",
    ]
)  # fmt: skip
def attention_bwd_queries_sm90(
    Q, K, V, DO, SHIFT, CENTRE, DQ, COUNTS, O, LSE, DLSE, CU_Q, CU_K, LISTED, list_stride_b, list_stride_h,
    list_stride_r, o_stride_b, o_stride_s, o_stride_h, mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, slots_q, slots, together, items, scale, fixed,
):  # fmt: skip
    """dQ; `fixed` is what is known when the kernel is compiled (`gluon_fixed.Fixed`)."""
    D: gl.constexpr = K.block_shape[4]
    q_tile = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, 1, HALF, D], Q.layout)
    do_tile = gl.allocate_shared_memory(DO.dtype, [2, 1, 1, 1, HALF, D], DO.layout)
    STAGES: gl.constexpr = 2
    STAGES_V: gl.constexpr = 1 if D > 128 else 2  # as many as fit
    k_ring = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, 1, fixed.block_n, D], K.layout)
    v_ring = gl.allocate_shared_memory(V.dtype, [STAGES_V, 1, 1, 1, fixed.block_n, D], V.layout)
    board = message_board(RUN, 2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)  # of the warpgroups
    own_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], BAR)
    for n in gl.static_range(2):
        mbarrier.init(own_full.index(n), count=1)
        mbarrier.init(own_empty.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=2)
    for n in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(v_empty.index(n), count=2)
    fence_async_shared()

    memory = (q_tile, do_tile, k_ring, v_ring, board)
    bars = (own_full, own_empty, k_full, k_empty, v_full, v_empty)
    grid = (
        (batch, seqlen_q, seqlen_k, slots_q, slots, together, items),
        (mask_args, mask_nums, score_args, score_nums, 0),
        (LISTED if fixed.lists else 0, list_stride_b, list_stride_h, list_stride_r),
        (CU_Q, CU_K) if fixed.packed else (0, 0),
    )
    scalars = (scale, scale * LOG2E)
    given = (O, (o_stride_b, o_stride_s, o_stride_h), LSE, DLSE)
    outputs = (DQ, SHIFT, CENTRE)
    gl.warp_specialize(
        [
            (compute_dq, (given, outputs, memory, bars, grid, scalars, fixed, 0)),
            (compute_dq, (given, outputs, memory, bars, grid, scalars, fixed, 1)),
            (fetch, ((Q, K, V, DO, COUNTS), memory, bars, grid, fixed)),
        ],
        [4, 1],
        [fixed.registers, 24],
    )
