"""FlashAttention-3's forward for Hopper, in Gluon: one warp fetches, two or three warpgroups of 64 queries each
compute, and while one takes exponentials another has the tensor cores (Shah et al., "FlashAttention-3"). A program
stays on its multiprocessor and takes items, tiles of queries, one after the other.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops.attention.gluon_sm90_fetch import fetch, fetch_rows, fetch_values
from tilewise.ops.attention.gluon_sm90_formula import scored, with_hidden
from tilewise.ops.attention.gluon_sm90_runs import RUN, ends_of, first_key, where_of
from tilewise.tiles.arithmetic import LN2, LOG2E, power_below, unit_of_row
from tilewise.tiles.gluon_api import async_store, barrier
from tilewise.tiles.hopper import (
    at_row,
    filled,
    give_turn,
    hidden,
    keep_before_wait,
    keep_scores,
    matrix,
    message_board,
    of_row,
    over_parts,
    parts_of,
    posted,
    product_layout,
    raised,
    rescaled,
    ring_turn,
    thread_max,
    thread_sums,
    tilt_of,
    tilted,
    wait_turn,
    whole,
)
from tilewise.tiles.visit import call_once, proved


@gluon.jit
def tile_of(at, ring, full, fixed):
    """(place, tile) of the `at`-th tile of K or V, once that is there."""
    if fixed.gathered:
        stage, phase = ring_turn(at, ring.shape[0])
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        return stage, ring.index(stage)
    else:
        return filled(at, ring, full, fixed.in_boxes)


@gluon.jit
def scores_of(q, k):
    """Start the product of 64 queries with a tile of keys [BLOCK_N, D]."""
    BLOCK_N: gl.constexpr = k.shape[0]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=product_layout(BLOCK_N))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def first_scores(done, at, memory, bars, fixed, C: gl.constexpr, wanted):
    """Start the scores of an item's first tile, once Q and K are there; if not `wanted`, of what lies there."""
    q_ring, k_ring, _, _, _ = memory
    q_full, _, k_full, _, _, _, _ = bars
    place, phase = ring_turn(at, fixed.ahead)
    spot = place * fixed.consumers + C
    mbarrier.wait(q_full.index(spot), phase, pred=wanted)
    stage, phase = ring_turn(done, fixed.stages)
    mbarrier.wait(k_full.index(stage), phase, pred=wanted)
    q = matrix(q_ring.index(spot))
    if fixed.gathered:
        fence_async_shared()
        return scores_of(q, k_ring.index(stage))
    else:
        return scores_of(q, matrix(k_ring.index(stage), fixed.in_boxes))


