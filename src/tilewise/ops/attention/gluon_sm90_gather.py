"""The warps that fetch for `gluon_sm90_decode` and `gluon_sm90_decode_prefixes`: they take pieces of work, tell who
computes of them, and gather.

Rows of keys are found through a block table and copied 16 bytes a thread at a time; where the next tile lies is looked
up before this one's copies are asked for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.ops.attention.gluon_sm90_pages import of_rows, places_of, rows_of
from tilewise.ops.attention.triton_work import (
    LOOK,
    next_tile,
    piece_of_turn,
    piece_span,
    rows_of_unit,
    tile_at,
    unit_of,
)
from tilewise.tiles.arithmetic import decoded
from tilewise.tiles.gluon_api import barrier, copy_async
from tilewise.tiles.gluon_codes import in_rows, largest_of
from tilewise.tiles.hopper import post, ring_turn, take

PIECE = gl.constexpr(6)  # numbers of a message: tiles, first position, unit, head, first tile, piece


@gluon.jit
def next_turn(TURNS, turns, programs):
    """The next turn that nobody has taken, beyond the last where each program has but one. Each takes them until one is
    beyond the last, so as many are taken as there are: who takes the last sets the counter back for the next run of the
    plan.
    """
    turn = turns
    if turns > programs:
        taken = take(TURNS)
        gl.store(TURNS, 0, mask=taken == turns - 1)
        turn = programs + taken
    return turn


@gluon.jit
def programs_of(OTHERS, BEFORE, slots, fixed):
    """How many programs have pieces, where there are enough tiles."""
    if fixed.beside is not None:
        return gl.load(OTHERS + 2) * fixed.beside
    elif fixed.prefix is not None:
        return gl.load(BEFORE + slots + 1)
    else:
        return gl.num_programs(0)


@gluon.jit
def find_piece(turn, work, fixed):
    """(tiles, first position, unit, head, first tile, piece): of a turn, or where that is empty of the next one that
    nobody has taken and is not; no tiles where all are taken.
    """
    UNITS, BEFORE, TURNS, slots, tiles = work[0], work[1], work[2], work[3], work[4]
    rounds, programs = work[5], work[6]
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    turns = programs * rounds
    count = 0 * turn
    lo = count
    piece = count
    looking = turn < turns
    while looking:
        piece = piece_of_turn(turn, programs, rounds)
        lo, count = piece_span(piece, programs, rounds, tiles)
        looking = count == 0
        if looking:
            turn = next_turn(TURNS, turns, programs)
            looking = turn < turns
    u, hk, t = slots, 0 * lo, 0 * lo
    if count > 0:
        u, hk, t = tile_at(lo, BEFORE, UNITS, slots, gl.arange(0, LOOK, layout=ALL), HEADS_KV)
    return count, lo, u, hk, t, piece


@gluon.jit
def pages_of(table, unit, first, r, BLOCK_N: gl.constexpr, fixed):
    """Pages of the keys first + r of a request, 0 where there is none."""
    TABLE, FIRST, stride_t = table
    row = TABLE + unit[0].to(gl.int64) * stride_t if FIRST is None else TABLE + gl.load(FIRST + unit[0])
    entry, _place = places_of(first, r, BLOCK_N, fixed.page)
    return gl.load(row + entry, mask=r < unit[4] - first, other=0)


@gluon.jit
def gather(pool, rows, mask, scales, at, ring, full, empty):
    """Copy the rows of one tile into the ring's place for the `at`-th, once that is free; `scales` are (pointer, where,
    which, ring) of the rows' scales, or nothing.
    """
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    copy_async(ring.index(stage), pool + rows, mask=mask)
    if len(scales) > 0:
        copy_async(scales[3].index(stage), scales[0] + scales[1], mask=scales[2])
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def gather_queries(Q, strides, unit, hk, at, ring, scales, full, empty, fixed):
    """Copy the rows of a unit's tile into the ring's place for the `at`-th; beside codes as bytes, several rows each,
    and a scale.
    """
    R: gl.constexpr = fixed.block_r
    D: gl.constexpr = fixed.block_d
    LAYOUT: gl.constexpr = of_rows(D, 16)
    offs_d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    if fixed.encoding == "int4":  # the halves of a row begin with the tile's
        HALF: gl.constexpr = fixed.head_dim // 2
        column = offs_d % (D // 2)
        offs_d = gl.where(column < HALF, offs_d // (D // 2) * HALF + column, fixed.head_dim)
    r = unit[1] * R + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    in_r, m, h, _i = rows_of_unit(unit, hk, r, fixed.group)
    if fixed.of_prefixes:  # of several requests
        rows_q = strides[3]
        b = m
        query = 0 * m
        if rows_q > 1:  # a division takes as long as a look-up
            b = m // rows_q
            query = m - b * rows_q
        row = (unit[0] + b).to(gl.int64) * strides[0] + query.to(gl.int64) * strides[1]
    else:
        row = unit[0].to(gl.int64) * strides[0] + (unit[6] + m).to(gl.int64) * strides[1]
    row += h.to(gl.int64) * strides[2]
    mask = in_r[:, None] & (offs_d < fixed.head_dim)[None, :]
    if fixed.encoding is None:
        gather(Q, row[:, None] + offs_d[None, :], mask, (), at, ring, full, empty)
    else:
        q = gl.load(Q + row[:, None] + offs_d[None, :], mask=mask, other=0.0)
        place, phase = ring_turn(at, ring.shape[0])
        mbarrier.wait(empty.index(place), phase ^ 1)
        q = q.to(gl.float32)
        largest = gl.max(gl.where(q == q, gl.abs(q), float("inf")), 1)
        scale = gl.where(largest < float("inf"), largest * (1.0 / largest_of(fixed.encoding)), float("nan"))
        ring.index(place).store(in_rows(q * gl.where(scale > 0.0, 1.0 / scale, 0.0)[:, None], fixed.encoding))
        scales.index(place).store(scale)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(place))


@gluon.jit
def scales_of(SCALES, pages, first, hk, r, there, rings, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """What `gather` is told of the scales of a tile's keys and values, () where these are no codes."""
    if SCALES is None:
        return (), ()
    else:
        k_strides = (decoded(SCALES[2]), decoded(SCALES[3]), decoded(SCALES[4]))
        v_strides = (decoded(SCALES[5]), decoded(SCALES[6]), decoded(SCALES[7]))
        k_at = rows_of(pages, first, hk.to(gl.int64), r, k_strides, BLOCK_N, PAGE, 1)
        v_at = rows_of(pages, first, hk.to(gl.int64), r, v_strides, BLOCK_N, PAGE, 1)
        return (SCALES[0], k_at, there, rings[0]), (SCALES[1], v_at, there, rings[1])


