"""Attention over codes for Hopper, in Gluon: `gluon_sm90_fwd` with INT8 or FP8 scores and FP8 outputs (Zhang et al.,
"SageAttention2"; Shah et al., "FlashAttention-3"). Values come by channel, their keys in the order in which a thread
has weights, so weights become an operand where they are. The tensor cores keep 13 bits of a sum of such products: each
tile's output begins anew and is added in float32. So each tile's weights can be counted from its own largest: FP8 then
holds small ones, too, whatever other tiles have.
"""

import math

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from tilewise.ops.attention.gluon_sm90_code_scales import (
    alike,
    block_of_queries,
    near_scales_of_keys,
    near_scales_of_queries,
    scales_of_keys,
    scales_of_queries,
)
from tilewise.ops.attention.gluon_sm90_fetch import fetch
from tilewise.ops.attention.gluon_sm90_formula import scored, seen_in, with_hidden
from tilewise.ops.attention.gluon_sm90_half_codes import are_near, kept, weights_of_kept
from tilewise.ops.attention.gluon_sm90_products import (
    DEPTH,
    finished,
    of_thread,
    output_of,
    packed_weights,
    product_of,
    scores_of,
)
from tilewise.ops.attention.gluon_sm90_runs import RUN, ends_of, where_of
from tilewise.ops.attention.gluon_sm90_value_codes import (
    no_units,
    plus_output,
    put_output,
    scale_of_values,
    units_with,
)
from tilewise.ops.attention.gluon_sm90_weight_codes import (
    codes_of_exponents,
    larger,
    largest_of,
    largest_of_thread,
    packed_codes,
)
from tilewise.tiles.arithmetic import LN2, LOG2E, power_below
from tilewise.tiles.hopper import (
    afresh,
    at_row,
    filled,
    give_turn,
    hidden,
    keep_before_wait,
    keep_last_before_wait,
    matrix,
    message_board,
    of_threads,
    only_bits,
    over_parts,
    parts_of,
    posted,
    product_layout,
    ring_turn,
    thread_bits,
    thread_max,
    thread_sums,
    tilt_of,
    tilted,
    wait_turn,
    whole,
)
from tilewise.tiles.visit import call_once, proved, visit_any

FALL = gl.constexpr(32.0)  # how far below the largest of all its exponents a row may be counted from
SMALLEST_FACTOR = gl.constexpr(1e-20)  # of codes that a mask may hide: `hidden` times it is far below any score


@gluon.constexpr_function
def _log2(x):
    return math.log2(x)


@gluon.jit
def first_scores(done, at, memory, bars, fixed, C: gl.constexpr, wanted):
    """Start the scores of an item's first tile, once Q and K are there; if not `wanted`, of what lies there."""
    q_full, k_full = bars[0], bars[2]
    place, phase = ring_turn(at, fixed.ahead)
    spot = place * fixed.consumers + C
    mbarrier.wait(q_full.index(spot), phase, pred=wanted)
    stage, phase = ring_turn(done, fixed.stages)
    mbarrier.wait(k_full.index(stage), phase, pred=wanted)
    return scores_of(matrix(memory[0].index(spot)), matrix(memory[1].index(stage)))


