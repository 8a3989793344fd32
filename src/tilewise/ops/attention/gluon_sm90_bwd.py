"""FlashAttention-3's backward for Hopper, in Gluon: a program owns 128 keys, 64 for each of two warpgroups, which hold
dK and dV in registers and add to sums of dQ in memory; one warp fetches tiles of queries, another writes dK and dV, and
two begin and end sums of dQ (`gluon_sm90_sums`).

Scores are held transposed, so that P and dS enter the products with dO and Q from registers. dQ needs dS of all 128
keys: it goes through shared memory, and its product is taken one tile later, so that the warpgroups need not keep step.
Without sums of dQ (`gluon_sm90_bwd_queries` has it then) all of that is left out.
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

from tilewise.ops.attention.gluon_sm90_meetings import meet, meetings_of
from tilewise.ops.attention.gluon_sm90_runs import (
    RUN,
    first_tile_of,
    reach_of,
    run_of,
    where_of,
)
from tilewise.ops.attention.gluon_sm90_scores import (
    of_queries,
    own_rows,
    probabilities,
    product_from,
    start_scores,
    through_score,
)
from tilewise.ops.attention.gluon_sm90_sums import (
    KEEPERS,
    add_to_sums,
    await_order,
    count_addition,
    count_run,
    has_added,
    head_of,
    keep_places,
    order_of,
    place_is_ready,
    seen_of,
    share_ring,
    tile_of_sums,
    wait_for_place,
)
from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.gluon_api import async_load, async_store, barrier, reinterpret
from tilewise.tiles.hopper import (
    at_row,
    fill_with,
    filled,
    keep_tile_before_wait,
    matrix,
    message_board,
    moving,
    post,
    post_last,
    posted,
    product_layout,
    ring_turn,
    take,
    tile_bytes,
    wait_for_both,
)
from tilewise.tiles.visit import entry_of, is_passed_over, tile_of_entry, visit_any

KEYS = gl.constexpr(128)  # of a program
STAGES = gl.constexpr(2)  # tiles of queries, and of dO, in shared memory
AHEAD = gl.constexpr(2)  # tiles of keys: those of the next item are fetched meanwhile


@gluon.jit
def find_run(item, g, sums, grid, fixed, BLOCK_M: gl.constexpr):
    """(item, head of its group, its run): the first from here on that visits something, or one that visits nothing."""
    COUNTS = sums[3]
    nothing = 0 * item
    run = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    looking = item < grid[0][6]
    while looking:
        run = run_of(item, g, grid, fixed, BLOCK_M, KEYS)
        looking = run[7] == 0
        if looking:
            if fixed.sums:
                count_run(head_of(run, fixed), sums)
            g += 1
            if g == fixed.group:
                g = nothing
                item = take(COUNTS)
            looking = item < grid[0][6]
    return item, g, run


@gluon.jit
def fetch_tiles(inputs, run, first, last, done, meeting, memory, bars, grid, fixed):
    """Fetch Q with its shifts and dO with its centres, from the `first` of a run's tiles up to the `last`, where there
    is a `meeting` after those with others; whether they were not in vain.
    """
    _K, _V, Q, DO, SHIFT, CENTRE = inputs
    _, _, q_ring, do_ring, shift_ring, centre_ring, _, _, _ = memory
    q_full, q_empty, do_full, do_empty = bars[4], bars[5], bars[6], bars[7]
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    queries, _keys, _lengths, row0, tiles = where_of(run, grid, fixed, BLOCK_M)
    tile0 = first_tile_of(run, row0, grid, fixed, BLOCK_M)
    patient = run[7] >= 0
    if meeting is not None:
        patient = meeting[2]
    for t in range(first, last):
        if meeting is not None:
            patient = meet(meeting[0], t, meeting[1], patient, fixed)
        m = visit_any(t, tiles, fixed.lists)
        row, tile = m * BLOCK_M, tile0 + m
        fill_with(Q, SHIFT, done + t, queries, run[1], row, tile, q_ring, shift_ring, q_full, q_empty)
        fill_with(DO, CENTRE, done + t, queries, run[1], row, tile, do_ring, centre_ring, do_full, do_empty)
    return patient


@gluon.jit
def fetch(inputs, sums, memory, bars, grid, fixed):
    """The warp that fetches: K and V of an item, and tiles of queries. It takes items as it comes to them, the
    next while two tiles are still to come, and posts their runs; a run that visits nothing is the last.
    """
    K, V, _Q, _DO, _SHIFT, _CENTRE = inputs
    COUNTS = sums[3]
    k_ring, v_tile, q_ring, _, _, _, _, _, board = memory
    k_full, k_empty, v_full, v_empty = bars[0], bars[1], bars[2], bars[3]
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    done = 0
    at = 0
    # the first item is taken too, since others may wait for it, and this program come late (`wait_for_place`)
    item, g, run = find_run(take(COUNTS), 0 * done, sums, grid, fixed, BLOCK_M)
    patient = run[7] >= 0
    if not place_is_ready(run, sums, grid, fixed):
        wait_for_place(run, sums, grid, fixed)
    while run[7] > 0:
        h, start, count = run[1], run[3], run[7]
        _queries, keys, _lengths, row0, _tiles = where_of(run, grid, fixed, BLOCK_M)
        if fixed.sums:
            tile0 = first_tile_of(run, row0, grid, fixed, BLOCK_M)
            post(run + (tile_of_sums(tile0, head_of(run, fixed), sums, grid),), at, board)  # noqa: RUF005 (unknown to Triton)
        else:
            post(run, at, board)
        turn = at // fixed.group
        if g == 0:
            spot, phase = ring_turn(turn, AHEAD)
            mbarrier.wait(k_empty.index(spot), phase ^ 1)
            mbarrier.expect(k_full.index(spot), 2 * tile_bytes(k_ring))
            for c in gl.static_range(2):
                async_load(
                    K, at_row(keys, h // fixed.group, start + 64 * c), k_full.index(spot), k_ring.index(spot * 2 + c)
                )
        near = gl.maximum(count - 2, 1)
        meetings = meetings_of(at, near - 1, grid, fixed)
        fetch_tiles(inputs, run, 0, 1, done, None, memory, bars, grid, fixed)
        if g == 0:  # after the first tile: its place is the last to be free
            mbarrier.wait(v_empty, (turn & 1) ^ 1)
            mbarrier.expect(v_full, 2 * tile_bytes(v_tile))
            for c in gl.static_range(2):
                async_load(V, at_row(keys, h // fixed.group, start + 64 * c), v_full, v_tile.index(c))
        patient = fetch_tiles(inputs, run, 1, near, done, (COUNTS + 2, meetings, patient), memory, bars, grid, fixed)
        g += 1
        if g == fixed.group:
            g = 0 * g
            item = take(COUNTS)
        item, g, coming = find_run(item, g, sums, grid, fixed, BLOCK_M)
        ready = place_is_ready(coming, sums, grid, fixed)
        fetch_tiles(inputs, run, near, count, done, None, memory, bars, grid, fixed)
        if not ready:
            wait_for_place(coming, sums, grid, fixed)
        done += count
        at += 1
        run = coming
    post_last(at, board)


@gluon.jit
def show_ds(done, bars):
    """Let products read dS of the `done`-th tile when both warpgroups have put it where they find it. They do not see
    to that themselves: the fence waits for all that a thread has under way, and theirs have additions to sums.
    """
    ds_full, ds_given = bars[8], bars[13]
    place, phase = ring_turn(done, 2)
    mbarrier.wait(ds_given.index(place), phase)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(place))


@gluon.jit
def send(outputs, sums, memory, bars, grid, fixed):
    """The warp that writes: it has products see dS, sends dV and dK of an item out of the places of K and dS, and
    counts the item's runs.
    """
    DK, DV = outputs
    k_ring, _, q_ring, _, _, _, _, dk_ring, board = memory
    k_empty, out_full, out_empty = bars[1], bars[10], bars[11]
    at = 0
    done = 0
    run = posted(0, board, 1)
    while run[7] > 0:
        _queries, _keys, _lengths, _row0, tiles = where_of(run, grid, fixed, q_ring.shape[4])
        g = at % fixed.group
        if fixed.sums:
            for t in range(run[7]):
                show_ds(done + t, bars)
                if t > 0:  # which is taken a tile later
                    count_addition(t - 1, run, g, done, tiles, sums, bars[12], grid, fixed)
            count_addition(run[7] - 1, run, g, done, tiles, sums, bars[12], grid, fixed)
        done += run[7]
        if g == fixed.group - 1:
            h, start = run[1], run[3]
            _queries, keys, _lengths, _row0, _tiles = where_of(run, grid, fixed, q_ring.shape[4])
            turn = at // fixed.group
            spot, _phase = ring_turn(turn, AHEAD)
            for c in gl.static_range(2):
                mbarrier.wait(out_full.index(c), turn & 1)
                fence_async_shared()
                from_row = at_row(keys, h // fixed.group, start + 64 * c)
                async_store(DV, from_row, k_ring.index(spot * 2 + c))
                async_store(DK, from_row, dk_ring.index(c))
            tma.store_wait(0)
            mbarrier.arrive(k_empty.index(spot))
            mbarrier.arrive(out_empty)
            if fixed.sums:
                for n in range(fixed.group):  # of which all additions are on their way
                    count_run(head_of(run, fixed) - n, sums)
        at += 1
        run = posted(at, board, 1)


@gluon.jit
def issue_dq(k_ring, spot, ds_ring, place, done, C: gl.constexpr):
    """Start this warpgroup's share of dQ = dS K: half of the columns of 64 queries, or half of the rows of 128."""
    BLOCK_M: gl.constexpr = ds_ring.shape[2]
    D: gl.constexpr = k_ring.shape[5]
    W: gl.constexpr = D // 2 if BLOCK_M == 64 else D
    dq = gl.zeros([64, W], gl.float32, layout=product_layout(W))
    for half in gl.static_range(2):
        ds = ds_ring.index(place * 2 + half)
        k = moving(k_ring, spot * 2 + half, done)
        if BLOCK_M == 64:
            dq = warpgroup_mma(ds.permute((1, 0)), k.slice(C * W, W, dim=1), dq, use_acc=half > 0, is_async=True)
        else:
            dq = warpgroup_mma(ds.slice(C * 64, 64, dim=1).permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def hand_over(x, place, full):
    """Hand a tile to a warp that waits for it in shared memory, and fences it before products or copies read it."""
    place.store(x)
    barrier()
    mbarrier.arrive(full)


@gluon.jit
def give_ds(ds, done, turn, memory, bars, C: gl.constexpr, FIRST: gl.constexpr):
    """Put a warpgroup's half of dS where both find it, behind the fence of `show_ds`."""
    ds_ring = memory[6]
    ds_given, ds_empty, out_empty = bars[13], bars[9], bars[11]
    place, phase = ring_turn(done, 2)
    if FIRST:
        mbarrier.wait(out_empty, (turn & 1) ^ 1)  # dK of the item before has left
    mbarrier.wait(ds_empty.index(place), phase ^ 1)
    hand_over(ds, ds_ring.index(place * 2 + C), ds_given.index(place))


@gluon.jit
def start_dq(done, turn, memory, bars, C: gl.constexpr):
    """Start a warpgroup's share of dQ of the `done`-th tile, once both have given their dS."""
    place, phase = ring_turn(done, 2)
    mbarrier.wait(bars[8].index(place), phase)
    return issue_dq(memory[0], turn % AHEAD, memory[6], place, done, C)


@gluon.jit
def end_dq(dq, done, tile, seen, sum_and_order, bars, fixed, C: gl.constexpr):
    """Add a share of dQ of the `done`-th tile, which is complete, to a tile of sums."""
    SUM, order = sum_and_order
    mbarrier.arrive(bars[9].index(done & 1))
    await_order(order, seen, tile, fixed)
    add_to_sums(dq, SUM, tile, C)
    has_added(done, bars[12], fixed)


@gluon.jit
def step(
    dk, dv, done, m, turn, own, sum_and_order, before, memory, bars, formula, scalars, fixed, C: gl.constexpr,
    FIRST: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add query tile m to dk and dv of a warpgroup's keys; where sums of dQ are wanted, take that of the tile before,
    number `before` of all, which the FIRST has not.
    """
    k_ring, v_tile, q_ring, do_ring, shift_ring, centre_ring, _, _, _ = memory
    v_full, q_full, q_empty, do_full, do_empty = bars[2], bars[4], bars[5], bars[6], bars[7]
    if not FIRST:
        seen = seen_of(sum_and_order[1], fixed)
    _, _, score_args, score_nums, grads = formula
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, product_layout(q_ring.shape[5]), 2)

    # scores and dP
    stage, q = filled(done, q_ring, q_full)
    shift = of_queries(shift_ring, stage, SCORES)
    s = start_scores(moving(k_ring, turn % AHEAD * 2 + C, done), q, shift, own, scalars, fixed)
    _, do = filled(done, do_ring, do_full)
    if FIRST:
        mbarrier.wait(v_full, turn & 1)
    dp = product_from(of_queries(centre_ring, stage, SCORES), moving(v_tile, C, done), do)

    # probabilities
    s = warpgroup_mma_wait(1, deps=(s,))
    p, around = probabilities(s, shift, m, own, formula, scalars, fixed, MASKED)
    p16 = keep_tile_before_wait(p.to(q.dtype))
    if fixed.slope is not None:
        p = p16.to(gl.float32)  # what the products have; the other's registers are needed

    # dS, for dK from registers and for dQ through shared memory
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * dp
    if fixed.accumulate is not None:
        raw, i, j, of_score = around
        fixed.accumulate(ds, raw, own[0], own[1], i, j, of_score, ds, grads, score_args, score_nums)
    ds = through_score(ds, p, around, own, formula, fixed, MASKED)
    ds16 = ds.to(q.dtype)
    if fixed.sums:
        give_ds(ds16, done, turn, memory, bars, C, FIRST)
    if FIRST or not fixed.sums:
        dv = warpgroup_mma(gl.convert_layout(p16, FROM_REGISTERS, assert_trivial=True), do, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds16, FROM_REGISTERS, assert_trivial=True), q, dk, is_async=True)
    else:
        dq = start_dq(done - 1, turn, memory, bars, C)
        dv = warpgroup_mma(gl.convert_layout(p16, FROM_REGISTERS, assert_trivial=True), do, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds16, FROM_REGISTERS, assert_trivial=True), q, dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=(dq,))
        end_dq(dq, done - 1, before, seen, sum_and_order, bars, fixed, C)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    mbarrier.arrive(do_empty.index(stage))
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(q_empty.index(stage))
    return dk, dv


@gluon.jit
def pass_over(done, turn, sum_and_order, before, memory, bars, fixed, C: gl.constexpr, FIRST: gl.constexpr):
    """A `step` over a tile whose queries see none of a warpgroup's keys, only the other's: its half of dS is 0."""
    q_ring, do_ring = memory[2], memory[3]
    v_full, q_full, q_empty, do_full, do_empty = bars[2], bars[4], bars[5], bars[6], bars[7]
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    stage, _ = filled(done, q_ring, q_full)
    mbarrier.arrive(q_empty.index(stage))
    filled(done, do_ring, do_full)
    mbarrier.arrive(do_empty.index(stage))
    if FIRST:
        mbarrier.wait(v_full, turn & 1)
    if fixed.sums:
        zeros = gl.zeros([64, BLOCK_M], q_ring.dtype, layout=product_layout(BLOCK_M))
        give_ds(zeros, done, turn, memory, bars, C, FIRST)
        if not FIRST:
            seen = seen_of(sum_and_order[1], fixed)
            dq = warpgroup_mma_wait(0, deps=(start_dq(done - 1, turn, memory, bars, C),))
            end_dq(dq, done - 1, before, seen, sum_and_order, bars, fixed, C)


@gluon.jit
def masked_step(
    dk, dv, done, entry, m, turn, own, reach, sum_and_order, before, memory, bars, formula, scalars, fixed,
    C: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """A `step` over a tile that the mask cuts, unless its queries see none of a warpgroup's keys, which happens where
    tiles are short.
    """
    BLOCK_M: gl.constexpr = memory[2].shape[4]
    KNOWN: gl.constexpr = BLOCK_M == 64 and (fixed.parts or not fixed.lists)
    if KNOWN:
        if fixed.parts:
            seen = not is_passed_over(entry, C)
        else:
            seen = (m * BLOCK_M <= reach[1]) & (m * BLOCK_M + BLOCK_M > reach[0])
        if seen:
            dk, dv = step(
                dk, dv, done, m, turn, own, sum_and_order, before, memory, bars, formula, scalars, fixed, C, FIRST, True
            )
        else:
            pass_over(done, turn, sum_and_order, before, memory, bars, fixed, C, FIRST)
    else:
        dk, dv = step(
            dk, dv, done, m, turn, own, sum_and_order, before, memory, bars, formula, scalars, fixed, C, FIRST, True
        )
    return dk, dv


@gluon.jit
def compute(sums, memory, bars, grid, scalars, fixed, C: gl.constexpr):
    """One warpgroup: dK and dV of its 64 keys of every item, over the tiles of queries of each head of the group."""
    k_ring, _, q_ring, _, _, _, _, dk_ring, board = memory
    k_full, v_empty, out_full, out_empty = bars[0], bars[3], bars[10], bars[11]
    SUM = sums[0] if fixed.sums else 0
    formula = grid[1]
    scale, _ = scalars
    BLOCK_M: gl.constexpr = q_ring.shape[4]
    D: gl.constexpr = q_ring.shape[5]
    OUT: gl.constexpr = product_layout(D)
    dk = gl.zeros([64, D], gl.float32, layout=OUT)
    dv = gl.zeros([64, D], gl.float32, layout=OUT)
    done = 0
    at = 0
    run = posted(0, board, 4)
    while run[7] > 0:
        start, num_partial, count = run[3], run[6], run[7]
        _queries, _keys, lengths, _row0, tiles = where_of(run, grid, fixed, BLOCK_M)
        own = own_rows(run, lengths, start + 64 * C, formula, fixed, BLOCK_M)
        first_sums = run[8] if fixed.sums else 0
        turn = at // fixed.group
        g = at % fixed.group
        order = order_of(run, g, first_sums, lengths[1], sums, grid, fixed, KEYS)
        dk = gl.where(g == 0, 0.0, dk)
        dv = gl.where(g == 0, 0.0, dv)
        spot, phase = ring_turn(turn, AHEAD)
        mbarrier.wait(k_full.index(spot), phase)
        entry = entry_of(0, tiles, fixed.lists)
        m = tile_of_entry(entry, tiles, fixed.lists)
        full = 1
        if fixed.guard:
            reach = reach_of(run, start + 64 * C, lengths, grid, fixed)
            dk, dv = masked_step(
                dk, dv, done, entry, m, turn, own, reach, (SUM, order), 0, memory, bars, formula, scalars, fixed, C,
                True,
            )  # fmt: skip
            before = first_sums + m
            # worked out here: MLIR takes a variable that only bounds loops for one that never changes
            cut = gl.where(start + KEYS > lengths[1], count, num_partial)
            for t in range(1, cut):
                entry = entry_of(t, tiles, fixed.lists)
                m = tile_of_entry(entry, tiles, fixed.lists)
                dk, dv = masked_step(
                    dk, dv, done + t, entry, m, turn, own, reach, (SUM, order), before, memory, bars, formula, scalars,
                    fixed, C, False,
                )  # fmt: skip
                before = first_sums + m
            full = gl.maximum(cut, 1)
        else:
            dk, dv = step(
                dk, dv, done, m, turn, own, (SUM, order), 0, memory, bars, formula, scalars, fixed, C, True, False
            )
            before = first_sums + m
        for t in range(full, count):
            m = visit_any(t, tiles, fixed.lists)
            dk, dv = step(
                dk, dv, done + t, m, turn, own, (SUM, order), before, memory, bars, formula, scalars, fixed, C, False,
                False,
            )  # fmt: skip
            before = first_sums + m
        done += count
        is_last = g == fixed.group - 1
        mbarrier.arrive(v_empty, pred=is_last)

        if fixed.sums:  # dQ of the last tile
            dq = warpgroup_mma_wait(0, deps=(start_dq(done - 1, turn, memory, bars, C),))
            end_dq(dq, done - 1, before, seen_of(order, fixed), (SUM, order), bars, fixed, C)
        if is_last:
            if fixed.sums:
                wait_for_both()  # have read K and dS
            else:
                mbarrier.wait(out_empty, (turn & 1) ^ 1)  # dK of the item before has left
                barrier()
            matrix(k_ring.index(spot * 2 + C)).store(dv.to(k_ring.dtype))
            hand_over((dk * scale).to(k_ring.dtype), matrix(dk_ring.index(C)), out_full.index(C))
        at += 1
        run = posted(at, board, 4)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "slots_q", "slots", "together", "items", "places", "list_stride_b",
        "list_stride_h", "list_stride_r", "mask_nums", "score_nums", "scale",
    ]
)  # fmt: skip
def attention_bwd_sm90(
    Q, K, V, DO, SHIFT, CENTRE, DK, DV, COUNTS, SUM, SHARES, DQ, ORDER, O, LSE, DLSE, NUMBERS, CU_Q, CU_K, LISTED,
    list_stride_b, list_stride_h, list_stride_r, mask_args, mask_nums, score_args, score_nums, grads,
    batch, seqlen_q, seqlen_k, slots_q, slots, together, items, places, scale, fixed,
):  # fmt: skip
    """`fixed` is what is known when the kernel is compiled (`gluon_fixed.Fixed`)."""
    tl.extra.cuda.gdc_wait()  # for what counts to be 0
    # shared memory: K of two items, V, rings of Q and dO with a number for each query, dS of two tiles, shares of dQ
    D: gl.constexpr = Q.block_shape[4]
    BLOCK_M: gl.constexpr = Q.block_shape[3]
    k_ring = gl.allocate_shared_memory(K.dtype, [2 * AHEAD, 1, 1, 1, 64, D], K.layout)
    v_tile = gl.allocate_shared_memory(V.dtype, [2, 1, 1, 1, 64, D], V.layout)
    q_ring = gl.allocate_shared_memory(Q.dtype, [STAGES, 1, 1, 1, BLOCK_M, D], Q.layout)
    do_ring = gl.allocate_shared_memory(DO.dtype, [STAGES, 1, 1, 1, BLOCK_M, D], DO.layout)
    shift_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], SHIFT.layout)
    centre_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], CENTRE.layout)
    ds_ring = gl.allocate_shared_memory(Q.dtype, [4, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, rank=2))
    dk_ring = reinterpret(ds_ring, 4 * BLOCK_M // D, K)
    board = message_board(RUN + 1 if fixed.sums else RUN, 3)  # and where a run's sums begin
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_given = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    out_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    out_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    mbarrier.init(out_empty, count=1)
    for n in gl.static_range(AHEAD):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(do_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=2)
        mbarrier.init(do_empty.index(n), count=2)
        mbarrier.init(out_full.index(n), count=1)
    if fixed.sums:  # a barrier that nobody uses has memory that is something else, too
        for n in gl.static_range(2):
            mbarrier.init(ds_given.index(n), count=2)
            mbarrier.init(ds_full.index(n), count=1)
            mbarrier.init(ds_empty.index(n), count=2)
    counting = ()
    if fixed.ordered:
        added = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
        counted = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
        for n in gl.static_range(2):
            mbarrier.init(added.index(n), count=2)
            mbarrier.init(counted.index(n), count=1)
        counting = (added, counted)
    shares = share_ring(SHARES, fixed)
    fence_async_shared()

    # roles
    memory = (k_ring, v_tile, q_ring, do_ring, shift_ring, centre_ring, ds_ring, dk_ring, board)
    bars = (
        k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, out_full, out_empty,
        counting, ds_given,
    )  # fmt: skip
    listed = LISTED if fixed.lists else 0
    grid = (
        (batch, seqlen_q, seqlen_k, slots_q, slots, together, items),
        (mask_args, mask_nums, score_args, score_nums, grads),
        (listed, list_stride_b, list_stride_h, list_stride_r),
        (CU_Q, CU_K) if fixed.packed else (0, 0),
    )
    inputs = (K, V, Q, DO, SHIFT, CENTRE)
    sums = (SUM, SHARES, DQ, COUNTS, places, ORDER)
    scalars = (scale, scale * LOG2E)
    gl.warp_specialize(
        [
            (compute, (sums, memory, bars, grid, scalars, fixed, 0)),
            (compute, (sums, memory, bars, grid, scalars, fixed, 1)),
            (fetch, (inputs, sums, memory, bars, grid, fixed)),
            (send, ((DK, DV), sums, memory, bars, grid, fixed)),
            (keep_places, ((O, DO, LSE, DLSE, NUMBERS), sums, shares, grid, scale, fixed)),
        ],
        [4, 1, 1, KEEPERS],
        [fixed.registers, 24, 24, 24],
    )
