"""Few queries over pages, for Hopper, in Gluon: four warps gather keys (`gluon_sm90_gather`), a warpgroup computes.

Keys are the rows of both products, S^T = K Q^T and O^T = V^T P^T, whose other side are the 4 to 64 rows of queries of a
tile: a product is as wide as those are, and takes K and V from where the copies put them (`gluon_sm90_fold`). Who does
what is planned on the device (`triton_work`). Sources: Ye et al., "FlashInfer"; Shah et al., "FlashAttention-3".
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.ops.attention.gluon_sm90_fold import (
    NOTHING,
    columns_of,
    fold,
    fold_codes,
    no_output,
    no_scores,
    seen_by_all,
    thread_sums,
    unit_of_weights,
)
from tilewise.ops.attention.gluon_sm90_gather import PIECE, fetch, programs_of
from tilewise.ops.attention.triton_prefixes import parts_of_prefix, room_of_prefixes, row_of_part
from tilewise.ops.attention.triton_work import (
    LOOK,
    has_all_parts,
    next_tile,
    program_start,
    rounds_of,
    row_pieces,
    rows_of_unit,
    tile_at,
    unit_of,
)
from tilewise.tiles.arithmetic import LN2, LOG2E
from tilewise.tiles.gluon_api import barrier
from tilewise.tiles.gluon_codes import dims_of_rows
from tilewise.tiles.hopper import message_board, posted, ring_turn

PARTS = gl.constexpr(8)  # partial results that are read at a time


@gluon.jit
def end_row(outputs, strides, unit, hk, r, dv, o, l, top, rows_q, AXIS: gl.constexpr, fixed):
    """Write rows of o and lse: o, with dimensions dv along AXIS, is not divided by l yet, and `top` is in base 2."""
    O, LSE, SINK = outputs
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
    dv = gl.expand_dims(dv, 1 - AXIS)
    mask = gl.expand_dims(in_r, AXIS) & (dv < fixed.head_dim_v)
    o = (o * gl.expand_dims(1.0 / l_safe, AXIS)).to(O.dtype.element_ty)
    gl.store(O + gl.expand_dims(row, AXIS) + dv, o, mask=mask)


@gluon.jit
def leave_part(parts, at, rows, r, dv, o, l, top, AXIS: gl.constexpr, fixed):
    """Leave `rows` of a normalised partial result, with dimensions dv along AXIS, and its lse in base 2, -inf of
    nothing, from row `at` on.
    """
    O_PART, LSE_PART = parts
    D_V: gl.constexpr = o.shape[AXIS]
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    to = at + r
    gl.store(LSE_PART + to, gl.where(empty, float("-inf"), top + gl.log2(l_safe)), mask=r < rows)
    mask = gl.expand_dims(r < rows, AXIS)
    if fixed.encoding == "int4":  # whose rows of a tile may be of no dimension
        mask = mask & gl.expand_dims(dv < D_V, 1 - AXIS)
    to = gl.expand_dims(to, AXIS) * D_V + gl.expand_dims(dv, 1 - AXIS)
    gl.store(O_PART + to, o * gl.expand_dims(1.0 / l_safe, AXIS), mask=mask)


@gluon.jit
def merge_rows(outputs, parts, strides, unit, hk, first, last, first_row, rows_q, prefix, D_V: gl.constexpr, fixed):
    """Fold the parts of some rows that the pieces `first` to `last` left, PARTS of them at a time, behind those of the
    prefix where one may be shared: `prefix` is their number, the first row of them, and of the row's own.
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
    begin = first
    if fixed.prefix is not None:
        begin = first - prefix[0]
    for at in range(begin, last + 1, PARTS):
        p = at + offs_p
        there = (p <= last)[:, None]
        if fixed.prefix is None:
            starts = gl.where(p == first, 2 * p + 1, 2 * p).to(gl.int64) * OF_PARTS
        else:
            n = (p - first).to(gl.int64)
            starts = gl.where(n < 0, prefix[1] + (n + prefix[0]) * fixed.prefix.rows, prefix[2] + n * OF_PARTS)
            there = there & (r_of_pair < unit[5] * fixed.group)[None, :]
        row = starts[:, None] + r_of_pair[None, :]
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
    end_row(outputs, strides, unit, hk, unit[1] * fixed.block_r + r, dv, acc, total, top, rows_q, 1, fixed)


@gluon.jit
def own_part(work, unit, hk, piece, rows_q, fixed):
    """The first row of what a piece leaves of a request's row of tiles, behind all parts of prefixes."""
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    of_request = rows_q * fixed.group
    at = row_of_part(unit[0], hk, of_request, of_request, piece, HEADS_KV, fixed.rows_of_part)
    return room_of_prefixes(work[3], of_request, HEADS_KV, fixed.prefix) + at