@gluon.jit
def final_scores(s, n, masked, rows, scales, formula, fixed, bits=None, CUT: gl.constexpr = True):
    """(what the softmax sees of the products with key tile n, up to a factor; that factor [64, 4], for base 2; the
    largest of each row [64] in base 2, up to the tilt at the tile's first key; that tilt). `bits` say what a formula
    sees, where that was known before; no mask cuts a tile that is not CUT.
    """
    LAYOUT: gl.constexpr = s.type.layout
    PLAIN: gl.constexpr = fixed.linear is None and not fixed.scale_first  # scores are as their products are ordered
    GUARD: gl.constexpr = fixed.guard or fixed.score is not None
    offs_i, tilt, bias = rows[2], rows[7], rows[8]
    of_queries, of_keys = scales
    NUMBERS: gl.constexpr = PLAIN and fixed.k_groups != fixed.block_n  # codes have no NaN, only their scales
    INTEGERS: gl.constexpr = NUMBERS and not CUT and s.dtype == gl.int32
    if INTEGERS:
        raw = thread_max(s).to(gl.float32)  # of two integers in one instruction
    s = s.to(gl.float32)
    none = gl.zeros([64, 4], gl.float32, layout=of_threads(parts_of(s)))
    if fixed.k_groups == fixed.block_n:
        s = s * of_keys[None, :]
        factor = of_queries[:, None] + none
    else:
        factor = of_queries[:, None] * of_keys[None, :]
    if PLAIN:
        if fixed.guard:
            factor = gl.where(factor < SMALLEST_FACTOR, SMALLEST_FACTOR, factor)
    else:
        scaled = parts_of(s)
        s = whole(scaled * over_parts(factor, scaled), s)
        if fixed.linear is not None:
            s = s + (tilt[1] * gl.arange(0, fixed.block_n, layout=gl.SliceLayout(0, LAYOUT)).to(gl.float32))[None, :]
        if fixed.score is not None:
            if fixed.biased:
                s = s + gl.convert_layout(bias, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
            s = scored(s, n * fixed.block_n, rows, formula, fixed)
        if not fixed.in_base_2:
            s = s * LOG2E  # here, for the compiler would round it only in the maximum
        factor = none + 1.0
    if bits is not None:
        s = only_bits(s, bits)
    elif fixed.guard and masked:
        s = with_hidden(s, n * fixed.block_n, rows, formula, fixed)
    if not INTEGERS:
        raw = thread_max(s) if NUMBERS else largest_of_thread(s)
    largest = raw * factor
    if GUARD:
        HIDDEN: gl.constexpr = hidden(not PLAIN)
        largest = gl.where(raw < HIDDEN / 2, float("-inf"), largest)
    of_row = largest_of(largest, 1)
    more = 0.0
    if fixed.linear is not None:
        of_tile = tilted(tilt, offs_i, n * fixed.block_n, 0)
        more = gl.convert_layout(of_tile, of_row.type.layout, assert_trivial=True)
    return s, factor, of_row, more


@gluon.jit
def bits_of(n, rows, formula, fixed, LAYOUT: gl.constexpr):
    """What a formula sees of key tile n, as `thread_bits`, also where all queries see the same."""
    every = gl.full([64, fixed.block_n], 1, gl.int1, layout=LAYOUT)
    first = n * fixed.block_n
    there = first + gl.arange(0, fixed.block_n, layout=gl.SliceLayout(0, LAYOUT)) < rows[3]
    return thread_bits(every & there[None, :] & seen_in(first, rows, formula, fixed, LAYOUT))


@gluon.jit
def weights_of(final, level, most, fixed):
    """(weights of `final_scores`, numbers [64, N / 8, 4, 2] or `codes_of_exponents`; the exponents [64] that they are
    counted from, where what came before was counted from `level`; the largest [64] so far, of which `most` is what came
    before; the factor [64] for what came before).

    A tile's largest weight in a row becomes `p_largest`, unless it is so far below the row's that sums, counted from
    there, would leave float32.
    """
    s, factor, of_row, more = final
    SHIFT: gl.constexpr = _log2(fixed.p_largest)
    largest = of_row + more
    most = larger(most, largest)
    after = larger(largest, most - FALL)
    here = after
    if fixed.guard or fixed.score is not None:
        here = gl.where(after == float("-inf"), 0.0, after)  # a row that has seen nothing yet
    before = gl.exp2(level - here)
    parts = parts_of(s)
    none = gl.zeros([64, 4], gl.float32, layout=of_threads(parts))
    offset = (SHIFT + more - here)[:, None] + none
    if fixed.exact_sums:
        w = gl.exp2(parts * over_parts(factor, parts) + over_parts(offset, parts))
    else:
        w = codes_of_exponents(parts, factor, offset)
    return w, after, most, before


@gluon.jit
def as_bytes(w, fixed):
    """Weights as `packed_weights` has them."""
    return packed_weights(w) if fixed.exact_sums else packed_codes(w)


@gluon.jit
def over_tiles(q, done, run, tiles, rows, first_k, of_queries, memory, bars, SKIP, formula, codes, fixed):
    """(output before it is divided, that of the channels behind, sums, maxima, units of outputs) of an item's tiles,
    one after another: where values have more channels than an output beside the next scores has registers for, and
    where what is more than the head's `skip` below all maxima is neither exponentiated nor multiplied, as in
    `gluon_sm90_fwd.over_tiles`.
    """
    num_partial, count = run[6], run[7]
    _, k_ring, v_ring, o_ring, _, ones = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    WIDTH: gl.constexpr = o_ring.shape[-1]  # channels whose output is made at a time
    WIDE: gl.constexpr = v_ring.shape[-2] > WIDTH
    SCORES: gl.constexpr = product_layout(fixed.block_n, DEPTH)
    OUT: gl.constexpr = product_layout(WIDTH, DEPTH)
    l_i = thread_sums(gl.zeros([64, fixed.block_n], gl.float32, layout=SCORES))
    QUADS: gl.constexpr = l_i.type.layout
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, SCORES if fixed.k_groups == fixed.block_n else QUADS)
    level = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, QUADS))
    most = level
    acc = gl.zeros([64, WIDTH], gl.float32, layout=OUT)
    behind = acc if WIDE else 0
    units = no_units(run)
    lowest = float("-inf")
    if fixed.skips:
        lowest = -gl.load(SKIP + rows[1]) * LOG2E
    for t in range(count):
        n = visit_any(t, tiles, fixed.lists)
        of_keys = scales_of_keys(codes, first_k, n, fixed, OF_KEYS)
        of_values = scale_of_values(codes, first_k, n, fixed)
        bits = None
        if WIDE and fixed.visible is not None:  # a formula has registers only before there are scores
            bits = gl.full([64, 4], -1, gl.int32, layout=QUADS)
            if t < num_partial:
                bits = bits_of(n, rows, formula, fixed, SCORES)
        stage, k = filled(done + t, k_ring, k_full)
        s = warpgroup_mma_wait(0, deps=(scores_of(q, k),))
        mbarrier.arrive(k_empty.index(stage))
        final = final_scores(s, n, t < num_partial, rows, (of_queries, of_keys), formula, fixed, bits)
        stage_v, v = filled(done + t, v_ring, v_full)
        worth = True
        if fixed.skips:
            worth = gl.max(final[2] + final[3] - most, 0) >= lowest
        if worth:
            w, level, most, before = weights_of(final, level, most, fixed)
            p = as_bytes(w, fixed)
            added = gl.sum(gl.sum(w, 3), 1) if fixed.exact_sums else 0
            r, sums = finished(*output_of(p, v.slice(0, WIDTH, 0), ones, fixed), 0, fixed)
            l_i = l_i * before[:, None] + (added if fixed.exact_sums else of_thread(sums, l_i))
            units = units_with(units, of_values, fixed)
            acc = plus_output(acc, r, before, units, of_values, fixed, ALWAYS=True)
            if WIDE:
                r = warpgroup_mma_wait(0, deps=(product_of(p, v.slice(WIDTH, WIDTH, 0)),))
                behind = plus_output(behind, r, before, units, of_values, fixed, ALWAYS=True)
        mbarrier.arrive(v_empty.index(stage_v))
    return acc, behind, l_i, level, units