@gluon.jit
def final_scores(s, first, masked, rows, c, scale, formula, fixed):
    """What the softmax sees of the products with a tile of keys, from number `first` on."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    tilt = rows[7]
    if fixed.linear is not None:
        s = s * c + (tilt[1] * gl.arange(0, fixed.block_n, layout=COLUMNS).to(gl.float32))[None, :]
    if fixed.scale_first and fixed.score is None:
        s = s * scale
    if fixed.score is not None:
        s = scored(s, first, rows, formula, fixed)
    if fixed.guard and masked:
        s = with_hidden(s, first, rows, formula, fixed)
    return s


@gluon.jit
def softmax_of(s, first, m_old, rows, c, fixed):
    """(probabilities of the running maximum, that maximum, factor for what came before), the latter [64, 4], alike in
    a quad's threads. m is in units of s, or of base 2 where scores are. It moves only by factors above 2**8: nothing
    overflows meanwhile, and what came before is seldom multiplied (Zadouri et al., "FlashAttention-4"). For scores that
    a formula keeps near 0 (`gluon_attention.is_limited`) m is 0, and there is no factor.
    """
    offs_i, tilt = rows[2], rows[7]
    if fixed.limited:
        p, m_new, alpha = gl.exp2(s if fixed.in_base_2 else s * c), m_old, m_old
    else:
        largest = thread_max(s)
        parts = parts_of(s)
        by = 8.0 if fixed.in_base_2 else gl.minimum(8.0 / c, 1e30)
        if fixed.linear is not None:
            more = of_row(tilted(tilt, offs_i, first, 0), largest)
            m_new = raised(m_old, largest + more, by)
        else:
            m_new = raised(m_old, largest, by)
        m_use = m_new
        if fixed.guard or fixed.score is not None:
            HIDDEN: gl.constexpr = hidden(fixed.scale_first or fixed.linear is not None)
            m_use = gl.maximum(m_new, HIDDEN / 2)  # a row that has seen nothing yet
        if fixed.in_base_2:
            alpha = gl.exp2(m_old - m_use)
            p = gl.exp2(parts - over_parts(m_use - more if fixed.linear is not None else m_use, parts))
        elif fixed.score is not None:
            unit = unit_of_row(m_use, c)
            alpha = gl.exp2((m_old - m_use) * unit)
            p = gl.exp2(parts * over_parts(unit, parts) - over_parts(m_use * unit, parts))
        else:
            alpha = gl.exp2((m_old - m_use) * c)
            p = gl.exp2(parts * c - over_parts(m_use * c, parts))
        p = whole(p, s)
    return p, m_new, alpha


@gluon.jit
def dropped(p, first, rows, scalars, fixed):
    """Probabilities of a tile of keys without those that dropout takes."""
    _, _, dropout, _, seed, _ = scalars
    if fixed.dropout:
        keep = keep_scores(seed, rows[0] * fixed.heads + rows[1], rows[2], first, dropout, p)
        p = gl.where(keep, p, 0.0)
    return p


@gluon.jit
def over_tiles(q, done, run, tiles, rows, memory, bars, scalars, formula, fixed):
    """(output before it is divided, sums, maxima) of an item's tiles, one after another: values of a tile whose scores
    are all more than the head's `skip` below the maxima are not multiplied, and neither are its exponentials taken.
    """
    num_partial, count = run[6], run[7]
    scale, c, _, _, _, SKIP = scalars
    skip = gl.load(SKIP + rows[1]) * LOG2E
    _, k_ring, v_ring, _, _ = memory
    _, _, k_full, k_empty, v_full, v_empty, _ = bars
    HEAD_DIM_V: gl.constexpr = v_ring.shape[-1]
    OUT: gl.constexpr = product_layout(HEAD_DIM_V)
    RIGHT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dtype: gl.constexpr = v_ring.dtype
    acc = gl.zeros([64, HEAD_DIM_V], gl.float32, layout=OUT)
    l_i = thread_sums(gl.zeros([64, fixed.block_n], gl.float32, layout=product_layout(fixed.block_n)))
    m_i = l_i + float("-inf")
    for t in range(count):
        first = first_key(t, tiles, fixed)
        stage, k = tile_of(done + t, k_ring, k_full, fixed)
        s = warpgroup_mma_wait(0, deps=(scores_of(q, k),))
        mbarrier.arrive(k_empty.index(stage))
        s = final_scores(s, first, t < num_partial, rows, c, scale, formula, fixed)
        above = gl.max(gl.max(thread_max(s) - m_i, 1), 0)
        stage_v, v = tile_of(done + t, v_ring, v_full, fixed)
        if above * (1.0 if fixed.in_base_2 else c) >= -skip:
            p32, m_i, alpha = softmax_of(s, first, m_i, rows, c, fixed)
            l_i = l_i * alpha + thread_sums(p32)
            p = gl.convert_layout(dropped(p32, first, rows, scalars, fixed).to(dtype), RIGHT, assert_trivial=True)
            acc = rescaled(acc, alpha)
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, v, acc, is_async=True),))
        mbarrier.arrive(v_empty.index(stage_v))
    return acc, l_i, m_i


@gluon.jit
def compute(outputs, memory, bars, grid, scalars, fixed, C: gl.constexpr):
    """One warpgroup: its 64 queries of every item of the program, through all visited tiles. Products of the next tile
    run while this one is exponentiated, and the warpgroups issue theirs in turn. Where Q has two places, the first
    scores of the next item run while this one ends. Where items are and what they visit is read from messages.
    """
    O, LSE, SINK = outputs
    sizes, formula, _, _ = grid
    rows_q = sizes[3]
    mask_args, mask_nums, score_args, score_nums = formula
    scale, c, _, keep_scale, _, _ = scalars
    q_ring, k_ring, v_ring, o_ring, board = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_empty = bars
    HEAD_DIM_V: gl.constexpr = v_ring.shape[-1]
    SCORES: gl.constexpr = product_layout(fixed.block_n)
    OUT: gl.constexpr = product_layout(HEAD_DIM_V)
    RIGHT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    ROW_OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    EARLY: gl.constexpr = fixed.ahead == 2
    dtype: gl.constexpr = v_ring.dtype
    if fixed.consumers - 1 == C and not fixed.skips:
        give_turn(0)
    done = 0
    at = 0
    out = o_ring.index(0 if fixed.outputs == 1 else C)
    run = posted(0, board, 4)
    s = gl.zeros([64, fixed.block_n], gl.float32, layout=SCORES)
    if EARLY:
        s = warpgroup_mma_wait(0, deps=(first_scores(0, 0, memory, bars, fixed, C, run[7] > 0),))
    while run[7] > 0:
        b, h, start, num_partial, count = run[0], run[1], run[3], run[6], run[7]
        queries, _keys, lengths, row0, tiles = where_of(run, grid, fixed, fixed.block_n)
        seqlen_q, seqlen_k = lengths
        own = gl.minimum(start + 64 * C + gl.arange(0, 64, layout=ROW_OF_SCORES), seqlen_q - 1)
        offs_i = proved(own + seqlen_k - seqlen_q, seqlen_k)
        ends = ends_of(run, offs_i, 0, seqlen_k, formula, fixed)
        mask_once = call_once(b, h, offs_i[:, None], mask_args, mask_nums, fixed.mask_once)
        score_once = call_once(b, h, offs_i[:, None], score_args, score_nums, fixed.score_once)
        tilt = tilt_of(b, h, score_args, score_nums, fixed.linear)
        last_key = gl.maximum(seqlen_k - 1, 0)
        rows = (b, h, offs_i, seqlen_k, last_key, ends, (mask_once, score_once), tilt)

        # the first tile
        spot = at % fixed.ahead * fixed.consumers + C
        q = matrix(q_ring.index(spot))
        if fixed.skips:
            mbarrier.wait(q_full.index(spot), ring_turn(at, fixed.ahead)[1])
            acc, l_i, m_i = over_tiles(q, done, run, tiles, rows, memory, bars, scalars, formula, fixed)
            done += count
        else:
            first = first_key(0, tiles, fixed)
            if not EARLY:
                s = warpgroup_mma_wait(0, deps=(first_scores(done, at, memory, bars, fixed, C, True),))
            mbarrier.arrive(k_empty.index(done % fixed.stages))
            m_i = thread_sums(gl.zeros([64, fixed.block_n], gl.float32, layout=SCORES))
            if not fixed.limited:
                m_i += float("-inf")
            s = final_scores(s, first, num_partial > 0, rows, c, scale, formula, fixed)
            p32, m_i, alpha = softmax_of(s, first, m_i, rows, c, fixed)
            l_i = thread_sums(p32)
            p = gl.convert_layout(dropped(p32, first, rows, scalars, fixed).to(dtype), RIGHT, assert_trivial=True)
            acc = gl.zeros([64, HEAD_DIM_V], gl.float32, layout=OUT)

            # the others: scores of tile t and output of tile t - 1 at the same time
            ahead = first_key(gl.minimum(1, count - 1), tiles, fixed)
            for t in range(1, count):
                first = ahead
                ahead = first_key(gl.minimum(t + 1, count - 1), tiles, fixed)
                stage, k = tile_of(done + t, k_ring, k_full, fixed)
                wait_turn(C)
                coming = scores_of(q, k)
                stage_v, v = tile_of(done + t - 1, v_ring, v_full, fixed)
                acc = warpgroup_mma(p, v, acc, is_async=True)
                give_turn((C + 1) % fixed.consumers)
                s = warpgroup_mma_wait(1, deps=(coming,))
                mbarrier.arrive(k_empty.index(stage))
                s = final_scores(s, first, t < num_partial, rows, c, scale, formula, fixed)
                p32, m_i, alpha = softmax_of(s, first, m_i, rows, c, fixed)
                sums = thread_sums(p32)
                l_i = l_i + sums if fixed.limited else l_i * alpha + sums
                keep_before_wait(sums)
                p32 = dropped(p32, first, rows, scalars, fixed)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(stage_v))
                p = gl.convert_layout(p32.to(dtype), RIGHT, assert_trivial=True)
                if not fixed.limited:
                    acc = rescaled(acc, alpha)
            done += count

        # the last output; the next item, and its first scores, meanwhile
        mbarrier.arrive(q_empty.index(spot))
        if not fixed.skips:
            stage_v, v = tile_of(done - 1, v_ring, v_full, fixed)
            acc = warpgroup_mma(p, v, acc, is_async=True)
        after = posted(at + 1, board, 4)
        if EARLY:
            s = first_scores(done, at + 1, memory, bars, fixed, C, after[7] > 0)

        # the end
        l_row = gl.convert_layout(gl.sum(l_i, 1), ROW, assert_trivial=True)
        m_i = gl.convert_layout(gl.max(m_i, 1), ROW, assert_trivial=True)
        m2 = m_i if fixed.in_base_2 else m_i * c  # base 2 from here on
        factor = keep_scale
        if fixed.sinks:
            sink2 = gl.load(SINK + h).to(gl.float32) * LOG2E
            m_all = gl.maximum(m2, sink2)
            m_all = gl.where(m_all == float("-inf"), 0.0, m_all)
            factor = power_below(m2, m_all)
            l_row = l_row * factor + power_below(sink2, m_all)
            factor = factor * keep_scale
            m2 = m_all
        empty = l_row == 0.0
        l_safe = gl.where(empty, 1.0, l_row)
        lse = gl.where(empty, float("-inf"), (m2 + gl.log2(l_safe)) * LN2)
        offs_m = start + 64 * C + gl.arange(0, 64, layout=ROW)
        row = h.to(gl.int64) * rows_q + row0 if fixed.packed else (b * fixed.heads + h).to(gl.int64) * rows_q
        gl.store(LSE + row + offs_m, lse, mask=offs_m < seqlen_q)
        if not fixed.skips:
            acc = warpgroup_mma_wait(1 if EARLY else 0, deps=(acc,))
            mbarrier.arrive(v_empty.index(stage_v))
        o = (acc * (factor / l_safe)[:, None]).to(dtype)
        if fixed.outputs == 1:
            mbarrier.wait(o_empty, ((at * fixed.consumers + C) & 1) ^ 1)  # of the warpgroup before
        else:
            tma.store_wait(0)  # of the item before
            barrier()
        matrix(out).store(o)
        fence_async_shared()
        barrier()
        async_store(O, at_row(queries, h, start + 64 * C), out)
        if fixed.outputs == 1:
            tma.store_wait(0)
            mbarrier.arrive(o_empty)
        if EARLY:
            s = warpgroup_mma_wait(0, deps=(s,))
        at += 1
        run = after
    tma.store_wait(0)


@gluon.jit
def ring_of_keys(like, fixed):
    """Places for tiles of K or V, in the layout of Q's or O's; rows that are gathered lie in matrices."""
    D: gl.constexpr = like.block_shape[4]
    dtype: gl.constexpr = like.dtype
    if fixed.gathered:
        MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, D], dtype)
        return gl.allocate_shared_memory(dtype, [fixed.stages, fixed.block_n, D], MATRIX)
    else:
        return gl.allocate_shared_memory(dtype, [fixed.stages, 1, 1, 1, fixed.block_n, D], like.layout)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "items", "list_stride_b", "list_stride_h",
        "list_stride_r", "stride_t", "mask_nums", "score_nums", "scale", "dropout", "keep_scale",
    ]
)  # fmt: skip
def attention_fwd_sm90(
    Q, K, V, SINK, O, LSE, CU_Q, CU_K, SEED, SKIP, LISTED, list_stride_b, list_stride_h, list_stride_r,
    NEXT, TABLE, FIRST, stride_t, STRIDES, mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, items, scale, dropout, keep_scale, fixed,
):  # fmt: skip
    """`fixed` is what is known when the kernel is compiled (`gluon_fixed.Fixed`). Where requests of few queries are
    another launch's, that may start, and NEXT are the shares of the multiprocessors (`triton_work.write_shares`).
    """
    tl.extra.cuda.gdc_wait()  # for what has been dealt out to be 0, where it is launched early
    if fixed.few is not None:
        tl.extra.cuda.gdc_launch_dependents()
        if gl.program_id(0) >= gl.num_programs(0) - gl.load(NEXT + 1):
            return
    # shared memory: rings of tiles, and for each place a barrier that says it is full and one that says it is empty
    D: gl.constexpr = Q.block_shape[4]
    D_V: gl.constexpr = O.block_shape[4]
    q_ring = gl.allocate_shared_memory(Q.dtype, [fixed.ahead * fixed.consumers, 1, 1, 1, 64, D], Q.layout)
    k_ring = ring_of_keys(Q, fixed)
    v_ring = ring_of_keys(O, fixed)
    o_ring = gl.allocate_shared_memory(O.dtype, [fixed.outputs, 1, 1, 1, 64, D_V], O.layout)
    board = message_board(RUN, fixed.consumers + 1 if fixed.in_boxes else fixed.consumers)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [fixed.ahead * fixed.consumers, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [fixed.ahead * fixed.consumers, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    o_empty = 0
    if fixed.outputs == 1:
        o_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(o_empty, count=1)
    for c in gl.static_range(fixed.ahead * fixed.consumers):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for stage in gl.static_range(fixed.stages):
        mbarrier.init(k_full.index(stage), count=128 if fixed.gathered else 1)
        mbarrier.init(v_full.index(stage), count=128 if fixed.gathered else 1)
        mbarrier.init(k_empty.index(stage), count=fixed.consumers)
        mbarrier.init(v_empty.index(stage), count=fixed.consumers)
    fence_async_shared()

    # roles
    memory = (q_ring, k_ring, v_ring, o_ring, board)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, o_empty)
    sizes = (batch, seqlen_q, seqlen_k, rows_q, slots, together, items)
    listed = LISTED if fixed.lists else 0
    lists = (listed, list_stride_b, list_stride_h, list_stride_r)
    cu_seqlens = (CU_Q if fixed.packed else 0, CU_K if fixed.packed or fixed.paged else 0)
    grid = (sizes, (mask_args, mask_nums, score_args, score_nums + (scale,)), lists, cu_seqlens)  # noqa: RUF005
    pages = (TABLE, FIRST, stride_t, STRIDES)
    if fixed.in_boxes:
        mended = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
        for n in gl.static_range(2):
            mbarrier.init(mended.index(n), count=1)
        fence_async_shared()
        pages = (TABLE, FIRST, stride_t, mended)
    inputs = (Q, K, V, NEXT if fixed.dealt or fixed.meets is not None else 0, pages)
    outputs = (O, LSE, SINK if fixed.sinks else LSE)
    seed = gl.load(SEED) if fixed.dropout else 0
    c = LOG2E if fixed.scale_first else scale * LOG2E
    scalars = (scale, c, dropout, keep_scale, seed, SKIP if fixed.skips else 0)
    # (a tuple that holds functions has no name of its own in Gluon: the roles are listed once for each number of them)
    R: gl.constexpr = fixed.registers
    gl.static_assert(fixed.consumers == 2 or not fixed.paged, "over pages two warpgroups compute")
    if fixed.gathered:
        gl.warp_specialize(
            [
                (compute, (outputs, memory, bars, grid, scalars, fixed, 0)),
                (compute, (outputs, memory, bars, grid, scalars, fixed, 1)),
                (fetch_rows, (inputs, memory, bars, grid, fixed)),
            ],
            [4, 4],
            [R, fixed.registers_of_fetch],
        )
    elif fixed.in_boxes:
        gl.warp_specialize(
            [
                (compute, (outputs, memory, bars, grid, scalars, fixed, 0)),
                (compute, (outputs, memory, bars, grid, scalars, fixed, 1)),
                (fetch, (inputs, memory, bars, grid, fixed)),
                (fetch_values, (inputs, memory, bars, grid, fixed)),
            ],
            [4, 1, 1],
            [R, 24, 24],
        )
    elif fixed.consumers == 2:
        gl.warp_specialize(
            [
                (compute, (outputs, memory, bars, grid, scalars, fixed, 0)),
                (compute, (outputs, memory, bars, grid, scalars, fixed, 1)),
                (fetch, (inputs, memory, bars, grid, fixed)),
            ],
            [4, 1],
            [R, 24],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (outputs, memory, bars, grid, scalars, fixed, 0)),
                (compute, (outputs, memory, bars, grid, scalars, fixed, 1)),
                (compute, (outputs, memory, bars, grid, scalars, fixed, 2)),
                (fetch, (inputs, memory, bars, grid, fixed)),
            ],
            [4, 4, 1],
            [R, R, 24],
        )
