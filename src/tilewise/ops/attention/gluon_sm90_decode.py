"""Few queries over pages, for Hopper, in Gluon: four warps gather keys, and a warpgroup computes.

Keys are the rows of both products, S^T = K Q^T and O^T = V^T P^T, whose other side are the 16 to 64 rows of queries of
a tile: a product is as wide as those are, and takes K and V from where the copies put them. Who does what is planned
on the device (`triton_work`). Sources: Ye et al., "FlashInfer"; Shah et al., "FlashAttention-3".
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops.attention.triton_prefixes import PREFIX, cut_row, first_rows, left_last, parts_of_request, whole_row
from tilewise.ops.attention.triton_work import (
    LOOK,
    UNIT,
    next_tile,
    piece_of_turn,
    piece_start,
    rounds_of,
    row_pieces,
    rows_of_unit,
    tile_at,
    unit_of,
)
from tilewise.tiles.arithmetic import LN2, LOG2E
from tilewise.tiles.gluon_api import barrier, copy_async
from tilewise.tiles.hopper import message_board, post, post_last, posted, product_layout, ring_turn, take
from tilewise.tiles.visit import call_once, row_ends

PIECE = gl.constexpr(6)  # numbers of a message: tiles, first position, unit, head, first tile, piece
LEFT = gl.constexpr(5)  # numbers of another: 1, unit, head, the position of a row's first tile, piece
ONCE = gl.constexpr(False)
PARTS = gl.constexpr(8)  # partial results that are read at a time


@gluon.jit
def next_turn(TURNS, turns):
    """The next turn that nobody has taken. Each program takes them until one is beyond the last, so as many are taken
    as there are: who takes the last sets the counter back for the next run of the plan.
    """
    taken = take(TURNS)
    gl.store(TURNS, 0, mask=taken == turns - 1)
    return gl.num_programs(0) + taken


@gluon.jit
def find_piece(turn, work, fixed):
    """(tiles, first position, unit, head, first tile, piece): of a turn, or where that is empty of the next one that
    nobody has taken and is not; no tiles where all are taken.
    """
    UNITS, BEFORE, TURNS, slots, tiles, rounds = work
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    programs = gl.num_programs(0)
    turns = programs * rounds
    count = 0 * turn
    lo = count
    piece = count
    looking = turn < turns
    while looking:
        piece = piece_of_turn(turn, programs, rounds)
        lo = piece_start(piece, programs, rounds, tiles)
        count = piece_start(piece + 1, programs, rounds, tiles) - lo
        looking = count == 0
        if looking:
            turn = next_turn(TURNS, turns)
            looking = turn < turns
    u, hk, t = tile_at(lo, BEFORE, UNITS, slots, gl.arange(0, LOOK, layout=ALL), HEADS_KV)
    return count, lo, u, hk, t, piece


@gluon.jit
def page_rows(TABLE, FIRST, stride_t, b, tokens, keys, PAGE: gl.constexpr):
    row = TABLE + b.to(gl.int64) * stride_t if FIRST is None else TABLE + gl.load(FIRST + b)
    return gl.load(row + tokens // PAGE, mask=tokens < keys, other=0)


@gluon.jit
def gather(pool, rows, mask, at, ring, full, empty, ONCE: gl.constexpr):
    """Copy the rows of one tile into the ring's place for the `at`-th, once that is free."""
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    POLICY: gl.constexpr = "evict_first" if ONCE else ""
    copy_async(ring.index(stage), pool + rows, mask=mask, eviction_policy=POLICY)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def gather_queries(Q, strides, unit, hk, at, ring, full, empty, fixed):
    """Copy the rows of a unit's tile into the ring's place for the `at`-th."""
    R: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    offs_d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    r = unit[1] * R + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    in_r, m, h, _i = rows_of_unit(unit, hk, r, fixed.group)
    if fixed.shared:  # of several requests, where the unit is a prefix's
        rows_q = strides[3]
        b = unit[0] + m // rows_q
        row = b.to(gl.int64) * strides[0] + (m % rows_q).to(gl.int64) * strides[1] + h * strides[2]
    else:
        row = unit[0].to(gl.int64) * strides[0] + (unit[6] + m).to(gl.int64) * strides[1] + h * strides[2]
    mask = in_r[:, None] & (offs_d < fixed.head_dim)[None, :]
    gather(Q, row[:, None] + offs_d[None, :], mask, at, ring, full, empty, False)