@gluon.jit
def with_output(acc, l_i, r, sums, before, units, of_values, fixed):
    """(output, sums of weights, units) with those of a tile."""
    units = units_with(units, of_values, fixed)
    acc = plus_output(acc, r, before, units, of_values, fixed)
    if not fixed.exact_sums:
        l_i = l_i * before[:, None] + of_thread(sums, l_i)
    return acc, l_i, units


@gluon.jit
def cut_tile(t, count, q, so_far, around, fixed):
    """The output of an item's tile t - 1, and then the scores of tile t, which a mask cuts."""
    p, acc, l_i, level, most, before, units, of_values, n = so_far
    done, tiles, rows, first_k, of_queries, memory, bars, formula, codes = around
    _, k_ring, v_ring, _, _, ones = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    SCORES: gl.constexpr = product_layout(fixed.block_n, DEPTH)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, SCORES if fixed.k_groups == fixed.block_n else l_i.type.layout)
    of_keys = scales_of_keys(codes, first_k, n, fixed, OF_KEYS)
    ahead = visit_any(gl.minimum(t + 1, count - 1), tiles, fixed.lists)
    bits = None
    if fixed.visible is not None:
        bits = bits_of(n, rows, formula, fixed, SCORES)
    stage_v, v = filled(done + t - 1, v_ring, v_full)
    r, sums = finished(*output_of(p, v, ones, fixed), 0, fixed)
    mbarrier.arrive(v_empty.index(stage_v))
    acc, l_i, units = with_output(acc, l_i, r, sums, before, units, of_values, fixed)
    of_values = scale_of_values(codes, first_k, n, fixed)
    stage, k = filled(done + t, k_ring, k_full)
    s = warpgroup_mma_wait(0, deps=(scores_of(q, k),))
    mbarrier.arrive(k_empty.index(stage))
    final = final_scores(s, n, True, rows, (of_queries, of_keys), formula, fixed, bits)
    w, level, most, before = weights_of(final, level, most, fixed)
    if fixed.exact_sums:
        l_i = l_i * before[:, None] + gl.sum(gl.sum(w, 3), 1)
    return as_bytes(w, fixed), acc, l_i, level, most, before, units, of_values, ahead


