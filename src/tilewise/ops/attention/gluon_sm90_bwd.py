"""FlashAttention-3's backward for Hopper, in Gluon: a program owns 128 keys, 64 for each of two warpgroups, which hold
dK and dV in registers; one warp fetches tiles of queries, another adds tiles of dQ to memory.

Scores are held transposed, so that P and dS enter the products with dO and Q from registers. dQ needs dS of all 128
keys: it goes through shared memory, and its product is taken one tile later, so that the warpgroups need not keep step.
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

from tilewise.ops.attention.gluon_sm90_sums import count_up, place_in_order, wait_for_count
from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.gluon_api import async_add, async_load, async_store, barrier, reinterpret
from tilewise.tiles.hopper import (
    at_row,
    filled,
    keep_tile_before_wait,
    matrix,
    only_within,
    product_layout,
    ring_turn,
    sequence,
    tile_bytes,
    tilt_of,
    tilted,
    wait_for_both,
    with_columns,
)
from tilewise.tiles.visit import call_once, locate, row_ends, snake, take_turns, turns_of, visit_any, visits

KEYS = gl.constexpr(128)  # of a program
STAGES = gl.constexpr(2)  # tiles of queries, and of dO, in shared memory
AHEAD = gl.constexpr(2)  # tiles of keys: those of the next item are fetched meanwhile
POSTS = gl.constexpr(2)  # runs that are posted at a time
NUMBERS = gl.constexpr(9)  # of a run


@gluon.jit
def runs_of(grid, fixed):
    """How many runs (see `run_of`) a program has."""
    return turns_of(gl.program_id(0), gl.num_programs(0), grid[0][6]) * fixed.group


@gluon.jit
def run_of(at, grid, fixed, BLOCK_M: gl.constexpr):
    """A program's `at`-th run over tiles of queries: those of one head, for the keys of one item of the grid. The heads
    of a group follow each other. Items with the first keys, which most see under a causal mask, go first, or last where
    dQ is added to in order (`place_in_order`). Packed sequences have items to spare, which visit nothing.

    Returns (batch, head, row of tiles in a list, first key, first visited tile, first FULL one, how many are FULL, how
    many are not, how many tiles it visits).
    """
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    sizes, formula, _, cu_seqlens = grid
    batch, seqlen_q, seqlen_k, _slots_q, slots, together, _items = sizes
    mask_args, mask_nums, _, _, _ = formula
    CU_Q, CU_K = cu_seqlens
    item = snake(at // fixed.group, gl.program_id(0), gl.num_programs(0))
    pair, slot = take_turns(item, slots, HEADS_KV if fixed.packed else batch * HEADS_KV, together)
    b = pair // HEADS_KV
    h = pair % HEADS_KV * fixed.group + at % fixed.group
    n = slots - 1 - slot if fixed.ordered else slot
    if fixed.packed:
        b, n = locate(slot, CU_K, batch, KEYS)
    _queries, _row0, seqlen_q = sequence(b, CU_Q, seqlen_q, fixed.packed)
    _keys, _row0, seqlen_k = sequence(b, CU_K, seqlen_k, fixed.packed)
    start = n * KEYS
    j1 = gl.minimum(start + KEYS, seqlen_k) - 1
    begin, full_begin, num_full, num_partial = visits(
        b, h, start, j1, seqlen_k - seqlen_q, seqlen_q, mask_args, mask_nums, list_of(b, h, slot, grid, fixed),
        fixed.lists, fixed.tiles, BLOCK_M,
    )  # fmt: skip
    num_partial = gl.maximum(num_partial, 1 - num_full)  # keys that nobody sees visit one tile, all of it hidden
    count = num_full + num_partial
    if fixed.packed:
        count = gl.where(start < seqlen_k, count, 0)
    return b, h, slot, start, begin, full_begin, num_full, num_partial, count


@gluon.jit
def list_of(b, h, slot, grid, fixed):
    """The list of tiles of a row, where there are lists."""
    listed, list_stride_b, list_stride_h, list_stride_r = grid[2]
    if fixed.lists:
        listed = listed + (b.to(gl.int64) * list_stride_b + h.to(gl.int64) * list_stride_h + slot) * list_stride_r
    return listed


@gluon.jit
def where_of(run, grid, fixed, BLOCK_M: gl.constexpr):
    """(queries, keys, (their numbers), row of its sequence, the visited tiles) of a run."""
    b, h, slot, _start, begin, full_begin, num_full, num_partial, _count = run
    _batch, seqlen_q, seqlen_k, _slots_q, _slots, _together, _items = grid[0]
    CU_Q, CU_K = grid[3]
    queries, row0, seqlen_q = sequence(b, CU_Q, seqlen_q, fixed.packed)
    keys, _row0, seqlen_k = sequence(b, CU_K, seqlen_k, fixed.packed)
    last = (seqlen_q + BLOCK_M - 1) // BLOCK_M - 1
    tiles = (begin, full_begin, num_full, num_partial, last, list_of(b, h, slot, grid, fixed), grid[2][3])
    return queries, keys, (seqlen_q, seqlen_k), row0, tiles


@gluon.jit
def post(run, at, posts, post_full, post_empty):
    """Write a program's `at`-th run where the other roles read it. One of them works it out: its numbers, and what
    they come from, would cost the others registers that products need.
    """
    place, phase = ring_turn(at, POSTS)
    mbarrier.wait(post_empty.index(place), phase ^ 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for n in gl.static_range(NUMBERS):
        posts.index(place * NUMBERS + n).store(gl.full([1], run[n], gl.int32, layout=LAYOUT))
    mbarrier.arrive(post_full.index(place))


@gluon.jit
def posted(at, posts, post_full, post_empty, WARPS: gl.constexpr):
    """A program's `at`-th run."""
    place, phase = ring_turn(at, POSTS)
    mbarrier.wait(post_full.index(place), phase)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    run = ()
    for n in gl.static_range(NUMBERS):
        run = run + (gl.sum(posts.index(place * NUMBERS + n).load(LAYOUT), 0),)  # noqa: RUF005 (unknown to Triton)
    mbarrier.arrive(post_empty.index(place))
    return run