@gluon.jit
def merge_if_last(outputs, parts, strides, work, unit, hk, row_start, rows_q, D_V: gl.constexpr, fixed):
    """Count a part of a row of tiles, which is cut, and fold the row where it is the last."""
    ARRIVED, tiles, rounds = work[2] + 1, work[4], work[5]
    first, last = row_pieces(row_start, unit[3], work[6], rounds, tiles)
    if has_all_parts(ARRIVED, first, last, True):
        for first_row in range(0, fixed.rows_of_part, fixed.merged):
            merge_rows(outputs, parts, strides, unit, hk, first, last, first_row, rows_q, (), D_V, fixed)


@gluon.jit
def leave_row(outputs, parts, strides, work, row, piece, r, dv, o, l, top, rows_q, D_V: gl.constexpr, fixed):
    """Write or leave what a piece has of a row of tiles: `row` is (unit, what it is, head, its first tile's position,
    whether it begins here, whether it is all here). Where prefixes may be shared, `merge_share` merges parts later.
    """
    u, unit, hk, row_start, begins, whole = row
    alone = whole
    if fixed.prefix is not None:
        alone = whole & (unit[2] == 0)
    if alone:
        end_row(outputs, strides, unit, hk, unit[1] * fixed.block_r + r, dv, o, l, top, rows_q, 0, fixed)
    elif fixed.prefix is None:
        to = (2 * piece + begins.to(gl.int32)).to(gl.int64) * fixed.rows_of_part
        leave_part(parts, to, fixed.rows_of_part, r, dv, o, l, top, 0, fixed)
        barrier()
        merge_if_last(outputs, parts, strides, work, unit, hk, row_start, rows_q, D_V, fixed)
    else:
        to = own_part(work, unit, hk, piece, rows_q, fixed)
        leave_part(parts, to, rows_q * fixed.group, r, dv, o, l, top, 0, fixed)
        barrier()
        tl.atomic_add(arrived_of(work, u, hk, fixed), 1, sem="release")