@gluon.jit
def full_tile(t, count, q, so_far, around, fixed, C: gl.constexpr, near=None):
    """The output of an item's tile t - 1 and the scores of tile t, which no mask cuts, at the same time. With `near`,
    scales of queries and keys, weights are of what is kept of scores; also scales of the keys of the tile after.
    """
    p, acc, l_i, level, most, before, units, of_values, n = so_far
    done, tiles, rows, first_k, of_queries, memory, bars, formula, codes = around
    _, k_ring, v_ring, _, _, ones = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    SCORES: gl.constexpr = product_layout(fixed.block_n, DEPTH)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, SCORES if fixed.k_groups == fixed.block_n else l_i.type.layout)
    if near is None:
        of_keys = scales_of_keys(codes, first_k, n, fixed, OF_KEYS)
    ahead = visit_any(gl.minimum(t + 1, count - 1), tiles, fixed.lists)
    stage, k = filled(done + t, k_ring, k_full)
    wait_turn(C)
    coming = scores_of(q, k)
    stage_v, v = filled(done + t - 1, v_ring, v_full)
    r, sums = output_of(p, v, ones, fixed)
    give_turn((C + 1) % fixed.consumers)
    s = warpgroup_mma_wait(1 if fixed.exact_sums else 2, deps=(coming,))
    mbarrier.arrive(k_empty.index(stage))
    coming_values = scale_of_values(codes, first_k, n, fixed)  # before, products would wait for it
    coming_keys = 0.0
    if near is None:
        final = final_scores(s, n, False, rows, (of_queries, of_keys), formula, fixed, CUT=False)
        w, level, most, after = weights_of(final, level, most, fixed)
    else:
        coming_keys = near_scales_of_keys(codes, first_k, ahead, fixed, OF_KEYS)
        factor = near[0] * near[1] if alike(fixed.q_groups, fixed.k_groups) else near[0][:, None] * near[1][None, :]
        SHIFT: gl.constexpr = _log2(fixed.p_largest)
        w, level, most, after = weights_of_kept(
            kept(s), factor, level, most, FALL, SHIFT, alike(fixed.q_groups, fixed.k_groups)
        )
    if fixed.exact_sums:
        added = gl.sum(gl.sum(w, 3), 1)
        l_i = l_i * after[:, None] + added
        keep_before_wait(added)
    else:
        keep_last_before_wait(w.to(gl.float32, bitcast=True))
    r, sums = finished(r, sums, 0, fixed)
    mbarrier.arrive(v_empty.index(stage_v))
    p = as_bytes(w, fixed)
    acc, l_i, units = with_output(acc, l_i, r, sums, before, units, of_values, fixed)
    return (p, acc, l_i, level, most, after, units, coming_values, ahead), coming_keys