@gluon.jit
def fetch(inputs, strides, work, memory, bars, fixed):
    """The warps that fetch: K of a tile, then V, gathered through the block table, and before a row of tiles its Q.
    They take pieces of work, the next one while two tiles of the present one are still to come, and post them.
    """
    Q, K, V, TABLE, FIRST, SCALES, stride_t = inputs
    strides_q, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh = strides
    UNITS, TURNS = work[0], work[2]
    q_ring, k_ring, v_ring, _, board, _, scale_rings = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    OF_K: gl.constexpr = of_rows(k_ring.shape[2], k_ring.dtype.primitive_bitwidth)
    OF_V: gl.constexpr = of_rows(v_ring.shape[2], v_ring.dtype.primitive_bitwidth)
    K_ROWS: gl.constexpr = gl.SliceLayout(1, OF_K)
    V_ROWS: gl.constexpr = gl.SliceLayout(1, OF_V)
    K_FIRST: gl.constexpr = True if fixed.encoding is not None else fixed.of_prefixes  # then what comes next
    EACH: gl.constexpr = K_ROWS if SCALES is None else gl.BlockedLayout([1], [32], [4], [0])
    IN_BYTE: gl.constexpr = 2 if fixed.encoding == "int4" else 1
    q_scales = scale_rings[2] if fixed.encoding is not None else None
    offs_d = gl.arange(0, k_ring.shape[2], layout=gl.SliceLayout(0, OF_K))
    offs_dv = gl.arange(0, v_ring.shape[2], layout=gl.SliceLayout(0, OF_V))
    r = gl.arange(0, BLOCK_N, layout=K_ROWS)
    of_scales = gl.arange(0, BLOCK_N, layout=EACH)
    k_strides = (stride_kp, stride_ks, stride_kh)
    v_strides = (stride_vp, stride_vs, stride_vh)
    table = (TABLE, FIRST, stride_t)
    n = 0
    rows = 1
    piece = find_piece(gl.program_id(0), work, fixed)
    if not K_FIRST:
        post(piece, 0, board, 4)
    posts = 1
    left, _lo, u, hk, t, _p = piece
    if K_FIRST & (left == 0):
        post(piece, 0, board, 4)
    unit = unit_of(UNITS, u)
    first = (unit[2] + t) * BLOCK_N
    pages = pages_of(table, unit, first, r, BLOCK_N, fixed)  # on their way while queries become bytes
    pages_of_scales = pages_of(table, unit, first, of_scales, BLOCK_N, fixed)
    if fixed.of_prefixes:  # so many queries that keys are asked for before them
        begins = (u, hk)
    elif left > 0:
        gather_queries(Q, strides_q, unit, hk, 0, q_ring, q_scales, q_full, q_empty, fixed)
    after = unit
    coming = unit_of(UNITS, u + 1)
    turn = 0
    known = 0  # of the next piece: nothing, its turn, all
    while left > 0:
        k_rows = rows_of(pages, first, 0, r, k_strides, BLOCK_N, fixed.page, 16)
        v_rows = k_rows
        if not fixed.alike:
            v_rows = rows_of(pages, first, 0, r, v_strides, BLOCK_N, fixed.page, 16)
        k_head = K + gl.multiple_of(hk.to(gl.int64) * stride_kh, 16)  # heads may lie outermost in a pool
        v_head = V + gl.multiple_of(hk.to(gl.int64) * stride_vh, 16)
        in_k = r < unit[4] - first
        there = of_scales < unit[4] - first
        k_scales, v_scales = scales_of(
            SCALES, pages_of_scales, first, hk, of_scales, there, scale_rings, BLOCK_N, fixed.page
        )
        mask = in_k[:, None] & (offs_d < fixed.head_dim // IN_BYTE)[None, :]
        if K_FIRST:
            gather(k_head, k_rows[:, None] + offs_d[None, :], mask, k_scales, n, k_ring, k_full, k_empty)
            if n == 0:
                post(piece, 0, board, 4)
        if (left <= 3) & (known == 0):
            turn = next_turn(TURNS, work[6] * work[5], work[6])
            known = 1
        if (left <= 2) & (known == 1):
            piece = find_piece(turn, work, fixed)
            post(piece, posts, board, 4)
            posts += 1
            after = unit_of(UNITS, piece[2])
            known = 2

        # where the next tile is, and its pages
        before = u
        u, hk, t, unit = next_tile(u, hk, t, unit, coming, fixed.heads // fixed.group)
        left -= 1
        starts = t == 0
        moved = u != before
        if left == 0:
            left, _lo, u, hk, t, _p = piece
            unit = after
            starts = left > 0
            moved = starts
            known = 0
        if moved:
            coming = unit_of(UNITS, u + 1)
        first = (unit[2] + t) * BLOCK_N
        pages = pages_of(table, unit, first, r, BLOCK_N, fixed)
        pages_of_scales = pages_of(table, unit, first, of_scales, BLOCK_N, fixed)

        if not K_FIRST:
            gather(k_head, k_rows[:, None] + offs_d[None, :], mask, k_scales, n, k_ring, k_full, k_empty)
        v_rows = gl.convert_layout(v_rows, V_ROWS)
        mask = gl.convert_layout(in_k, V_ROWS)[:, None] & (offs_dv < fixed.head_dim_v // IN_BYTE)[None, :]
        gather(v_head, v_rows[:, None] + offs_dv[None, :], mask, v_scales, n, v_ring, v_full, v_empty)
        if fixed.of_prefixes:  # noqa: SIM102 (known when it is compiled)
            if n == 0:
                row = unit_of(UNITS, begins[0])
                gather_queries(Q, strides_q, row, begins[1], 0, q_ring, q_scales, q_full, q_empty, fixed)
        if starts:
            gather_queries(Q, strides_q, unit, hk, rows, q_ring, q_scales, q_full, q_empty, fixed)
            rows += 1
        n += 1
