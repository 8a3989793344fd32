"""One tile of keys folded into rows of queries, for the Hopper kernel of few queries: S^T = K Q^T, weights, and
O^T += V^T P^T. `fold` has keys of 16 bits, `fold_codes` codes, whose products are of bytes: queries and weights are
several for each number (`tiles.gluon_codes`).

Scores are relative to the largest of earlier tiles until one passes that by RISE: a tile then needs no reduction over
its warps, only a look at what each of them says (the idea of Ye et al., "FlashInfer", and FlashAttention-4).
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops.attention.triton_work import rows_of_unit
from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.gluon_api import barrier
from tilewise.tiles.gluon_codes import (
    by_places,
    in_columns,
    key_factor,
    largest_of,
    load_values,
    of_columns,
    of_rows,
    value_factor,
)
from tilewise.tiles.hopper import product_layout
from tilewise.tiles.visit import call_once, row_ends

NOTHING = gl.constexpr(-3.4028234663852886e38)  # the least number: what scores are relative to before any is seen
RISE = gl.constexpr(8.0)  # by how much scores may pass, in base 2, what they are relative to
RISE_OF_BYTES = gl.constexpr(1.0)


@gluon.constexpr_function
def columns_of(rows, KIND):
    """(of scores, of the output): columns of the products of so many rows of queries."""
    return (rows, rows) if KIND is None else ((4 if KIND == "fp8" else 2) * rows, 2 * rows)


@gluon.constexpr_function
def _product(columns, KIND):
    """The layout of an accumulator."""
    return product_layout(columns, 16 if KIND is None else 32)


@gluon.constexpr_function
def _accumulated(KIND):
    return gl.int32 if KIND == "int8" or KIND == "int4" else gl.float32


@gluon.jit
def zeros_of(N: gl.constexpr, columns: gl.constexpr, KIND: gl.constexpr):
    return gl.zeros([N, columns], _accumulated(KIND), layout=_product(columns, KIND))


@gluon.jit
def no_scores(fixed):
    """Zeros [keys, rows] as scores lie."""
    zeros = zeros_of(fixed.block_n, columns_of(fixed.block_r, fixed.encoding)[0], fixed.encoding)
    if fixed.encoding is None:
        return zeros
    else:
        return of_rows(zeros, fixed.encoding)


@gluon.jit
def no_output(fixed):
    """Zeros [DV, rows] as o lies."""
    zeros = zeros_of(fixed.block_dv, columns_of(fixed.block_r, fixed.encoding)[1], fixed.encoding)
    if fixed.encoding is None:
        return zeros
    else:
        return of_columns(zeros, fixed.encoding)


@gluon.jit
def by_warps(x):
    """x [keys, rows] of a product as [keys / 64, 4, 2, 8, rows]: a thread's keys are along 0 and 2."""
    return x.reshape([x.shape[0] // 64, 4, 2, 8, x.shape[1]])


@gluon.jit
def thread_sums(w):
    """[4, 8, rows]: what each thread has of a row, summed."""
    return gl.sum(gl.sum(by_warps(w), 2), 0)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def thread_largest(x):
    """[4, 8, rows]: the largest that each thread has of a row, NaN where one is."""
    return gl.reduce(gl.reduce(by_warps(x), 2, _larger), 0, _larger)


@gluon.jit
def tell(which, flags):
    """Each warp says in shared memory whether any of its `which` [4, 8, rows] is so."""
    flags.store(gl.max(which.to(gl.int32).reshape([4, 8 * which.shape[2]]), 1))


@gluon.jit
def any_told(flags):
    return gl.max(flags.load(gl.BlockedLayout([4], [32], [4], [0])), 0) > 0


@gluon.jit
def along(x, like, AXIS: gl.constexpr):
    """x [rows], a number for each row, along `like`, whose rows are its last dimension."""
    LAYOUT: gl.constexpr = like.type.layout
    if AXIS == 1:
        return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, LAYOUT)), 0)
    else:
        x = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(x, 0), 0)