@gluon.jit
def fetch(inputs, memory, bars, grid, fixed):
    """The warp that fetches: K and V of an item, then Q with its shifts and dO with its centres, tile by tile."""
    Q, K, V, DO, SHIFT, CENTRE = inputs
    k_ring, v_tile, q_ring, do_ring, shift_ring, centre_ring, _, _, _, posts = memory
    k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty, _, _, _, _, _, _, post_full, post_empty = bars
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    slots_q = grid[0][3]
    done = 0
    turn = 0  # of items that visit something
    for at in range(runs_of(grid, fixed)):
        run = run_of(at, grid, fixed, BLOCK_M)
        post(run, at, posts, post_full, post_empty)
        b, h, _slot, start, _begin, _full_begin, _num_full, _num_partial, count = run
        queries, keys, _lengths, row0, tiles = where_of(run, grid, fixed, BLOCK_M)
        tile0 = (h if fixed.packed else b * fixed.heads + h) * slots_q
        if fixed.packed:
            tile0 += row0 // BLOCK_M + b
        g = at % fixed.group
        if g == 0 and count > 0:
            spot, phase = ring_turn(turn, AHEAD)
            mbarrier.wait(k_empty.index(spot), phase ^ 1)
            mbarrier.expect(k_full.index(spot), 2 * tile_bytes(k_ring))
            for c in gl.static_range(2):
                from_row = at_row(keys, h // fixed.group, start + 64 * c)
                async_load(K, from_row, k_full.index(spot), k_ring.index(spot * 2 + c))
        for t in range(count):
            m = visit_any(t, tiles, fixed.lists)
            stage, phase = ring_turn(done, STAGES)
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), tile_bytes(q_ring) + BLOCK_M * 4)
            async_load(Q, at_row(queries, h, m * BLOCK_M), q_full.index(stage), q_ring.index(stage))
            async_load(SHIFT, [tile0 + m, 0], q_full.index(stage), shift_ring.index(stage))
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            mbarrier.expect(do_full.index(stage), tile_bytes(do_ring) + BLOCK_M * 4)
            async_load(DO, at_row(queries, h, m * BLOCK_M), do_full.index(stage), do_ring.index(stage))
            async_load(CENTRE, [tile0 + m, 0], do_full.index(stage), centre_ring.index(stage))
            if g + t == 0:  # last: its place is the last to be free
                mbarrier.wait(v_empty, (turn & 1) ^ 1)
                mbarrier.expect(v_full, 2 * tile_bytes(v_tile))
                for c in gl.static_range(2):
                    async_load(V, at_row(keys, h // fixed.group, start + 64 * c), v_full, v_tile.index(c))
            done += 1
        turn += ((g == fixed.group - 1) & (count > 0)).to(gl.int32)


@gluon.jit
def send(outputs, memory, bars, grid, fixed):
    """The warp that writes: it adds tiles of dQ to memory, each warpgroup's share by itself, and sends dV and dK of an
    item out of the places of K and dS.
    """
    SUM, DK, DV, ADDED = outputs
    k_ring, _, q_ring, _, _, _, _, dq_tile, dk_ring, posts = memory
    _, k_empty, _, _, _, _, _, _, dq_full, dq_empty, _, _, out_full, out_empty, post_full, post_empty = bars
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    done = 0
    turn = 0  # of items that visit something
    for at in range(runs_of(grid, fixed)):
        run = posted(at, posts, post_full, post_empty, 1)
        b, h, _slot, start, _begin, _full_begin, _num_full, _num_partial, count = run
        queries, keys, lengths, _row0, tiles = where_of(run, grid, fixed, BLOCK_M)
        for t in range(count):
            m = visit_any(t, tiles, fixed.lists)
            first = at_row(queries, h, m * BLOCK_M)
            if fixed.ordered:
                added = ADDED + (b * fixed.heads + h) * grid[0][3] + m
                place = place_in_order(start // KEYS, m, lengths, fixed, BLOCK_M, KEYS)
                wait_for_count(added, place)
            for c in gl.static_range(2):
                mbarrier.wait(dq_full.index(c), done & 1)
                if BLOCK_M == 64:  # half of the columns
                    async_add(SUM, [first[0], first[1], h, first[3], c * dq_tile.shape[5]], dq_tile.index(c))
                else:  # half of the rows
                    async_add(SUM, [first[0], first[1], h, first[3] + 64 * c, 0], dq_tile.index(c))
            tma.store_wait(1)
            mbarrier.arrive(dq_empty.index(0))
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(1))
            if fixed.ordered:
                count_up(added, place)
            done += 1
        if at % fixed.group == fixed.group - 1 and count > 0:
            spot, _phase = ring_turn(turn, AHEAD)
            for c in gl.static_range(2):
                mbarrier.wait(out_full.index(c), turn & 1)
                from_row = at_row(keys, h // fixed.group, start + 64 * c)
                async_store(DV, from_row, k_ring.index(spot * 2 + c))
                async_store(DK, from_row, dk_ring.index(c))
            tma.store_wait(0)
            mbarrier.arrive(k_empty.index(spot))
            mbarrier.arrive(out_empty)
            turn += 1


@gluon.jit
def of_queries(ring, stage, LAYOUT: gl.constexpr):
    """A number for each query of a tile [1, M], along the columns of its transposed scores."""
    return ring.index(stage).load(LAYOUT)


@gluon.jit
def product_from(start, a, rows):
    """Start a [64, D] times the transpose of rows [M, D], on top of `start` [1, M]."""
    M: gl.constexpr = rows.shape[0]
    acc = gl.zeros([64, M], gl.float32, layout=product_layout(M)) + start
    return warpgroup_mma(a, rows.permute((1, 0)), acc, is_async=True)


@gluon.jit
def issue_dq(k_ring, spot, ds_ring, place, C: gl.constexpr):
    """Start this warpgroup's share of dQ = dS K: half of the columns of 64 queries, or half of the rows of 128."""
    BLOCK_M: gl.constexpr = ds_ring.shape[2]
    D: gl.constexpr = k_ring.shape[5]
    W: gl.constexpr = D // 2 if BLOCK_M == 64 else D
    dq = gl.zeros([64, W], gl.float32, layout=product_layout(W))
    for half in gl.static_range(2):
        ds = ds_ring.index(place * 2 + half)
        k = matrix(k_ring.index(spot * 2 + half))
        if BLOCK_M == 64:
            dq = warpgroup_mma(ds.permute((1, 0)), k.slice(C * W, W, dim=1), dq, use_acc=half > 0, is_async=True)
        else:
            dq = warpgroup_mma(ds.slice(C * 64, 64, dim=1).permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def hand_over(x, place, full):
    """Hand a tile to the warp that writes."""
    place.store(x)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full)


@gluon.jit
def put_dq(dq, done, dq_tile, dq_full, dq_empty, C: gl.constexpr):
    """Hand over a share of dQ."""
    mbarrier.wait(dq_empty.index(C), (done & 1) ^ 1)
    hand_over(dq, matrix(dq_tile.index(C)), dq_full.index(C))


@gluon.jit
def start_scores(stage, k, q, tilt, shift_ring, scalars, fixed):
    """Start the transposed scores of a tile of queries."""
    BLOCK_M: gl.constexpr = q.shape[0]
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    if fixed.scale_first:
        zeros = gl.zeros([64, BLOCK_M], gl.float32, layout=SCORES)
        s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        start = of_queries(shift_ring, stage, SCORES)
        if fixed.linear is not None:
            columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES)).to(gl.float32)
            start = start + (tilt[0] / scalars[1] * columns)[None, :]
        s = product_from(start, k, q)
    return s


@gluon.jit
def step(
    dk, dv, done, m, k, v, mine, memory, bars, formula, scalars, fixed, C: gl.constexpr, FIRST: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add query tile m to dk and dv of a warpgroup's keys, and take dQ of the tile before, which the FIRST has not."""
    k_ring, _, q_ring, do_ring, shift_ring, centre_ring, ds_ring, dq_tile, _, _ = memory
    _, _, v_full, _, q_full, q_empty, do_full, do_empty, dq_full, dq_empty, ds_full, ds_empty, _, out_empty, _, _ = bars
    b, h, turn, lengths, offs_j, first_i, last_i, onces, tilt = mine
    seqlen_q, seqlen_k = lengths
    scale, c = scalars
    mask_args, mask_nums, score_args, score_nums, grads = formula
    mask_once, score_once = onces
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, product_layout(q_ring.shape[5]), 2)
    place = done & 1

    # scores and dP
    stage, q = filled(done, q_ring, q_full)
    s = start_scores(stage, k, q, tilt, shift_ring, scalars, fixed)
    _, do = filled(done, do_ring, do_full)
    if FIRST:
        mbarrier.wait(v_full, turn & 1)
    dp = product_from(of_queries(centre_ring, stage, SCORES), v, do)

    # probabilities
    s = warpgroup_mma_wait(1, deps=(s,))
    first_query = m * BLOCK_M + seqlen_k - seqlen_q
    last_query = seqlen_k - 1
    offs_i = first_query + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    offs_i = gl.minimum(offs_i, last_query)  # formulas see valid positions only
    raw = s
    if fixed.scale_first:
        raw = s * scale
        s = raw
        if fixed.score is not None:
            of_score = with_columns(
                score_once, b, h, first_query, last_query, score_args, score_nums, fixed.score_columns, SCORES, BLOCK_M
            )
            s = fixed.score(raw, b, h, offs_i[None, :], offs_j[:, None], of_score, score_args, score_nums)
        p = gl.exp2(s * LOG2E + of_queries(shift_ring, stage, SCORES))
    elif fixed.linear is not None:
        p = gl.exp2(s * c + tilted(tilt, offs_j, first_query, 1)[:, None])
    else:
        p = gl.exp2(s * c)
    if MASKED:
        if fixed.visible is not None:
            of_mask = with_columns(
                mask_once, b, h, first_query, last_query, mask_args, mask_nums, fixed.mask_columns, SCORES, BLOCK_M
            )
            seen = fixed.visible(b, h, offs_i[None, :], offs_j[:, None], of_mask, mask_args, mask_nums)
            p = gl.where(seen & (first_i <= last_i)[:, None], p, 0.0)
        else:
            p = only_within(p, first_query, first_i, last_i)
    p16 = keep_tile_before_wait(p.to(q.dtype))

    # dS, for dK from registers and for dQ through shared memory
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * dp
    if fixed.accumulate is not None:
        fixed.accumulate(ds, raw, b, h, offs_i[None, :], offs_j[:, None], of_score, ds, grads, score_args, score_nums)
    if fixed.slope is not None:
        ds = fixed.slope(ds, raw, b, h, offs_i[None, :], offs_j[:, None], of_score, score_args, score_nums)
        if MASKED:
            ds = gl.where(p == 0.0, 0.0, ds)  # a hidden score may have no finite derivative
    ds16 = ds.to(q.dtype)
    if FIRST:
        mbarrier.wait(out_empty, (turn & 1) ^ 1)  # dK of the item before has left
    mbarrier.wait(ds_empty.index(place), ((done >> 1) & 1) ^ 1)
    ds_ring.index(place * 2 + C).store(ds16)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(place))
    dv = warpgroup_mma(gl.convert_layout(p16, FROM_REGISTERS, assert_trivial=True), do, dv, is_async=True)
    if FIRST:
        dk = warpgroup_mma(gl.convert_layout(ds16, FROM_REGISTERS, assert_trivial=True), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        mbarrier.arrive(do_empty.index(stage))
    else:
        mbarrier.wait(ds_full.index(place ^ 1), ((done - 1) >> 1) & 1)
        dq = issue_dq(k_ring, turn % AHEAD, ds_ring, place ^ 1, C)
        dk = warpgroup_mma(gl.convert_layout(ds16, FROM_REGISTERS, assert_trivial=True), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        mbarrier.arrive(ds_empty.index(place ^ 1))
        mbarrier.arrive(do_empty.index(stage))
        put_dq(dq, done - 1, dq_tile, dq_full, dq_empty, C)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(q_empty.index(stage))
    return dk, dv


@gluon.jit
def compute(memory, bars, grid, scalars, fixed, C: gl.constexpr):
    """One warpgroup: dK and dV of its 64 keys of every item, over the tiles of queries of each head of the group."""
    k_ring, v_tile, q_ring, _, _, _, ds_ring, dq_tile, dk_ring, posts = memory
    k_full, _, _, v_empty, _, _, _, _, dq_full, dq_empty, ds_full, ds_empty, out_full, _, post_full, post_empty = bars
    formula = grid[1]
    mask_args, mask_nums, score_args, score_nums, _ = formula
    scale, _ = scalars
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    D: gl.constexpr = q_ring.shape[5]
    OUT: gl.constexpr = product_layout(D)
    KEY: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_M))
    v = matrix(v_tile.index(C))
    dk = gl.zeros([64, D], gl.float32, layout=OUT)
    dv = gl.zeros([64, D], gl.float32, layout=OUT)
    done = 0
    turn = 0  # of items that visit something
    for at in range(runs_of(grid, fixed)):
        run = posted(at, posts, post_full, post_empty, 4)
        b, h, _slot, start, _begin, _full_begin, _num_full, num_partial, count = run
        if not fixed.packed or count > 0:
            _queries, _keys, lengths, _row0, tiles = where_of(run, grid, fixed, BLOCK_M)
            seqlen_q, seqlen_k = lengths
            g = at % fixed.group
            dk = gl.where(g == 0, 0.0, dk)
            dv = gl.where(g == 0, 0.0, dv)
            offs_n = start + 64 * C + gl.arange(0, 64, layout=KEY)
            offs_j = gl.minimum(offs_n, seqlen_k - 1)
            first_i, last_i = row_ends(b, h, offs_j, seqlen_k - seqlen_q, seqlen_k, mask_args, mask_nums, fixed.rows)
            last_i = gl.where(offs_n < seqlen_k, last_i, first_i - 1)
            mask_once = call_once(b, h, offs_j[:, None], mask_args, mask_nums, fixed.mask_once)
            score_once = call_once(b, h, offs_j[:, None], score_args, score_nums, fixed.score_once)
            tilt = tilt_of(b, h, score_args, score_nums, fixed.linear)
            mine = (b, h, turn, lengths, offs_j, first_i, last_i, (mask_once, score_once), tilt)
            spot, phase = ring_turn(turn, AHEAD)
            k = matrix(k_ring.index(spot * 2 + C))
            mbarrier.wait(k_full.index(spot), phase)
            m = visit_any(0, tiles, fixed.lists)
            dk, dv = step(dk, dv, done, m, k, v, mine, memory, bars, formula, scalars, fixed, C, True, fixed.guard)
            full = 1
            if fixed.guard:
                # worked out here: MLIR takes a variable that only bounds loops for one that never changes
                cut = gl.where(start + KEYS > seqlen_k, count, num_partial)
                for t in range(1, cut):
                    m = visit_any(t, tiles, fixed.lists)
                    dk, dv = step(
                        dk, dv, done + t, m, k, v, mine, memory, bars, formula, scalars, fixed, C, False, True
                    )
                full = gl.maximum(cut, 1)
            for t in range(full, count):
                m = visit_any(t, tiles, fixed.lists)
                dk, dv = step(dk, dv, done + t, m, k, v, mine, memory, bars, formula, scalars, fixed, C, False, False)
            done += count
            is_last = g == fixed.group - 1
            mbarrier.arrive(v_empty, pred=is_last)

            # dQ of the last tile
            last, phase = ring_turn(done - 1, 2)
            mbarrier.wait(ds_full.index(last), phase)
            dq = warpgroup_mma_wait(0, deps=(issue_dq(k_ring, spot, ds_ring, last, C),))
            mbarrier.arrive(ds_empty.index(last))
            put_dq(dq, done - 1, dq_tile, dq_full, dq_empty, C)
            if is_last:
                wait_for_both()  # have read K and dS
                k.store(dv.to(k_ring.dtype))
                hand_over((dk * scale).to(k_ring.dtype), matrix(dk_ring.index(C)), out_full.index(C))
            turn += is_last.to(gl.int32)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "slots_q", "slots", "together", "items", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale",
    ]
)  # fmt: skip
def attention_bwd_sm90(
    Q, K, V, DO, SHIFT, CENTRE, SUM, DK, DV, ADDED, CU_Q, CU_K, LISTED, list_stride_b, list_stride_h, list_stride_r,
    mask_args, mask_nums, score_args, score_nums, grads,
    batch, seqlen_q, seqlen_k, slots_q, slots, together, items, scale, fixed,
):  # fmt: skip
    """`fixed` is what is known when the kernel is compiled (`gluon_attention.Fixed`)."""
    # shared memory: K of two items, V, rings of Q and dO with a number for each query, dS of two tiles, a tile of dQ
    D: gl.constexpr = Q.block_shape[4]
    BLOCK_M: gl.constexpr = Q.block_shape[3]
    k_ring = gl.allocate_shared_memory(K.dtype, [2 * AHEAD, 1, 1, 1, 64, D], K.layout)
    v_tile = gl.allocate_shared_memory(V.dtype, [2, 1, 1, 1, 64, D], V.layout)
    q_ring = gl.allocate_shared_memory(Q.dtype, [STAGES, 1, 1, 1, BLOCK_M, D], Q.layout)
    do_ring = gl.allocate_shared_memory(DO.dtype, [STAGES, 1, 1, 1, BLOCK_M, D], DO.layout)
    shift_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], SHIFT.layout)
    centre_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], CENTRE.layout)
    ds_ring = gl.allocate_shared_memory(Q.dtype, [4, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, rank=2))
    dk_ring = reinterpret(ds_ring, 4 * BLOCK_M // D, k_ring)
    dq_tile = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, 64, SUM.block_shape[4]], SUM.layout)
    posts = gl.allocate_shared_memory(gl.int32, [POSTS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    out_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    out_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    post_full = gl.allocate_shared_memory(gl.int64, [POSTS, 1], BAR)
    post_empty = gl.allocate_shared_memory(gl.int64, [POSTS, 1], BAR)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    mbarrier.init(out_empty, count=1)
    for n in gl.static_range(AHEAD):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=1)
    for n in gl.static_range(POSTS):
        mbarrier.init(post_full.index(n), count=1)
        mbarrier.init(post_empty.index(n), count=3)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(do_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=2)
        mbarrier.init(do_empty.index(n), count=2)
        mbarrier.init(dq_full.index(n), count=1)
        mbarrier.init(dq_empty.index(n), count=1)
        mbarrier.init(ds_full.index(n), count=2)
        mbarrier.init(ds_empty.index(n), count=2)
        mbarrier.init(out_full.index(n), count=1)
    fence_async_shared()

    # roles
    memory = (k_ring, v_tile, q_ring, do_ring, shift_ring, centre_ring, ds_ring, dq_tile, dk_ring, posts)
    bars = (
        k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty, dq_full, dq_empty, ds_full, ds_empty,
        out_full, out_empty, post_full, post_empty,
    )  # fmt: skip
    listed = LISTED if fixed.lists else 0
    grid = (
        (batch, seqlen_q, seqlen_k, slots_q, slots, together, items),
        (mask_args, mask_nums, score_args, score_nums, grads),
        (listed, list_stride_b, list_stride_h, list_stride_r),
        (CU_Q, CU_K) if fixed.packed else (0, 0),
    )
    inputs = (Q, K, V, DO, SHIFT, CENTRE)
    scalars = (scale, scale * LOG2E)
    gl.warp_specialize(
        [
            (compute, (memory, bars, grid, scalars, fixed, 0)),
            (compute, (memory, bars, grid, scalars, fixed, 1)),
            (fetch, (inputs, memory, bars, grid, fixed)),
            (send, ((SUM, DK, DV, ADDED if fixed.ordered else 0), memory, bars, grid, fixed)),
        ],
        [4, 1, 1],
        [fixed.registers, 24, 24],
    )
