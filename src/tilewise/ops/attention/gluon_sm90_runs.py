"""What Hopper's backward kernels share whose programs own keys: the runs of a program over tiles of queries, and the
transposed scores of such a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.gluon_api import barrier
from tilewise.tiles.hopper import only_within, product_layout, sequence, tilt_of, tilted, with_columns
from tilewise.tiles.visit import call_once, locate, row_ends, take_turns, visits

RUN = gl.constexpr(9)  # numbers of a run; the last is how many tiles it visits


@gluon.jit
def run_of(item, g, grid, fixed, BLOCK_M: gl.constexpr, KEYS: gl.constexpr):
    """A run over tiles of queries: those of the g-th head of a group, for the keys of one item of the grid. Items with
    the first keys, which most see under a causal mask, go first, or last where dQ is added to in order
    (`place_in_order`). Packed sequences have items to spare, which visit nothing.

    Returns (batch, head, row of tiles in a list, first key, first visited tile, first FULL one, how many are FULL, how
    many are not, how many tiles it visits).
    """
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    sizes, formula, _, cu_seqlens = grid
    batch, seqlen_q, seqlen_k, _slots_q, slots, together, _items = sizes
    mask_args, mask_nums, _, _, _ = formula
    CU_Q, CU_K = cu_seqlens
    pair, slot = take_turns(item, slots, HEADS_KV if fixed.packed else batch * HEADS_KV, together)
    b = pair // HEADS_KV
    h = pair % HEADS_KV * fixed.group + g
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
def first_tile_of(run, row0, grid, fixed, BLOCK_M: gl.constexpr):
    """Where in tensors of tiles (`prepare`) those of a run's sequence and head begin."""
    b, h = run[0], run[1]
    tile0 = (h if fixed.packed else b * fixed.heads + h) * grid[0][3]
    if fixed.packed:
        tile0 += row0 // BLOCK_M + b
    return tile0


@gluon.jit
def own_keys(run, lengths, first, grid, fixed, BLOCK_M: gl.constexpr):
    """What a warpgroup knows of its 64 keys, from key `first` on: (batch, head, (numbers of queries and of keys),
    positions, ends of what each sees, what formulas compute once, tilt of a linear score).
    """
    KEY: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_M))
    b, h = run[0], run[1]
    seqlen_q, seqlen_k = lengths
    mask_args, mask_nums, score_args, score_nums, _ = grid[1]
    offs_n = first + gl.arange(0, 64, layout=KEY)
    offs_j = gl.minimum(offs_n, seqlen_k - 1)
    first_i, last_i = row_ends(b, h, offs_j, seqlen_k - seqlen_q, seqlen_k, mask_args, mask_nums, fixed.rows)
    last_i = gl.where(offs_n < seqlen_k, last_i, first_i - 1)
    mask_once = call_once(b, h, offs_j[:, None], mask_args, mask_nums, fixed.mask_once)
    score_once = call_once(b, h, offs_j[:, None], score_args, score_nums, fixed.score_once)
    tilt = tilt_of(b, h, score_args, score_nums, fixed.linear)
    return b, h, lengths, offs_j, (first_i, last_i), (mask_once, score_once), tilt


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
def start_scores(stage, k, q, own, shift_ring, scalars, fixed):
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
            start = start + (own[6][0] / scalars[1] * columns)[None, :]
        s = product_from(start, k, q)
    return s


@gluon.jit
def probabilities(s, stage, m, own, shift_ring, formula, scalars, fixed, MASKED: gl.constexpr):
    """(P of the queries of tile m, (the scaled scores, positions, what the score's formula has for the columns)), from
    what `start_scores` started.
    """
    BLOCK_M: gl.constexpr = s.shape[1]
    SCORES: gl.constexpr = s.type.layout
    b, h, lengths, offs_j, ends, onces, tilt = own
    seqlen_q, seqlen_k = lengths
    first_i, last_i = ends
    mask_once, score_once = onces
    scale, c = scalars
    mask_args, mask_nums, score_args, score_nums, _ = formula
    first_query = m * BLOCK_M + seqlen_k - seqlen_q
    last_query = seqlen_k - 1
    offs_i = first_query + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    offs_i = gl.minimum(offs_i, last_query)  # formulas see valid positions only
    raw = s
    of_score = score_once
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
    return p, (raw, offs_i, of_score)


@gluon.jit
def through_score(ds, p, around, own, formula, fixed, MASKED: gl.constexpr):
    """The gradient of the scaled scores from that of what their formula made of them (`around` of `probabilities`)."""
    if fixed.slope is not None:
        raw, offs_i, of_score = around
        b, h, _, offs_j, _, _, _ = own
        _, _, score_args, score_nums, _ = formula
        ds = fixed.slope(ds, raw, b, h, offs_i[None, :], offs_j[:, None], of_score, score_args, score_nums)
        if MASKED:
            ds = gl.where(p == 0.0, 0.0, ds)  # a hidden score may have no finite derivative
    return ds


@gluon.jit
def hand_over(x, place, full):
    """Hand a tile to whoever waits for it in shared memory."""
    place.store(x)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full)
