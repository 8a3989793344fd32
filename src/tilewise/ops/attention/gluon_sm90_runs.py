"""Runs of Hopper's kernels: which tiles the programs that own keys or queries visit, and where those lie."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.hopper import afresh, all_afresh, sequence
from tilewise.tiles.visit import TILE_BITS, entry_of, locate, row_ends, take_turns, tile_of_entry, visits

RUN = gl.constexpr(8)  # numbers of a run; the last is how many tiles it visits
LONGEST = gl.constexpr(4)  # rows of tiles of each pair that come before all others


@gluon.jit
def run_of(item, g, grid, fixed, BLOCK_M: gl.constexpr, KEYS: gl.constexpr):
    """A run over tiles of queries: those of the g-th head of a group, for the keys of one item of the grid. Items with
    the first keys, which most see under a causal mask, go first, or where sums of dQ are `ordered` those with the last.
    Packed sequences have items to spare, which visit nothing.

    Returns (batch, head, row of tiles in a list, first key, first visited tile, first FULL one, or under a mask that
    cuts no tile 0 where nothing is seen, how many are not FULL, how many tiles it visits).
    """
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    sizes, formula, _, cu_seqlens = grid
    batch, seqlen_q, seqlen_k, _rows, slots, together, _items = sizes
    mask_args, mask_nums = all_afresh(formula[0]), all_afresh(formula[1])
    CU_Q, CU_K = cu_seqlens
    pair, slot = take_turns(item, slots, HEADS_KV if fixed.packed else batch * HEADS_KV, together)
    if fixed.ordered:
        slot = slots - 1 - slot
    b = pair // HEADS_KV
    h = pair % HEADS_KV * fixed.group + g
    if fixed.lists:
        slot = turn_of_list(list_of(b, pair % HEADS_KV * fixed.group, slot, grid, fixed))  # whatever g is
    n = slot
    if fixed.packed:
        b, n = locate(slot, CU_K, batch, KEYS)
    _queries, _row0, seqlen_q = sequence(b, CU_Q, seqlen_q, fixed.packed)
    _keys, _row0, seqlen_k = sequence(b, CU_K, seqlen_k, fixed.packed)
    start = n * KEYS
    j1 = gl.minimum(start + KEYS, seqlen_k) - 1
    rows = seqlen_q
    if fixed.ordered:  # the last tile in its turn, though not filled: its other rows are zeros, and so are weights
        rows = (seqlen_q + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    begin, full_begin, num_full, num_partial = visits(
        b, h, start, j1, seqlen_k - seqlen_q, rows, mask_args, mask_nums, list_of(b, h, slot, grid, fixed),
        fixed.lists, fixed.tiles, BLOCK_M,
    )  # fmt: skip
    if fixed.whole:
        full_begin = num_full + num_partial
    num_partial = gl.maximum(num_partial, 1 - num_full)  # keys that nobody sees visit one tile, all of it hidden
    count = num_full + num_partial
    if fixed.packed:
        count = gl.where(start < seqlen_k, count, 0)
    return b, h, slot, start, begin, full_begin, num_partial, count


@gluon.jit
def turns_of_queries(item, slots, pairs, together, fixed):
    """`take_turns`; where each pair of batch and head has its turn alone and rows are sorted by what they visit, the
    longest of all pairs come before the others, or the GPU would be left to those of the last pair.
    """
    if fixed.lists:
        longest = gl.where(together == 1, gl.minimum(LONGEST, slots - 1), 0)
        late = gl.where(item < longest * pairs, 0, 1)
        pair, turn = take_turns(
            item - late * longest * pairs, gl.where(late == 1, slots - longest, longest), pairs,
            gl.where(late == 1, together, pairs),
        )  # fmt: skip
        turn += late * longest
    else:
        pair, turn = take_turns(item, slots, pairs, together)
    return pair, turn


@gluon.jit
def run_of_queries(item, grid, fixed, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A run over tiles of keys: those that the queries of one item of the grid see, as `run_of`. The last queries,
    which see most under a causal mask, go first.
    """
    sizes, formula, _, cu_seqlens = grid
    batch, seqlen_q, seqlen_k, _rows, slots, together, _items = sizes
    mask_args, mask_nums = all_afresh(formula[0]), all_afresh(formula[1])
    CU_Q, CU_K = cu_seqlens
    pair, turn = turns_of_queries(item, slots, fixed.heads if fixed.packed else batch * fixed.heads, together, fixed)
    slot = slots - 1 - turn
    b = pair // fixed.heads
    h = pair % fixed.heads
    if fixed.lists:
        slot = turn_of_list(list_of(b, h, turn, grid, fixed))
    m = slot
    if fixed.packed:
        b, m = locate(slot, CU_Q, batch, BLOCK_M)
    _queries, _row0, seqlen_q = sequence(b, CU_Q, seqlen_q, fixed.packed)
    _keys, seqlen_k = keys_of(b, CU_K, seqlen_k, fixed)
    start = m * BLOCK_M
    first = gl.minimum(start, gl.maximum(seqlen_q - 1, 0))  # formulas see valid positions only
    last = gl.maximum(gl.minimum(start + BLOCK_M, seqlen_q) - 1, first)
    i0 = first + seqlen_k - seqlen_q
    i1 = last + seqlen_k - seqlen_q
    begin, full_begin, num_full, num_partial = visits(
        b, h, i0, i1, 0, seqlen_k, mask_args, mask_nums, list_of(b, h, slot, grid, fixed), fixed.lists, fixed.tiles,
        BLOCK_N,
    )  # fmt: skip
    if fixed.whole:
        full_begin = num_full + num_partial
    num_partial = gl.maximum(num_partial, 1 - num_full)  # who sees nothing visits one tile, all of it hidden
    count = num_full + num_partial
    if fixed.packed:
        count = gl.where(start < seqlen_q, count, 0)
    if fixed.few is not None:
        count = gl.where(seqlen_q * fixed.group > fixed.few, count, 0)
    return b, h, slot, start, begin, full_begin, num_partial, count