@gluon.jit
def fetch(inputs, strides, work, memory, bars, fixed):
    """The warps that fetch: K of a tile, then V, gathered through the block table, and before a row of tiles its Q.
    They take pieces of work, the next one while two tiles of the present one are still to come, and post them.
    """
    Q, K, V, TABLE, FIRST, stride_t = inputs
    strides_q, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh = strides
    UNITS, TURNS = work[0], work[2]
    q_ring, k_ring, v_ring, _, board, _ = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    D_V: gl.constexpr = v_ring.shape[2]
    OF_K: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    OF_V: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_V, D_V // 8], [4, 1], [1, 0])
    K_ROWS: gl.constexpr = gl.SliceLayout(1, OF_K)
    V_ROWS: gl.constexpr = gl.SliceLayout(1, OF_V)
    offs_d = gl.arange(0, D, layout=gl.SliceLayout(0, OF_K))
    offs_dv = gl.arange(0, D_V, layout=gl.SliceLayout(0, OF_V))
    n = 0
    rows = 1
    piece = find_piece(gl.program_id(0), work, fixed)
    post(piece, 0, board, 4)
    posts = 1
    left, _lo, u, hk, t, _p = piece
    unit = unit_of(UNITS, u)
    if left > 0:
        gather_queries(Q, strides_q, unit, hk, 0, q_ring, q_full, q_empty, fixed)
    tokens = (unit[2] + t) * BLOCK_N + gl.arange(0, BLOCK_N, layout=K_ROWS)
    pages = page_rows(TABLE, FIRST, stride_t, unit[0], tokens, unit[4], fixed.page)
    after = unit
    turn = 0
    known = 0  # of the next piece: nothing, its turn, all
    while left > 0:
        if (left <= 3) & (known == 0):
            turn = next_turn(TURNS, gl.num_programs(0) * work[5])
            known = 1
        if (left <= 2) & (known == 1):
            piece = find_piece(turn, work, fixed)
            post(piece, posts, board, 4)
            posts += 1
            after = unit_of(UNITS, piece[2])
            known = 2
        coming = unit_of(UNITS, u + 1)
        here = pages.to(gl.int64)
        k_rows = here * stride_kp + (tokens % fixed.page) * stride_ks + hk * stride_kh
        v_rows = here * stride_vp + (tokens % fixed.page) * stride_vs + hk * stride_vh
        in_k = tokens < unit[4]

        # where the next tile is, and its pages
        u, hk, t, unit = next_tile(u, hk, t, unit, coming, fixed.heads // fixed.group)
        left -= 1
        starts = t == 0
        if left == 0:
            left, _lo, u, hk, t, _p = piece
            unit = after
            starts = left > 0
            known = 0
        tokens = (unit[2] + t) * BLOCK_N + gl.arange(0, BLOCK_N, layout=K_ROWS)
        pages = page_rows(TABLE, FIRST, stride_t, unit[0], tokens, unit[4], fixed.page)

        mask = in_k[:, None] & (offs_d < fixed.head_dim)[None, :]
        gather(K, k_rows[:, None] + offs_d[None, :], mask, n, k_ring, k_full, k_empty, ONCE)
        v_rows = gl.convert_layout(v_rows, V_ROWS)
        mask = gl.convert_layout(in_k, V_ROWS)[:, None] & (offs_dv < fixed.head_dim_v)[None, :]
        gather(V, v_rows[:, None] + offs_dv[None, :], mask, n, v_ring, v_full, v_empty, ONCE)
        if starts:
            gather_queries(Q, strides_q, unit, hk, rows, q_ring, q_full, q_empty, fixed)
            rows += 1
        n += 1


@gluon.jit
def end_row(outputs, strides, unit, hk, r, o, l, top, rows_q, AXIS: gl.constexpr, fixed):
    """Write rows of o and lse: o, with head_dim_v along AXIS, is not divided by l yet, and `top` is in base 2."""
    O, LSE, SINK = outputs
    LAYOUT: gl.constexpr = o.type.layout
    in_r, m, h, _i = rows_of_unit(unit, hk, r, fixed.group)
    if fixed.sinks:
        sink = gl.load(SINK + h).to(gl.float32) * LOG2E
        new = gl.maximum(top, sink)
        new = gl.where(new == float("-inf"), 0.0, new)
        alpha = gl.exp2(top - new)
        l = l * alpha + gl.exp2(sink - new)
        o = o * gl.expand_dims(alpha, AXIS)
        top = new
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    lse = gl.where(empty, float("-inf"), (top + gl.log2(l_safe)) * LN2)
    query = unit[6] + m
    b = unit[0].to(gl.int64)
    at = h.to(gl.int64) * rows_q + query if fixed.packed else (b * fixed.heads + h) * rows_q + query
    gl.store(LSE + at, lse, mask=in_r)
    row = b * strides[0] + query.to(gl.int64) * strides[1] + h * strides[2]
    dv = gl.expand_dims(gl.arange(0, o.shape[AXIS], layout=gl.SliceLayout(1 - AXIS, LAYOUT)), 1 - AXIS)
    mask = gl.expand_dims(in_r, AXIS) & (dv < fixed.head_dim_v)
    gl.store(O + gl.expand_dims(row, AXIS) + dv, (o / gl.expand_dims(l_safe, AXIS)).to(O.dtype.element_ty), mask=mask)


@gluon.jit
def leave_part(parts, at, rows, r, o, l, top, fixed):
    """Leave `rows` of a normalised partial result [DV, R] with its lse in base 2, -inf of nothing: in slot `at`, or
    where prefixes are shared from row `at` on.
    """
    O_PART, LSE_PART = parts
    D_V: gl.constexpr = o.shape[0]
    dv = gl.arange(0, D_V, layout=gl.SliceLayout(1, o.type.layout))
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    to = at + r if fixed.shared else at.to(gl.int64) * fixed.rows_of_part + r
    gl.store(LSE_PART + to, gl.where(empty, float("-inf"), top + gl.log2(l_safe)), mask=r < rows)
    gl.store(O_PART + to[None, :] * D_V + dv[:, None], o / l_safe[None, :], mask=(r < rows)[None, :])


@gluon.jit
def merge_rows(outputs, parts, strides, unit, hk, first, last, first_row, rows_q, found, D_V: gl.constexpr, fixed):
    """Fold the parts of some rows that the pieces `first` to `last` left, PARTS of them at a time; where prefixes are
    shared the `first` to `last` of a request's, which are `found` by `triton_prefixes.first_rows`.
    """
    O_PART, LSE_PART = parts
    R: gl.constexpr = fixed.merged
    OF_PARTS: gl.constexpr = fixed.rows_of_part
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [PARTS, 1, 4], [1, 128 // D_V if D_V < 128 else 1, 32 if D_V >= 128 else D_V // 4], [1, 4, 1], [2, 1, 0]
    )
    TILE: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    PAIR: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    r = gl.arange(0, R, layout=ROW) + first_row
    r_of_pair = gl.arange(0, R, layout=gl.SliceLayout(0, PAIR)) + first_row
    offs_p = gl.arange(0, PARTS, layout=gl.SliceLayout(1, PAIR))
    dv = gl.arange(0, D_V, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    top = gl.full([R], float("-inf"), gl.float32, layout=ROW)
    total = gl.zeros([R], gl.float32, layout=ROW)
    acc = gl.zeros([R, D_V], gl.float32, layout=TILE)
    for at in range(first, last + 1, PARTS):
        p = at + offs_p
        if fixed.shared:
            begins = first_rows(p, unit[0], hk, found[0], found[1], fixed.heads // fixed.group, fixed.block_r)
            row = begins[:, None] + r_of_pair[None, :]
            there = (p <= last)[:, None] & (r_of_pair < unit[5] * fixed.group)[None, :]
        else:
            slot = gl.where(p == first, 2 * p + 1, 2 * p)
            row = slot.to(gl.int64)[:, None] * OF_PARTS + r_of_pair[None, :]
            there = (p <= last)[:, None]
        lse = gl.load(LSE_PART + row, mask=there, other=float("-inf"), cache_modifier=".cg")
        o = gl.load(
            O_PART + gl.expand_dims(row, 2) * D_V + gl.expand_dims(gl.expand_dims(dv, 0), 0),
            mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new = gl.maximum(top, gl.convert_layout(gl.max(lse, 0), ROW))
        safe = gl.where(new == float("-inf"), 0.0, new)
        weight = gl.exp2(lse - gl.convert_layout(safe, gl.SliceLayout(0, PAIR))[None, :])
        alpha = gl.exp2(top - safe)
        total = total * alpha + gl.convert_layout(gl.sum(weight, 0), ROW)
        acc = acc * alpha[:, None] + gl.sum(o * gl.expand_dims(weight, 2), 0)
        top = new
    end_row(outputs, strides, unit, hk, unit[1] * fixed.block_r + r, acc, total, top, rows_q, 1, fixed)


@gluon.jit
def room_of(work, rows_q, fixed):
    """Where parts lie, as `triton_prefixes` says."""
    return gl.num_programs(0) * fixed.rounds, work[3] // 2, rows_q * fixed.group


@gluon.jit
def merge_shared(outputs, parts, strides, work, u, hk, rows_q, D_V: gl.constexpr, fixed):
    """Count a part of a unit whose requests may share prefixes, and fold the requests whose last it is."""
    UNITS, BEFORE, TURNS, _slots, tiles, rounds = work
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    split = (gl.num_programs(0), rounds, tiles)
    room = room_of(work, rows_q, fixed)
    lanes = gl.arange(0, fixed.shared, layout=gl.BlockedLayout([1], [32], [4], [0]))
    unit = unit_of(UNITS, u)
    first, count, last = left_last(u, unit, hk, lanes, TURNS + 1, UNITS, BEFORE, split, rows_q, HEADS_KV)
    for n in range(count):
        if gl.sum((last & (lanes == n)).to(gl.int32), 0) > 0:
            barrier()
            unit = unit_of(UNITS, first + n)
            found = parts_of_request(first + n, hk, UNITS, BEFORE, split, HEADS_KV)
            for row in range(0, unit[5] * fixed.group, fixed.merged):
                merge_rows(
                    outputs,
                    parts,
                    strides,
                    unit,
                    hk,
                    0,
                    found[2] + found[4] - 1,
                    row,
                    rows_q,
                    (found, room),
                    D_V,
                    fixed,
                )


@gluon.jit
def merge(outputs, parts, strides, work, memory, rows_q, D_V: gl.constexpr, fixed):
    """The warps that merge: they are told of each part that is left, count it, and fold the row whose last it is."""
    UNITS, ARRIVED, tiles, rounds = work[0], work[2] + 1, work[4], work[5]
    board = memory[5]
    at = 0
    more, u, hk, row_start, _piece = posted(0, board, 4)
    while more > 0:
        if fixed.shared:
            merge_shared(outputs, parts, strides, work, u, hk, rows_q, D_V, fixed)
        else:
            unit = unit_of(UNITS, u)
            first, last = row_pieces(row_start, unit[3], gl.num_programs(0), rounds, tiles)
            if gl.atomic_add(ARRIVED + first, 1, sem="acq_rel") == last - first:
                gl.store(ARRIVED + first, 0)  # for the next run of the plan
                barrier()
                for first_row in range(0, fixed.rows_of_part, fixed.merged):
                    merge_rows(outputs, parts, strides, unit, hk, first, last, first_row, rows_q, None, D_V, fixed)
        at += 1
        more, u, hk, row_start, _piece = posted(at, board, 4)


@gluon.jit
def scores_of(s, unit, hk, r, offs_n, formula, scale, fixed):
    """Scores [keys, rows] in base 2, -inf where nothing is seen."""
    mask_args, mask_nums, score_args, score_nums = formula
    _in_r, _m, h, offs_i = rows_of_unit(unit, hk, r, fixed.group)
    b = unit[0]
    keys = unit[4]
    if fixed.score is not None:
        offs_j = gl.maximum(gl.minimum(offs_n, keys - 1), 0)
        once = call_once(b, h[None, :], offs_i[None, :], score_args, score_nums, fixed.score_once)
        s = fixed.score(s * scale, b, h[None, :], offs_i[None, :], offs_j[:, None], once, score_args, score_nums)
        s = s * LOG2E
    else:
        s = s * (scale * LOG2E)
    if fixed.visible is not None:
        offs_j = gl.maximum(gl.minimum(offs_n, keys - 1), 0)
        once = call_once(b, h[None, :], offs_i[None, :], mask_args, mask_nums, fixed.mask_once)
        seen = fixed.visible(b, h[None, :], offs_i[None, :], offs_j[:, None], once, mask_args, mask_nums)
        seen = seen & (offs_n < keys)[:, None]
    else:
        first_j, last_j = row_ends(b, h, offs_i, 0, keys, mask_args, mask_nums, fixed.rows)
        seen = (offs_n[:, None] >= first_j[None, :]) & (offs_n[:, None] <= last_j[None, :])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def part_of_row(work, unit, u, hk, piece, begins, whole, rows_q, fixed):
    """(where its part goes, as `leave_part` takes it, how many rows it has, whether it is all there is) of what a piece
    has of a row of tiles.
    """
    if fixed.shared:
        prefix = gl.load(work[0] + u * UNIT + PREFIX)
        HEADS_KV: gl.constexpr = fixed.heads // fixed.group
        kept = whole_row(unit[0], hk, prefix < 0, room_of(work, rows_q, fixed), HEADS_KV, fixed.block_r)
        to = gl.where(whole, kept, cut_row(piece, begins, fixed.block_r))
        return to, unit[5] * fixed.group, whole & (prefix == 0)
    else:
        return 2 * piece + begins.to(gl.int32), fixed.rows_of_part, whole


@gluon.jit
def compute(outputs, parts, strides_o, work, memory, bars, formula, scalars, fixed):
    """The warpgroup that computes, tile after tile of each piece."""
    UNITS = work[0]
    q_ring, k_ring, v_ring, p_tile, board, left = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    scale, rows_q = scalars
    STAGES: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    D_V: gl.constexpr = v_ring.shape[2]
    BLOCK_R: gl.constexpr = q_ring.shape[1]
    ROWS: gl.constexpr = q_ring.shape[0]
    LAYOUT: gl.constexpr = product_layout(BLOCK_R)
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    r = gl.arange(0, BLOCK_R, layout=ROW)
    done = 0
    row = 0
    at = 0
    parted = 0
    count, lo, u, hk, t, piece = posted(0, board, 4)
    while count > 0:
        unit = unit_of(UNITS, u)
        row_start = lo - t
        place, turn = ring_turn(row, ROWS)
        mbarrier.wait(q_full.index(place), turn)
        m_i = gl.full([BLOCK_R], float("-inf"), gl.float32, layout=ROW)
        l_i = gl.zeros([BLOCK_R], gl.float32, layout=ROW)
        acc = gl.zeros([D_V, BLOCK_R], gl.float32, layout=LAYOUT)
        for n in range(done, done + count):
            coming = unit_of(UNITS, u + 1)
            stage, phase = ring_turn(n, STAGES)
            mbarrier.wait(k_full.index(stage), phase)
            fence_async_shared()
            zeros = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, layout=LAYOUT)
            q = q_ring.index(row % ROWS)
            s = warpgroup_mma(k_ring.index(stage), q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(stage))
            offs_n = (unit[2] + t) * BLOCK_N + gl.arange(0, BLOCK_N, layout=KEY)
            s = scores_of(s, unit, hk, unit[1] * BLOCK_R + r, offs_n, formula, scale, fixed)
            m_new = gl.maximum(m_i, gl.max(s, 0))
            m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
            w = gl.exp2(s - m_use[None, :])
            alpha = gl.exp2(m_i - m_use)
            m_i = m_new
            l_i = l_i * alpha + gl.sum(w, 0)
            p_tile.store(w.to(p_tile.dtype))
            acc = acc * alpha[None, :]
            mbarrier.wait(v_full.index(stage), phase)
            fence_async_shared()
            barrier()
            acc = warpgroup_mma(v_ring.index(stage).permute((1, 0)), p_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(stage))

            # the end of a row of tiles, or of what this piece has of it
            after = next_tile(u, hk, t, unit, coming, fixed.heads // fixed.group)
            whole = (row_start >= lo) & (after[2] == 0)
            if (after[2] == 0) | (n + 1 == done + count):
                to, rows, alone = part_of_row(work, unit, u, hk, piece, row_start >= lo, whole, rows_q, fixed)
                if alone:
                    end_row(outputs, strides_o, unit, hk, unit[1] * BLOCK_R + r, acc, l_i, m_i, rows_q, 0, fixed)
                else:
                    leave_part(parts, to, rows, r, acc, l_i, m_i, fixed)
                    barrier()
                    post((1, u, hk, row_start, piece), parted, left, 4)
                    parted += 1
                m_i = gl.full([BLOCK_R], float("-inf"), gl.float32, layout=ROW)
                l_i = gl.zeros([BLOCK_R], gl.float32, layout=ROW)
                acc = gl.zeros([D_V, BLOCK_R], gl.float32, layout=LAYOUT)
                row_start = lo + n + 1 - done
                mbarrier.arrive(q_empty.index(row % ROWS))
                row += 1
                if n + 1 < done + count:
                    place, turn = ring_turn(row, ROWS)
                    mbarrier.wait(q_full.index(place), turn)
            u, hk, t, unit = after
        done += count
        at += 1
        count, lo, u, hk, t, piece = posted(at, board, 4)
    post_last(parted, left, 4)


@gluon.jit(do_not_specialize=["stride_t", "rows_q", "slots", "mask_nums", "score_nums"])
def attention_decode_sm90(
    Q, K, V, SINK, O, LSE, O_PART, LSE_PART, UNITS, BEFORE, ARRIVED, TABLE, FIRST,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_t, mask_args, mask_nums, score_args, score_nums, rows_q, slots,
    scale, fixed,
):  # fmt: skip
    """`fixed` is what is known when the kernel is compiled."""
    dtype: gl.constexpr = K.dtype.element_ty
    K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, fixed.block_d], dtype)
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, fixed.block_dv], dtype)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_r, fixed.block_d], dtype)
    P_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, fixed.block_r], dtype)
    k_ring = gl.allocate_shared_memory(dtype, [fixed.stages, fixed.block_n, fixed.block_d], K_TILE)
    v_ring = gl.allocate_shared_memory(dtype, [fixed.stages, fixed.block_n, fixed.block_dv], V_TILE)
    q_ring = gl.allocate_shared_memory(dtype, [2, fixed.block_r, fixed.block_d], Q_TILE)
    p_tile = gl.allocate_shared_memory(dtype, [fixed.block_n, fixed.block_r], P_TILE)
    board = message_board(PIECE, 1)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=128)
        mbarrier.init(q_empty.index(n), count=1)
    for stage in gl.static_range(fixed.stages):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    fence_async_shared()
    memory = (q_ring, k_ring, v_ring, p_tile, board, message_board(LEFT, 1))
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    tl.extra.cuda.gdc_wait()  # for the plan
    tiles = gl.load(BEFORE + slots) * (fixed.heads // fixed.group)
    work = (UNITS, BEFORE, ARRIVED, slots, tiles, rounds_of(gl.num_programs(0), tiles, fixed.rounds))
    inputs = (Q, K, V, TABLE, FIRST, stride_t)
    strides_q = (stride_qb, stride_qs, stride_qh)
    if fixed.shared:
        strides_q = (stride_qb, stride_qs, stride_qh, rows_q)
    strides_o = (stride_ob, stride_os, stride_oh)
    strides = (strides_q, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh)
    formula = (mask_args, mask_nums, score_args, score_nums)
    outputs = (O, LSE, SINK if fixed.sinks else LSE)
    parts = (O_PART, LSE_PART)
    gl.warp_specialize(
        [
            (compute, (outputs, parts, strides_o, work, memory, bars, formula, (scale, rows_q), fixed)),
            (fetch, (inputs, strides, work, memory, bars, fixed)),
            (merge, (outputs, parts, strides_o, work, memory, rows_q, fixed.block_dv, fixed)),
        ],
        [4, 4],
        [fixed.registers, fixed.registers_of_merge],
    )