@gluon.jit
def arrived_of(work, u, hk, fixed):
    """The counter of parts of a row of tiles, where prefixes may be shared."""
    return work[2] + 1 + u * (fixed.heads // fixed.group) + hk


@gluon.jit
def find_rows(work, fixed):
    """Where an even share of all programs begins: (unit, what it is, head, its first tile's position)."""
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    lo = program_start(gl.program_id(0), gl.num_programs(0), work[4])
    look = gl.arange(0, LOOK, layout=ALL)
    u, hk, t = tile_at(lo, work[1], work[0], work[3], look, fixed.heads // fixed.group)
    return u, unit_of(work[0], u), hk, lo - t


@gluon.jit
def merge_share(outputs, parts, strides, work, row, rows_q, D_V: gl.constexpr, fixed):
    """Fold rows that are cut or behind a prefix, each when all its parts are there: from `row` on (`find_rows`), those
    that end in the even share. Who has tiles has none behind this share, so nobody waits for programs that come later.
    """
    UNITS, slots, tiles, rounds, programs = work[0], work[3], work[4], work[5], work[6]
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    u, unit, hk, row_start = row
    hi = program_start(gl.program_id(0) + 1, gl.num_programs(0), tiles)
    tl.extra.cuda.gdc_wait()  # for parts of prefixes
    while row_start + unit[3] <= hi:
        first, last = row_pieces(row_start, unit[3], programs, rounds, tiles)
        if (first < last) | (unit[2] > 0):
            shared, of_prefix = parts_of_prefix(
                work[7], UNITS, u, unit, hk, rows_q, slots, HEADS_KV, fixed.group, fixed.prefix
            )
            prefix = (shared, of_prefix, own_part(work, unit, hk, first, rows_q, fixed))
            arrived = arrived_of(work, u, hk, fixed)
            while tl.atomic_add(arrived, 0, sem="acquire") <= last - first:
                pass
            barrier()
            gl.store(arrived, 0)  # for the next run of the plan
            for first_row in range(0, fixed.rows_of_part, fixed.merged):
                merge_rows(outputs, parts, strides, unit, hk, first, last, first_row, rows_q, prefix, D_V, fixed)
        row_start += unit[3]
        hk += 1
        if hk == HEADS_KV:
            hk = 0 * hk
            u += 1
            unit = unit_of(UNITS, u)


@gluon.jit
def compute(outputs, parts, strides_o, work, memory, bars, formula, scalars, fixed):
    """The warpgroup that computes, tile after tile of each piece."""
    UNITS = work[0]
    q_ring, board, scale_rings = memory[0], memory[4], memory[6]
    q_full, q_empty = bars[0], bars[1]
    scale, rows_q = scalars
    STAGES: gl.constexpr = memory[1].shape[0]
    BLOCK_N: gl.constexpr = fixed.block_n
    BLOCK_R: gl.constexpr = fixed.block_r
    D_V: gl.constexpr = fixed.block_dv
    ROWS: gl.constexpr = q_ring.shape[0]
    scores = no_scores(fixed)
    output = no_output(fixed)
    ROW: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    KEY: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    O_ROW: gl.constexpr = gl.SliceLayout(0, output.type.layout)
    r = gl.arange(0, BLOCK_R, layout=ROW)
    r_of_o = gl.arange(0, BLOCK_R, layout=O_ROW)
    dv = gl.arange(0, D_V, layout=gl.SliceLayout(1, output.type.layout))
    if fixed.encoding is not None:
        dv = dims_of_rows(dv, fixed.encoding, fixed.head_dim_v, D_V)
    new = (
        gl.full([BLOCK_R], NOTHING, gl.float32, layout=ROW),
        thread_sums(scores),
        output,
        unit_of_weights(2.0**-104, fixed),
    )
    done = 0
    row = 0
    at = 0
    if fixed.prefix is not None:  # while others find the first piece
        merged = find_rows(work, fixed)
    count, lo, u, hk, t, piece = posted(0, board, 4)
    while count > 0:
        unit = unit_of(UNITS, u)
        coming = unit_of(UNITS, u + 1)
        row_start = lo - t
        place, turn = ring_turn(row, ROWS)
        mbarrier.wait(q_full.index(place), turn)
        m_i, l_i, acc, of_weights = new
        seen = seen_by_all(unit, hk, unit[1] * BLOCK_R + r, formula, fixed)
        for n in range(done, done + count):
            stage, phase = ring_turn(n, STAGES)
            first = (unit[2] + t) * BLOCK_N
            all_seen = (first >= seen[0]) & (first + BLOCK_N - 1 <= seen[1])
            where = (unit, hk, unit[1] * BLOCK_R + r, first + gl.arange(0, BLOCK_N, layout=KEY), all_seen)
            q = q_ring.index(row % ROWS)
            state = (m_i, l_i, acc, of_weights)
            if fixed.encoding is not None:
                q_scale = scale_rings[2].index(row % ROWS).load(ROW)
                state = fold_codes(state, q, q_scale, stage, phase, memory, bars, where, formula, scale, fixed)
            else:
                state = fold(state, q, stage, phase, memory, bars, where, formula, scale, fixed)
            m_i, l_i, acc, of_weights = state

            # the end of a row of tiles, or of what this piece has of it
            after = next_tile(u, hk, t, unit, coming, fixed.heads // fixed.group)
            whole = (row_start >= lo) & (after[2] == 0)
            if (after[2] == 0) | (n + 1 == done + count):
                total = gl.convert_layout(gl.sum(gl.sum(l_i, 0), 0), O_ROW)
                largest = gl.convert_layout(m_i, O_ROW)
                has = (u, unit, hk, row_start, row_start >= lo, whole)
                leave_row(
                    outputs, parts, strides_o, work, has, piece, r_of_o, dv, acc, total, largest, rows_q, D_V, fixed
                )
                m_i, l_i, acc, of_weights = new
                seen = seen_by_all(after[3], after[1], after[3][1] * BLOCK_R + r, formula, fixed)
                row_start = lo + n + 1 - done
                mbarrier.arrive(q_empty.index(row % ROWS))
                row += 1
                if n + 1 < done + count:
                    place, turn = ring_turn(row, ROWS)
                    mbarrier.wait(q_full.index(place), turn)
            moved = after[0] != u
            u, hk, t, unit = after
            if moved:
                coming = unit_of(UNITS, u + 1)
        done += count
        at += 1
        count, lo, u, hk, t, piece = posted(at, board, 4)
    if fixed.prefix is not None:
        merge_share(outputs, parts, strides_o, work, merged, rows_q, D_V, fixed)


@gluon.jit(do_not_specialize=["stride_t", "rows_q", "slots", "mask_nums", "score_nums"])
def attention_decode_sm90(
    Q, K, V, SINK, O, LSE, O_PART, LSE_PART, UNITS, BEFORE, ARRIVED, TABLE, FIRST, SCALES, OTHERS,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_t, mask_args, mask_nums, score_args, score_nums, rows_q, slots,
    scale, fixed,
):  # fmt: skip
    """`fixed` is what is known when the kernel is compiled. Where that says `beside`, the launch starts while the one
    before it runs, and has shares of the multiprocessors (`triton_work.write_shares`, here OTHERS).
    """
    dtype: gl.constexpr = Q.dtype.element_ty
    IN_BYTE: gl.constexpr = 2 if fixed.encoding == "int4" else 1
    K_ROW: gl.constexpr = fixed.block_d // IN_BYTE
    V_ROW: gl.constexpr = fixed.block_dv // IN_BYTE
    if fixed.encoding is not None and fixed.encoding != "int4":
        CODES: gl.constexpr = gl.int8 if fixed.encoding == "int8" else gl.float8e4nv
        K = K.to(gl.pointer_type(CODES), bitcast=True)
    stored: gl.constexpr = K.dtype.element_ty
    values: gl.constexpr = V.dtype.element_ty
    factor: gl.constexpr = dtype if fixed.encoding is None else gl.float8e4nv if fixed.encoding == "fp8" else gl.int8
    Q_ROWS: gl.constexpr = columns_of(fixed.block_r, fixed.encoding)[0]
    P_ROWS: gl.constexpr = columns_of(fixed.block_r, fixed.encoding)[1]
    P_SHAPE: gl.constexpr = [fixed.block_n, P_ROWS] if fixed.encoding is None else [P_ROWS, fixed.block_n]
    K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, K_ROW], stored)
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, V_ROW], values)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS, fixed.block_d], factor)
    P_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for(P_SHAPE, factor)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(stored, [fixed.stages, fixed.block_n, K_ROW], K_TILE)
    v_ring = gl.allocate_shared_memory(values, [fixed.stages, fixed.block_n, V_ROW], V_TILE)
    q_ring = gl.allocate_shared_memory(factor, [2, Q_ROWS, fixed.block_d], Q_TILE)
    p_tile = gl.allocate_shared_memory(factor, P_SHAPE, P_TILE)
    scale_rings = ()
    if fixed.encoding is not None:
        scale_rings = (
            gl.allocate_shared_memory(gl.float32, [fixed.stages, fixed.block_n], LINE),
            gl.allocate_shared_memory(gl.float32, [fixed.stages, fixed.block_n], LINE),
            gl.allocate_shared_memory(gl.float32, [2, fixed.block_r], LINE),
        )
    flags = gl.allocate_shared_memory(gl.int32, [4], LINE)
    board = message_board(PIECE, 1)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_empty = k_empty  # codes of keys and values are given back together
    if fixed.encoding is None:
        v_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=128 if fixed.encoding is None else 1)
        mbarrier.init(q_empty.index(n), count=1)
    for stage in gl.static_range(fixed.stages):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=1)
        if fixed.encoding is None:
            mbarrier.init(v_empty.index(stage), count=1)
    fence_async_shared()
    memory = (q_ring, k_ring, v_ring, p_tile, board, flags, scale_rings)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if fixed.beside is None and fixed.prefix is None:
        tl.extra.cuda.gdc_wait()  # for the plan, which a launch over prefixes has waited for
    tiles = gl.load(BEFORE + slots) * (fixed.heads // fixed.group)
    programs = programs_of(OTHERS, BEFORE, slots, fixed)
    if fixed.beside is not None and gl.program_id(0) >= programs:
        tl.extra.cuda.gdc_wait()
        return
    rounds = rounds_of(programs, tiles, fixed.rounds)
    if fixed.prefix is not None:  # others have none
        rounds = gl.where(programs < gl.num_programs(0), 1, rounds)
    work = (UNITS, BEFORE, ARRIVED, slots, tiles, rounds, programs)
    if fixed.prefix is not None:
        work = work + (OTHERS,)  # noqa: RUF005 (unknown to Triton)
    inputs = (Q, K, V, TABLE, FIRST, SCALES, stride_t)
    strides_q = (stride_qb, stride_qs, stride_qh)
    strides_o = (stride_ob, stride_os, stride_oh)
    strides = (strides_q, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh)
    formula = (mask_args, mask_nums, score_args, score_nums)
    outputs = (O, LSE, SINK if fixed.sinks else LSE)
    parts = (O_PART, LSE_PART)
    gl.warp_specialize(
        [
            (compute, (outputs, parts, strides_o, work, memory, bars, formula, (scale, rows_q), fixed)),
            (fetch, (inputs, strides, work, memory, bars, fixed)),
        ],
        [4],
        [fixed.registers],
    )
    if fixed.beside is not None or fixed.prefix is not None:  # so that who waits for this launch waits for both
        tl.extra.cuda.gdc_wait()