@gluon.jit
def relative_to(s, m_i, l_i, acc):
    """(largest, sums, accumulator) relative to the largest of the scores s [keys, rows], too."""
    largest = gl.maximum(m_i, gl.max(s, 0))
    alpha = gl.exp2(m_i - largest)
    return largest, l_i * along(alpha, l_i, 2), acc * along(alpha, acc, 1)


@gluon.jit
def scores_of(s, unit, hk, r, offs_n, formula, scale, AXIS: gl.constexpr, fixed):
    """Scores in base 2, with keys along AXIS, of keys that are not seen, too."""
    _mask_args, _mask_nums, score_args, score_nums = formula
    if fixed.score is not None:
        _in_r, _m, h, offs_i = rows_of_unit(unit, hk, r, fixed.group)
        h, offs_i = gl.expand_dims(h, AXIS), gl.expand_dims(offs_i, AXIS)
        offs_j = gl.expand_dims(gl.maximum(gl.minimum(offs_n, unit[4] - 1), 0), 1 - AXIS)
        once = call_once(unit[0], h, offs_i, score_args, score_nums, fixed.score_once)
        return fixed.score(s * scale, unit[0], h, offs_i, offs_j, once, score_args, score_nums) * LOG2E
    else:
        return s * (scale * LOG2E)


@gluon.jit
def only_seen(s, unit, hk, r, offs_n, formula, fixed):
    """Scores [keys, rows], -inf where nothing is seen."""
    mask_args, mask_nums, _score_args, _score_nums = formula
    _in_r, _m, h, offs_i = rows_of_unit(unit, hk, r, fixed.group)
    b = unit[0]
    keys = unit[4]
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
def seen_by_all(unit, hk, r, formula, fixed):
    """(first, last) of the keys that all rows of a unit see, where that is known from their ends."""
    if fixed.visible is not None:
        return unit[4], unit[4] - 1
    else:
        _in_r, _m, h, offs_i = rows_of_unit(unit, hk, r, fixed.group)
        first_j, last_j = row_ends(unit[0], h, offs_i, 0, unit[4], formula[0], formula[1], fixed.rows)
        return gl.max(first_j + 0 * r, 0), gl.min(last_j + 0 * r, 0)


@gluon.jit
def fold(state, q, stage, phase, memory, bars, where, formula, scale, fixed):
    """(largest, sums, accumulator) after one tile, in `where` its unit, head, rows and keys, and whether all rows
    see all of these.
    """
    m_i, l_i, acc, of_weights = state
    _, k_ring, v_ring, p_tile, _, flags, _ = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    unit, hk, r, offs_n, all_seen = where
    mbarrier.wait(k_full.index(stage), phase)
    fence_async_shared()
    s = warpgroup_mma(k_ring.index(stage), q.permute((1, 0)), no_scores(fixed), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage))
    s = scores_of(s, unit, hk, r, offs_n, formula, scale, 0, fixed)
    if ~all_seen:
        s = only_seen(s, unit, hk, r, offs_n, formula, fixed)
    tell(thread_largest(s - m_i[None, :]) > RISE, flags)
    w = gl.exp2(s - m_i[None, :])
    p_tile.store(w.to(p_tile.dtype))
    mbarrier.wait(v_full.index(stage), phase)
    fence_async_shared()
    barrier()
    if any_told(flags):
        m_i, l_i, acc = relative_to(s, m_i, l_i, acc)
        w = gl.exp2(s - m_i[None, :])
        p_tile.store(w.to(p_tile.dtype))
        fence_async_shared()
        barrier()
    l_i += thread_sums(w)
    acc = warpgroup_mma(v_ring.index(stage).permute((1, 0)), p_tile, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage))
    return m_i, l_i, acc, of_weights


@gluon.constexpr_function
def parts_of_one(KIND):
    """What a product with queries counts for a 1 of a code: 254ths, and sixteenths of an int4 code."""
    return 1.0 if KIND == "fp8" else 254.0 if KIND == "int8" else 16 * 254.0