@gluon.jit
def reach_of(run, first, lengths, grid, fixed):
    """(first, last) query that any of a warpgroup's 64 keys, from number `first` on, is seen by, if it is seen at all;
    of masks of lists nothing is known.
    """
    seqlen_q, seqlen_k = lengths
    mask_args, mask_nums = all_afresh(grid[1][0]), all_afresh(grid[1][1])
    begin, end = 0 * first, seqlen_q - 1
    if fixed.tiles is not None:
        low = seqlen_k - seqlen_q
        last = gl.minimum(first + 63, seqlen_k - 1)
        begin, end, _, _ = fixed.tiles(run[0], run[1], gl.minimum(first, last), last, mask_args, mask_nums)
        begin, end = begin - low, end - low
    return begin, gl.where(first < seqlen_k, end, -1)


@gluon.jit
def ends_of(run, rows, begin, end, formula, fixed):
    """First and last position of the other side, of those from `begin` up to `end`, that each of a run's rows sees, or
    that see it.
    """
    mask_args, mask_nums = all_afresh(formula[0]), all_afresh(formula[1])
    first, last = row_ends(run[0], run[1], rows, begin, end, mask_args, mask_nums, fixed.rows)
    if fixed.whole:
        last = gl.where(run[5] > 0, last, first - 1)
    return first, last


@gluon.jit
def turn_of_list(listed):
    """The row whose turn it is when that of this one comes: those that visit most go first, where they are sorted."""
    return gl.load(listed + 2 + gl.maximum(gl.load(listed), 1 - gl.load(listed + 1)))


@gluon.jit
def list_of(b, h, slot, grid, fixed):
    """The list of tiles of a row, where there are lists."""
    listed, list_stride_b, list_stride_h, list_stride_r = grid[2]
    if fixed.lists:
        listed = listed + (b.to(gl.int64) * list_stride_b + h.to(gl.int64) * list_stride_h + slot) * list_stride_r
    return listed


@gluon.jit
def keys_of(b, CU_K, seqlen_k, fixed):
    """(sequence of keys as descriptors know it, their number); for a paged request, whose number CU_K holds, that twice
    over.
    """
    if fixed.paged:
        seqlen_k = gl.load(CU_K + b)
        keys = seqlen_k
    else:
        keys, _row0, seqlen_k = sequence(b, CU_K, seqlen_k, fixed.packed)
    return keys, seqlen_k


@gluon.jit
def where_of(run, grid, fixed, BLOCK: gl.constexpr):
    """(queries, keys, (their numbers), first row of its queries' sequence, the visited tiles) of a run."""
    b, h, slot, begin, full_begin, num_partial, count = run[0], run[1], run[2], run[4], run[5], run[6], run[7]
    _batch, seqlen_q, seqlen_k, _rows, _slots, _together, _items = grid[0]
    CU_Q, CU_K = grid[3]
    queries, row0, seqlen_q = sequence(b, CU_Q, seqlen_q, fixed.packed)
    keys, seqlen_k = keys_of(b, CU_K, seqlen_k, fixed)
    last = ((seqlen_q if fixed.of_keys else seqlen_k) + BLOCK - 1) // BLOCK - 1
    width = afresh(grid[2][3]) if fixed.lists else 0
    tiles = (begin, full_begin, count - num_partial, num_partial, last, list_of(b, h, slot, grid, fixed), width)
    return queries, keys, (seqlen_q, seqlen_k), row0, tiles


@gluon.jit
def first_key(t, tiles, fixed):
    """The first key of the t-th of all visited tiles, those that are not FULL first."""
    entry = entry_of(t, tiles, fixed.lists)
    first = tile_of_entry(entry, tiles, fixed.lists) * fixed.block_n
    if fixed.moved:
        first += entry >> TILE_BITS
    return first


@gluon.jit
def first_tile_of(run, row0, grid, fixed, BLOCK_M: gl.constexpr):
    """Where in tensors of tiles (what queries begin with) those of a run's sequence and head begin."""
    b, h = run[0], run[1]
    tile0 = (h if fixed.packed else b * fixed.heads + h) * grid[0][3]
    if fixed.packed:
        tile0 += row0 // BLOCK_M + b
    return tile0