@gluon.jit
def compute(outputs, memory, bars, grid, scalars, codes, fixed, C: gl.constexpr):
    """One warpgroup, as `gluon_sm90_fwd.compute`. The output of each tile is added a tile late, when it is done."""
    O, LSE, SINK = outputs
    sizes, formula, _, _ = grid
    mask_args, mask_nums, score_args, score_nums = formula
    scale, c, SKIP = scalars
    q_ring, k_ring, v_ring, o_ring, board, ones = memory
    q_full, q_empty, _k_full, k_empty, v_full, v_empty = bars
    V_SCALE, V_MEAN, Q_BIAS, blocks_k = codes[2], codes[3], codes[4], codes[6]
    WIDTH: gl.constexpr = o_ring.shape[-1]
    WIDE: gl.constexpr = v_ring.shape[-2] > WIDTH
    ONE_BY_ONE: gl.constexpr = fixed.skips or WIDE
    SCORES: gl.constexpr = product_layout(fixed.block_n, DEPTH)
    OUT: gl.constexpr = product_layout(WIDTH, DEPTH)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    ROW_OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    quads = thread_sums(gl.zeros([64, fixed.block_n], gl.float32, layout=SCORES))
    QUADS: gl.constexpr = quads.type.layout
    ROW_OF_QUADS: gl.constexpr = gl.SliceLayout(1, QUADS)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, SCORES if fixed.k_groups == fixed.block_n else QUADS)
    SHIFT: gl.constexpr = _log2(fixed.p_largest)
    EARLY: gl.constexpr = fixed.ahead == 2
    ALIKE: gl.constexpr = alike(fixed.q_groups, fixed.k_groups)
    PLAIN: gl.constexpr = fixed.linear is None and not fixed.scale_first and fixed.k_groups != fixed.block_n
    OF_KEPT: gl.constexpr = k_ring.dtype == gl.int8 and PLAIN and not fixed.exact_sums
    if fixed.consumers - 1 == C and not ONE_BY_ONE:
        give_turn(0)
    done = 0
    at = 0
    out = o_ring.index(C)
    run = posted(0, board, 4)
    s = gl.zeros([64, fixed.block_n], gl.int32 if k_ring.dtype == gl.int8 else gl.float32, layout=SCORES)
    if EARLY:
        s = warpgroup_mma_wait(0, deps=(first_scores(0, 0, memory, bars, fixed, C, run[7] > 0),))
    while run[7] > 0:
        b, h, start, num_partial, count = run[0], run[1], run[3], run[6], run[7]
        queries, _keys, lengths, row0, tiles = where_of(run, grid, fixed, fixed.block_n)
        rows_q = afresh(sizes[3])
        seqlen_q, seqlen_k = lengths
        own = gl.minimum(start + 64 * C + gl.arange(0, 64, layout=ROW_OF_SCORES), seqlen_q - 1)
        offs_i = proved(own + seqlen_k - seqlen_q, seqlen_k)
        ends = ends_of(run, offs_i, 0, seqlen_k, formula, fixed)
        mask_once = call_once(b, h, offs_i[:, None], mask_args, mask_nums, fixed.mask_once)
        score_once = call_once(b, h, offs_i[:, None], score_args, score_nums, fixed.score_once)
        tilt = tilt_of(b, h, score_args, score_nums, fixed.linear)
        last_key = gl.maximum(seqlen_k - 1, 0)
        row = h.to(gl.int64) * rows_q + row0 if fixed.packed else (b * fixed.heads + h).to(gl.int64) * rows_q
        h_kv = h // fixed.group
        first_k = h_kv * blocks_k
        if fixed.packed:
            first_k += gl.load(grid[3][1] + b) // fixed.block_n + b
        else:
            first_k += b * (fixed.heads // fixed.group) * blocks_k
        bias = gl.zeros([64], gl.float32, layout=ROW_OF_QUADS)
        if fixed.biased:
            mine = gl.minimum(start + 64 * C + gl.arange(0, 64, layout=ROW_OF_QUADS), seqlen_q - 1)
            bias = gl.load(Q_BIAS + row + mine)
        rows = (b, h, offs_i, seqlen_k, last_key, ends, (mask_once, score_once), tilt, bias)
        block_q = block_of_queries(codes, run, row0, seqlen_q, fixed, C)
        of_queries = scales_of_queries(codes, block_q, fixed, ROW_OF_QUADS) * c

        spot = at % fixed.ahead * fixed.consumers + C
        q = matrix(q_ring.index(spot))
        behind = 0
        if ONE_BY_ONE:
            mbarrier.wait(q_full.index(spot), ring_turn(at, fixed.ahead)[1])
            acc, behind, l_i, level, units = over_tiles(
                q, done, run, tiles, rows, first_k, of_queries, memory, bars, SKIP, formula, codes, fixed
            )
            done += count
        else:
            # the first tile
            n = visit_any(0, tiles, fixed.lists)
            of_keys = scales_of_keys(codes, first_k, n, fixed, OF_KEYS)
            if not EARLY:
                s = warpgroup_mma_wait(0, deps=(first_scores(done, at, memory, bars, fixed, C, True),))
            mbarrier.arrive(k_empty.index(done % fixed.stages))
            level = gl.full([64], float("-inf"), gl.float32, layout=ROW_OF_QUADS)
            final = final_scores(s, n, num_partial > 0, rows, (of_queries, of_keys), formula, fixed)
            w, level, most, before = weights_of(final, level, level, fixed)
            l_i = gl.sum(gl.sum(w, 3), 1) if fixed.exact_sums else quads
            p = as_bytes(w, fixed)
            acc = gl.zeros([64, WIDTH], gl.float32, layout=OUT)
            of_values = scale_of_values(codes, first_k, n, fixed)

            # the others: first those that are cut, in a loop of their own, for whose formula the other has no registers
            around = (done, tiles, rows, first_k, of_queries, memory, bars, formula, codes)
            ahead = visit_any(gl.minimum(1, count - 1), tiles, fixed.lists)
            so_far = (p, acc, l_i, level, most, before, no_units(run), of_values, ahead)
            cut = 1
            if fixed.guard:
                # an own address: the assembler would compute the other loop's on the way into this one, run or not
                q_of_cut = matrix(q_ring.index(spot + gl.where(h < 0, 1, 0)))
                cut = gl.minimum(gl.maximum(num_partial, 1), count)
                for t in range(1, cut):
                    so_far = cut_tile(t, count, q_of_cut, so_far, around, fixed)
            if OF_KEPT:
                q_of_near = matrix(q_ring.index(spot + gl.where(b < 0, 1, 0)))  # an own address, again
                near, ends_of_rows = near_scales_of_queries(codes, block_q, of_queries, c, fixed)
                of_keys = near_scales_of_keys(codes, first_k, so_far[-1], fixed, OF_KEYS)
                while (cut < count) & are_near(ends_of_rows, of_keys, ALIKE):
                    so_far, of_keys = full_tile(cut, count, q_of_near, so_far, around, fixed, C, (near, of_keys))
                    cut += 1
            for t in range(cut, count):
                so_far, _coming = full_tile(t, count, q, so_far, around, fixed, C)
            p, acc, l_i, level, most, before, units, of_values, _n = so_far
            done += count

        # the last output; the next item, and its first scores, meanwhile
        mbarrier.arrive(q_empty.index(spot))
        if not ONE_BY_ONE:
            stage_v, v = filled(done - 1, v_ring, v_full)
            r, sums = output_of(p, v, ones, fixed)
        after = posted(at + 1, board, 4)
        if EARLY:
            s = first_scores(done, at + 1, memory, bars, fixed, C, after[7] > 0)
        if not ONE_BY_ONE:
            r, sums = finished(r, sums, 1 if EARLY else 0, fixed)
            mbarrier.arrive(v_empty.index(stage_v))
            acc, l_i, units = with_output(acc, l_i, r, sums, before, units, of_values, fixed)

        # the end
        l_all = gl.sum(l_i, 1) if fixed.exact_sums else gl.max(l_i, 1)  # four of a quad are alike
        l_row = gl.convert_layout(l_all, ROW, assert_trivial=True)
        m2 = gl.convert_layout(level, ROW, assert_trivial=True) - SHIFT
        if fixed.biased and fixed.score is None:
            m2 += gl.convert_layout(bias, ROW, assert_trivial=True) * (scale * LOG2E)
        share = l_row
        factor = 1.0
        if fixed.sinks:
            sink2 = gl.load(SINK + h).to(gl.float32) * LOG2E
            m_all = gl.maximum(m2, sink2)
            m_all = gl.where(m_all == float("-inf"), 0.0, m_all)
            factor = power_below(m2, m_all)
            share = l_row * factor
            l_row = share + power_below(sink2, m_all)
            m2 = m_all
        empty = l_row == 0.0
        l_safe = gl.where(empty, 1.0, l_row)
        lse = gl.where(empty, float("-inf"), (m2 + gl.log2(l_safe)) * LN2)
        offs_m = start + 64 * C + gl.arange(0, 64, layout=ROW)
        gl.store(LSE + row + offs_m, lse, mask=offs_m < seqlen_q)
        of_head = (b * (fixed.heads // fixed.group) + h_kv) * fixed.head_dim_v
        channels = (V_SCALE, V_MEAN, of_head, units[0])
        where = at_row(queries, h, start + 64 * C)
        put_output(O, where, out, acc, factor / l_safe, share / l_safe, channels, fixed, 0)
        if WIDE:
            put_output(O, where, out, behind, factor / l_safe, share / l_safe, channels, fixed, WIDTH)
        if EARLY:
            s = warpgroup_mma_wait(0, deps=(s,))
        at += 1
        run = after
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "items", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "blocks_q", "blocks_k", "scale",
    ]
)  # fmt: skip
def attention_codes_sm90(
    Q, K, V, SINK, O, LSE, CU_Q, CU_K, SKIP, Q_SCALE, K_SCALE, V_SCALE, V_MEAN, Q_BIAS, LISTED, list_stride_b,
    list_stride_h, list_stride_r, NEXT, mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, items, blocks_q, blocks_k, scale, fixed,
):  # fmt: skip
    """`fixed` is what is known when the kernel is compiled (`gluon_fixed.Fixed`)."""
    D_V: gl.constexpr = V.block_shape[3]
    N: gl.constexpr = fixed.block_n
    D: gl.constexpr = Q.block_shape[4]
    q_ring = gl.allocate_shared_memory(Q.dtype, [fixed.ahead * fixed.consumers, 1, 1, 1, 64, D], Q.layout)
    k_ring = gl.allocate_shared_memory(K.dtype, [fixed.stages, 1, 1, 1, N, D], K.layout)
    v_ring = gl.allocate_shared_memory(V.dtype, [fixed.stages, 1, 1, 1, D_V, N], V.layout)
    o_ring = gl.allocate_shared_memory(O.dtype, [fixed.consumers, 1, 1, 1, 64, O.block_shape[4]], O.layout)
    ONES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    ones = gl.allocate_shared_memory(V.dtype, [8, N], ONES)
    # the byte of 1.0: Triton 3.6's assembler leaves half of a pair of equal FP8 conversions unset
    filling = gl.full([8, N], 0x38, gl.int8, layout=gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
    ones.store(filling.to(V.dtype, bitcast=True))
    board = message_board(RUN, fixed.consumers)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [fixed.ahead * fixed.consumers, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [fixed.ahead * fixed.consumers, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    for c in gl.static_range(fixed.ahead * fixed.consumers):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for stage in gl.static_range(fixed.stages):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=fixed.consumers)
        mbarrier.init(v_empty.index(stage), count=fixed.consumers)
    fence_async_shared()

    # roles
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (batch, seqlen_q, seqlen_k, rows_q, slots, together, items)
    lists = (LISTED if fixed.lists else 0, list_stride_b, list_stride_h, list_stride_r)
    cu_seqlens = (CU_Q if fixed.packed else 0, CU_K if fixed.packed else 0)
    grid = (sizes, (mask_args, mask_nums, score_args, score_nums + (scale,)), lists, cu_seqlens)  # noqa: RUF005
    inputs = (Q, K, V, NEXT if fixed.dealt or fixed.meets is not None else 0, (0, 0, 0, 0))
    outputs = (O, LSE, SINK if fixed.sinks else LSE)
    if fixed.score is not None:
        c = 1.0  # its formula scales
    elif fixed.scale_first:
        c = scale
    else:
        c = scale * LOG2E
    scalars = (scale, c, SKIP if fixed.skips else 0)
    bias = Q_BIAS if fixed.biased else LSE
    codes = (Q_SCALE, K_SCALE, V_SCALE, V_MEAN if fixed.centred else LSE, bias, blocks_q, blocks_k)
    memory = (q_ring, k_ring, v_ring, o_ring, board, ones)
    tl.extra.cuda.gdc_wait()  # for what makes the codes
    gl.warp_specialize(
        [
            (compute, (outputs, memory, bars, grid, scalars, codes, fixed, 0)),
            (compute, (outputs, memory, bars, grid, scalars, codes, fixed, 1)),
            (fetch, (inputs, (q_ring, k_ring, v_ring, o_ring, board), bars, grid, fixed)),
        ],
        [4, 1],
        [fixed.registers, 24],
    )