@gluon.jit
def unit_of_weights(top, fixed):
    """(top, what weights times scales of values are multiplied by to become bytes, what their products are): `top` is
    the largest such scale. Of 16 bits nothing of that is used.
    """
    if fixed.encoding is None:
        return top, 1.0, 1.0
    else:
        MOST: gl.constexpr = largest_of(fixed.encoding) / 2
        return top, MOST / top, top / (MOST * parts_of_one(fixed.encoding))


@gluon.jit
def put_weights(y, p_tile, KIND: gl.constexpr):
    """Weights y [keys, rows] as bytes, the columns [2 rows, keys] of a factor, keys `by_places`."""
    p_tile.permute((1, 0)).store(in_columns(by_places(y), KIND))


@gluon.jit
def fold_codes(state, q, q_scale, stage, phase, memory, bars, where, formula, scale, fixed):
    """`fold` of codes. Weights are multiplied by the scales of values before they become bytes, and divided by the
    largest such scale so far, `top`.
    """
    m_i, l_i, acc, of_weights = state
    top, to_bytes, of_bytes = of_weights
    _, k_ring, v_ring, p_tile, _, flags, scale_rings = memory
    _, _, k_full, k_empty, v_full, _ = bars
    unit, hk, r, offs_n, all_seen = where
    KIND: gl.constexpr = fixed.encoding
    TO_KEYS: gl.constexpr = columns_of(fixed.block_r, KIND)[0]
    TO_VALUES: gl.constexpr = columns_of(fixed.block_r, KIND)[1]
    MOST: gl.constexpr = largest_of(KIND)
    like = no_scores(fixed)
    KEY: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    mbarrier.wait(k_full.index(stage), phase)
    if KIND != "int4":  # which registers bring to the product
        fence_async_shared()
    k = key_factor(k_ring.index(stage), KIND, _product(TO_KEYS, KIND))
    k_scale = scale_rings[0].index(stage).load(KEY)
    zeros = zeros_of(fixed.block_n, TO_KEYS, KIND)
    product = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = of_rows(warpgroup_mma_wait(0, deps=(product,)), KIND) * k_scale[:, None]
    mbarrier.wait(v_full.index(stage), phase)
    codes = load_values(v_ring.index(stage))
    v_scale = scale_rings[1].index(stage).load(KEY)
    scale = (scale / parts_of_one(KIND) * q_scale)[None, :]
    s = scores_of(s, unit, hk, r, offs_n, formula, scale, 0, fixed)
    if ~all_seen:
        s = only_seen(s, unit, hk, r, offs_n, formula, fixed)
    x = s - m_i[None, :]
    w = gl.exp2(x)
    y = gl.where(w > 0.0, w * (v_scale * to_bytes)[:, None], 0.0)
    put_weights(y, p_tile, KIND)
    tell((thread_largest(x) > RISE_OF_BYTES) | ~(thread_largest(y) <= MOST), flags)
    fence_async_shared()
    barrier()
    if any_told(flags):
        m_i, l_i, acc = relative_to(s, m_i, l_i, acc)
        w = gl.exp2(s - m_i[None, :])
        y = gl.where(w > 0.0, w * v_scale[:, None], 0.0)
        undefined = gl.max((y != y).to(gl.int32), 0)
        acc = gl.where(along(undefined, acc, 1) > 0, float("nan"), acc)
        top = gl.maximum(top, gl.max(gl.where(v_scale == v_scale, v_scale, 0.0), 0))
        top, to_bytes, of_bytes = unit_of_weights(top, fixed)
        put_weights(y * to_bytes, p_tile, KIND)
        fence_async_shared()
        barrier()
    l_i += thread_sums(w)
    mbarrier.arrive(k_empty.index(stage))  # and values: all warps have read their codes before they told
    v = value_factor(codes, KIND, _product(TO_VALUES, KIND))
    zeros = zeros_of(fixed.block_dv, TO_VALUES, KIND)
    added = warpgroup_mma(v, p_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc += of_columns(warpgroup_mma_wait(0, deps=(added,)), KIND) * of_bytes
    return m_i, l_i, acc, (top, to_bytes, of_bytes)
