"""FlashAttention-3's forward for Hopper, in Gluon: one warp fetches, two or three warpgroups of 64 queries each
compute, and while one takes exponentials another has the tensor cores (Shah et al., "FlashAttention-3").
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

from tilewise.tiles.arithmetic import LN2, LOG2E
from tilewise.tiles.gluon_api import async_load, async_store, barrier
from tilewise.tiles.hopper import (
    fill,
    filled,
    give_turn,
    keep_before_wait,
    product_layout,
    row_max,
    thread_sums,
    wait_turn,
)
from tilewise.tiles.visit import call_once, row_ends, snake, take_turns, turns_of, visit_any, visits


@gluon.jit
def tile_of(
    item, sizes, formula, lists, HEADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    LISTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """((b, h, first query), visited tiles of keys, their number) of an item of the grid: the last queries, which see
    most under a causal mask, come first.
    """
    batch, seqlen_q, seqlen_k, _, slots, together = sizes
    mask_args, mask_nums, _, _ = formula
    listed, list_stride_b, list_stride_h, list_stride_r = lists
    pair, turn = take_turns(item, slots, batch * HEADS, together)
    slot = slots - 1 - turn
    h = pair % HEADS
    b = pair // HEADS
    start_m = slot * BLOCK_M
    i0 = start_m + seqlen_k - seqlen_q
    i1 = gl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
    if LISTS:
        listed = listed + (b.to(gl.int64) * list_stride_b + h.to(gl.int64) * list_stride_h + slot) * list_stride_r
    begin, full_begin, num_full, num_partial = visits(
        b, h, i0, i1, 0, seqlen_k, mask_args, mask_nums, listed, LISTS, TILES, BLOCK_N
    )
    num_partial = gl.maximum(num_partial, 1 - num_full)  # who sees nothing visits one tile, all of it hidden
    last = (seqlen_k + BLOCK_N - 1) // BLOCK_N - 1
    tiles = (begin, full_begin, num_full, num_partial, last, listed, list_stride_r)
    return (b, h, start_m), tiles, num_full + num_partial


@gluon.jit
def fetch(
    tensors, memory, bars, grid, HEADS: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, LISTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """The warp that fetches: K of a tile before V of the one before it, as the products ask for them."""
    Q, K, V = tensors
    q_ring, k_ring, v_ring, _ = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    items, sizes, formula, lists = grid
    workers = gl.num_programs(0)
    done = 0
    for turn in range(turns_of(gl.program_id(0), workers, items)):
        item = snake(turn, gl.program_id(0), workers)
        place, tiles, count = tile_of(item, sizes, formula, lists, HEADS, 64 * CONSUMERS, BLOCK_N, LISTS, TILES)
        b, h, start_m = place
        n = visit_any(0, tiles, LISTS)
        fill(K, done, b, h // GROUP, n * BLOCK_N, k_ring, k_full, k_empty)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), q_ring.shape[3] * q_ring.shape[4] * 2)
            async_load(Q, [b, h, start_m + 64 * c, 0], q_full.index(c), q_ring.index(c))
        for t in range(1, count):
            after = visit_any(t, tiles, LISTS)
            fill(K, done + t, b, h // GROUP, after * BLOCK_N, k_ring, k_full, k_empty)
            fill(V, done + t - 1, b, h // GROUP, n * BLOCK_N, v_ring, v_full, v_empty)
            n = after
        done += count
        fill(V, done - 1, b, h // GROUP, n * BLOCK_N, v_ring, v_full, v_empty)


@gluon.jit
def scores_of(q, k):
    """Start the product of 64 queries with a tile of keys [BLOCK_N, D]."""
    BLOCK_N: gl.constexpr = k.shape[0]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=product_layout(BLOCK_N))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def softmax_of(
    s, n, m_old, masked, offs_i, ends, c, scale, b, h, seqlen_k, onces, formula, BLOCK_N: gl.constexpr,
    VISIBLE: gl.constexpr, SCORE: gl.constexpr, SCALE_FIRST: gl.constexpr, GUARD: gl.constexpr,
):  # fmt: skip
    """(probabilities of the running maximum, that maximum, factor for what came before); m is in units of s."""
    LAYOUT: gl.constexpr = s.type.layout
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    mask_args, mask_nums, score_args, score_nums = formula
    mask_once, score_once = onces
    first_j, last_j = ends
    offs_n = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=COLUMNS)
    if SCALE_FIRST:
        s = s * scale
    if SCORE is not None:
        offs_j = gl.minimum(offs_n, seqlen_k - 1) if len(score_args) > 0 else offs_n
        s = SCORE(s, b, h, offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
    if GUARD and masked:
        if VISIBLE is not None:
            offs_j = gl.minimum(offs_n, seqlen_k - 1)
            seen = VISIBLE(b, h, offs_i[:, None], offs_j[None, :], mask_once, mask_args, mask_nums)
            seen = seen & (offs_n < seqlen_k)[None, :]
        else:
            seen = (offs_n[None, :] >= first_j[:, None]) & (offs_n[None, :] <= last_j[:, None])
        s = gl.where(seen, s, float("-inf"))
    ROW: gl.constexpr = m_old.type.layout
    m_new = gl.maximum(m_old, row_max(s, ROW))
    m_use = m_new
    if GUARD or SCORE is not None:
        m_use = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    alpha = gl.exp2((m_old - m_use) * c)
    shift = gl.convert_layout(m_use * c, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.exp2(s * c - shift[:, None]), m_new, alpha


@gluon.jit
def compute(
    tensors, memory, bars, grid, scalars, C: gl.constexpr, HEADS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, LISTS: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, MASK_ONCE: gl.constexpr,
    VISIBLE: gl.constexpr, SCORE_ONCE: gl.constexpr, SCORE: gl.constexpr, SCALE_FIRST: gl.constexpr,
    GUARD: gl.constexpr, SINKS: gl.constexpr, O_APART: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries through all visited tiles. Products of the next tile run while this one is
    exponentiated, and the warpgroups issue theirs in turn.
    """
    O, LSE, SINK = tensors
    q_ring, k_ring, v_ring, o_ring = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    items, sizes, formula, lists = grid
    _, seqlen_q, seqlen_k, rows_q, _, _ = sizes
    scale, keep_scale = scalars
    mask_args, mask_nums, score_args, score_nums = formula
    HEAD_DIM_V: gl.constexpr = v_ring.shape[4]
    OUT: gl.constexpr = product_layout(HEAD_DIM_V)
    RIGHT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    SCORES: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    dtype: gl.constexpr = v_ring.dtype
    c = LOG2E if SCALE_FIRST else scale * LOG2E
    q = q_ring.index(C).reshape([64, q_ring.shape[4]])
    out = o_ring.index(C)

    if C == CONSUMERS - 1:
        give_turn(0)
    workers = gl.num_programs(0)
    done = 0
    for turn in range(turns_of(gl.program_id(0), workers, items)):
        item = snake(turn, gl.program_id(0), workers)
        place, tiles, count = tile_of(item, sizes, formula, lists, HEADS, 64 * CONSUMERS, BLOCK_N, LISTS, TILES)
        b, h, start_m = place
        num_partial = tiles[3]
        offs_i = gl.minimum(start_m + 64 * C + gl.arange(0, 64, layout=SCORES), seqlen_q - 1) + (seqlen_k - seqlen_q)
        ends = row_ends(b, h, offs_i, 0, seqlen_k, mask_args, mask_nums, ROWS)
        mask_once = call_once(b, h, offs_i[:, None], mask_args, mask_nums, MASK_ONCE)
        score_once = call_once(b, h, offs_i[:, None], score_args, score_nums, SCORE_ONCE)
        onces = (mask_once, score_once)

        # the first tile
        n = visit_any(0, tiles, LISTS)
        mbarrier.wait(q_full.index(C), turn & 1)
        stage, k = filled(done, k_ring, k_full)
        s = warpgroup_mma_wait(0, deps=(scores_of(q, k),))
        mbarrier.arrive(k_empty.index(stage))
        m_i = gl.full([64], float("-inf"), gl.float32, layout=ROW)
        p32, m_i, alpha = softmax_of(
            s, n, m_i, num_partial > 0, offs_i, ends, c, scale, b, h, seqlen_k, onces, formula, BLOCK_N, VISIBLE,
            SCORE, SCALE_FIRST, GUARD,
        )  # fmt: skip
        l_i = thread_sums(p32)
        p = gl.convert_layout(p32.to(dtype), RIGHT, assert_trivial=True)
        acc = gl.zeros([64, HEAD_DIM_V], gl.float32, layout=OUT)

        # the others: scores of tile t and output of tile t - 1 at the same time
        ahead = visit_any(gl.minimum(1, count - 1), tiles, LISTS)
        for t in range(1, count):
            n = ahead
            ahead = visit_any(gl.minimum(t + 1, count - 1), tiles, LISTS)
            stage, k = filled(done + t, k_ring, k_full)
            wait_turn(C)
            coming = scores_of(q, k)
            stage_v, v = filled(done + t - 1, v_ring, v_full)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            give_turn((C + 1) % CONSUMERS)
            s = warpgroup_mma_wait(1, deps=(coming,))
            mbarrier.arrive(k_empty.index(stage))
            p32, m_i, alpha = softmax_of(
                s, n, m_i, t < num_partial, offs_i, ends, c, scale, b, h, seqlen_k, onces, formula, BLOCK_N, VISIBLE,
                SCORE, SCALE_FIRST, GUARD,
            )  # fmt: skip
            sums = thread_sums(p32)
            beta = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
            l_i = l_i * beta[:, None] + sums
            keep_before_wait(sums)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(stage_v))
            p = gl.convert_layout(p32.to(dtype), RIGHT, assert_trivial=True)
            acc = acc * alpha[:, None]
        done += count

        # the last output, and the end
        if O_APART:
            mbarrier.arrive(q_empty.index(C))
        stage_v, v = filled(done - 1, v_ring, v_full)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        l_row = gl.convert_layout(gl.sum(l_i, 1), ROW, assert_trivial=True)
        m2 = m_i * c  # base 2 from here on
        factor = keep_scale
        if SINKS:
            sink2 = gl.load(SINK + h).to(gl.float32) * LOG2E
            m_all = gl.maximum(m2, sink2)
            m_all = gl.where(m_all == float("-inf"), 0.0, m_all)
            factor = gl.exp2(m2 - m_all)
            l_row = l_row * factor + gl.exp2(sink2 - m_all)
            factor = factor * keep_scale
            m2 = m_all
        empty = l_row == 0.0
        l_safe = gl.where(empty, 1.0, l_row)
        lse = gl.where(empty, float("-inf"), (m2 + gl.log2(l_safe)) * LN2)
        offs_m = start_m + 64 * C + gl.arange(0, 64, layout=ROW)
        gl.store(LSE + (b * HEADS + h).to(gl.int64) * rows_q + offs_m, lse, mask=offs_m < seqlen_q)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage_v))
        o = (acc * (factor / l_safe)[:, None]).to(dtype)
        if O_APART:
            tma.store_wait(0)  # of the tile before
            barrier()
        out.reshape([64, HEAD_DIM_V]).store(o)
        fence_async_shared()
        barrier()
        async_store(O, [b, h, start_m + 64 * C, 0], out)
        if not O_APART:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(C))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "items", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale", "dropout", "keep_scale",
    ]
)  # fmt: skip
def attention_fwd_sm90(
    Q, K, V, SINK, O, LSE, CU_Q, CU_K, SEED, LISTED, list_stride_b, list_stride_h, list_stride_r,
    mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, items, scale, dropout, keep_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    LISTS: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, MASK_ONCE: gl.constexpr, VISIBLE: gl.constexpr,
    SCORE_ONCE: gl.constexpr, SCORE: gl.constexpr, SCALE_FIRST: gl.constexpr, GUARD: gl.constexpr,
    O_APART: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    # shared memory: rings of tiles, and for each place a barrier that says it is full and one that says it is empty
    D: gl.constexpr = Q.block_shape[3]
    D_V: gl.constexpr = V.block_shape[3]
    q_ring = gl.allocate_shared_memory(Q.dtype, [CONSUMERS, 1, 1, 64, D], Q.layout)
    k_ring = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_N, D], K.layout)
    v_ring = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, BLOCK_N, D_V], V.layout)
    o_ring = gl.allocate_shared_memory(O.dtype, [CONSUMERS, 1, 1, 64, D_V], O.layout) if O_APART else q_ring
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    # roles
    SINKS: gl.constexpr = SINK is not None
    memory = (q_ring, k_ring, v_ring, o_ring)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (batch, seqlen_q, seqlen_k, rows_q, slots, together)
    listed = LISTED if LISTS else 0
    lists = (listed, list_stride_b, list_stride_h, list_stride_r)
    grid = (items, sizes, (mask_args, mask_nums, score_args, score_nums), lists)
    results = (O, LSE, SINK if SINKS else LSE)
    scalars = (scale, keep_scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    compute,
                    (results, memory, bars, grid, scalars, 0, HEADS, CONSUMERS, BLOCK_N, LISTS, TILES, ROWS, MASK_ONCE,
                     VISIBLE, SCORE_ONCE, SCORE, SCALE_FIRST, GUARD, SINKS, O_APART),
                ),
                (
                    compute,
                    (results, memory, bars, grid, scalars, 1, HEADS, CONSUMERS, BLOCK_N, LISTS, TILES, ROWS, MASK_ONCE,
                     VISIBLE, SCORE_ONCE, SCORE, SCALE_FIRST, GUARD, SINKS, O_APART),
                ),
                (fetch, ((Q, K, V), memory, bars, grid, HEADS, GROUP, CONSUMERS, BLOCK_N, LISTS, TILES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    compute,
                    (results, memory, bars, grid, scalars, 0, HEADS, CONSUMERS, BLOCK_N, LISTS, TILES, ROWS, MASK_ONCE,
                     VISIBLE, SCORE_ONCE, SCORE, SCALE_FIRST, GUARD, SINKS, O_APART),
                ),
                (
                    compute,
                    (results, memory, bars, grid, scalars, 1, HEADS, CONSUMERS, BLOCK_N, LISTS, TILES, ROWS, MASK_ONCE,
                     VISIBLE, SCORE_ONCE, SCORE, SCALE_FIRST, GUARD, SINKS, O_APART),
                ),
                (
                    compute,
                    (results, memory, bars, grid, scalars, 2, HEADS, CONSUMERS, BLOCK_N, LISTS, TILES, ROWS, MASK_ONCE,
                     VISIBLE, SCORE_ONCE, SCORE, SCALE_FIRST, GUARD, SINKS, O_APART),
                ),
                (fetch, ((Q, K, V), memory, bars, grid, HEADS, GROUP, CONSUMERS, BLOCK_N, LISTS, TILES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
