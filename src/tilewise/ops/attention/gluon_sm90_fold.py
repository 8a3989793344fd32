"""One tile of keys folded into rows of queries, for the Hopper kernel of few queries: S^T = K Q^T, weights, and
O^T += V^T P^T. `fold` has keys of 16 bits or fp8 codes, `fold_integers` int8 and int4 codes, whose products are of
bytes: queries and weights are in two (`tiles.gluon_codes.in_two`).

Scores are relative to the largest of earlier tiles until one passes that by RISE: a tile then needs no reduction over
its warps, only a look at what each of them says (the idea of Ye et al., "FlashInfer", and FlashAttention-4).
"""

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
    PART,
    float_keys,
    float_values,
    in_two,
    integer_keys,
    integer_values,
    joined,
    load_float_keys,
    load_float_values,
    load_integer_values,
)
from tilewise.tiles.hopper import product_layout
from tilewise.tiles.visit import call_once, row_ends

NOTHING = gl.constexpr(-3.4028234663852886e38)  # the least number: what scores are relative to before any is seen
RISE = gl.constexpr(8.0)  # by how much scores may pass, in base 2, what they are relative to
RISE_OF_BYTES = gl.constexpr(1.0)
LARGEST = gl.constexpr(63.5)  # the first byte of a weight of 1: twice as much is 127


@gluon.constexpr_function
def _product(rows, integers):
    """The layout of both products' accumulators."""
    return product_layout(2 * rows, 32) if integers else product_layout(rows)


@gluon.jit
def blank(N: gl.constexpr, fixed):
    """Zeros [N, rows] in the layout of a product."""
    if fixed.integers:
        return joined(gl.zeros([N, 2 * fixed.block_r], gl.int32, layout=_product(fixed.block_r, fixed.integers)))
    else:
        return gl.zeros([N, fixed.block_r], gl.float32, layout=_product(fixed.block_r, fixed.integers))


@gluon.jit
def by_warps(x):
    """x [keys, rows] of a product as [keys / 64, 4, 2, 8, rows]: a thread's keys are along 0 and 2."""
    return x.reshape([x.shape[0] // 64, 4, 2, 8, x.shape[1]])


@gluon.jit
def thread_sums(w):
    """[4, 8, rows]: what each thread has of a row, summed."""
    return gl.sum(gl.sum(by_warps(w), 2), 0)


@gluon.jit
def tell(which, flags):
    """Each warp says in shared memory whether any of its `which` [keys, rows] is so."""
    of_warps = which.to(gl.int32).reshape([which.shape[0] // 64, 4, 16 * which.shape[1]])
    flags.store(gl.max(gl.max(of_warps, 0), 1))


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
def fold(state, q, stage, phase, memory, bars, where, formula, scale, fixed):
    """(largest, sums, accumulator) after one tile, in `where` its unit, head, rows and keys."""
    m_i, l_i, acc, top = state
    _, k_ring, v_ring, p_tile, _, flags, scale_rings = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    unit, hk, r, offs_n = where
    HALF: gl.constexpr = p_tile.dtype
    KEY: gl.constexpr = gl.SliceLayout(1, _product(fixed.block_r, fixed.integers))
    s = blank(fixed.block_n, fixed)
    mbarrier.wait(k_full.index(stage), phase)
    fence_async_shared()
    if fixed.encoding is None:
        s = warpgroup_mma(k_ring.index(stage), q.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage))
    else:
        k = float_keys(load_float_keys(k_ring.index(stage)), HALF, _product(fixed.block_r, fixed.integers))
        k_scale = scale_rings[0].index(stage).load(KEY)
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)
        codes = load_float_values(v_ring.index(stage))
        v_scale = scale_rings[1].index(stage).load(KEY)
        s = warpgroup_mma_wait(0, deps=(s,)) * k_scale[:, None]
        if gl.float16 == HALF:  # whose small numbers are few: what is rounded to it is a weight times at most 1
            top = gl.max(v_scale, 0)
            top = gl.where(top > 0, top, 1.0)
            v_scale = v_scale / top
    s = scores_of(s, unit, hk, r, offs_n, formula, scale, fixed)
    x = s - m_i[None, :]
    w = gl.exp2(x)
    if fixed.encoding is None:
        p_tile.store(w.to(HALF))
        mbarrier.wait(v_full.index(stage), phase)
    else:
        p_tile.store((w * v_scale[:, None]).to(HALF))
    tell(x > RISE, flags)
    fence_async_shared()
    barrier()
    if any_told(flags):
        m_i, l_i, acc = relative_to(s, m_i, l_i, acc)
        w = gl.exp2(s - m_i[None, :])
        if fixed.encoding is None:
            p_tile.store(w.to(HALF))
        else:
            p_tile.store((w * v_scale[:, None]).to(HALF))
        fence_async_shared()
        barrier()
    l_i += thread_sums(w)
    if fixed.encoding is None:
        acc = warpgroup_mma(v_ring.index(stage).permute((1, 0)), p_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage))
    else:
        mbarrier.arrive(k_empty.index(stage))  # all warps have read their codes before they told
        mbarrier.arrive(v_empty.index(stage))
        v = float_values(codes, HALF, _product(fixed.block_r, fixed.integers))
        if gl.float16 == HALF:
            added = warpgroup_mma(v, p_tile, blank(fixed.block_dv, fixed), use_acc=False, is_async=True)
            acc += warpgroup_mma_wait(0, deps=(added,)) * top
        else:
            acc = warpgroup_mma(v, p_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    return m_i, l_i, acc, top


@gluon.jit
def put_weights(y, p_tile):
    """Weights y [keys, rows] of at most 2, in two bytes, as the columns [2 rows, keys] of a factor."""
    first, second = in_two(y * LARGEST)
    p = gl.join(first, second).reshape([y.shape[0], 2 * y.shape[1]])
    p_tile.permute((1, 0)).store(p)


@gluon.jit
def fold_integers(state, q, q_scale, stage, phase, memory, bars, where, formula, scale, fixed):
    """`fold` of int8 or int4 codes. Weights are multiplied by the scales of values before they become bytes, and
    divided by the largest such scale so far, `top`.
    """
    m_i, l_i, acc, top = state
    _, k_ring, v_ring, p_tile, _, flags, scale_rings = memory
    _, _, k_full, k_empty, v_full, v_empty = bars
    unit, hk, r, offs_n = where
    R: gl.constexpr = fixed.block_r
    D_V: gl.constexpr = fixed.block_dv
    PRODUCT: gl.constexpr = _product(fixed.block_r, fixed.integers)
    TIMES: gl.constexpr = 16.0 if fixed.encoding == "int4" else 1.0
    like = blank(fixed.block_n, fixed)
    KEY: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    mbarrier.wait(k_full.index(stage), phase)
    fence_async_shared()
    k = integer_keys(k_ring.index(stage), fixed.encoding, PRODUCT)
    k_scale = scale_rings[0].index(stage).load(KEY) * (1.0 / (PART * TIMES))
    zeros = gl.zeros([fixed.block_n, 2 * R], gl.int32, layout=PRODUCT)
    product = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    codes = load_integer_values(v_ring.index(stage))
    v_scale = scale_rings[1].index(stage).load(KEY)
    s = joined(warpgroup_mma_wait(0, deps=(product,))) * k_scale[:, None] * q_scale[None, :]
    s = scores_of(s, unit, hk, r, offs_n, formula, scale, fixed)
    x = s - m_i[None, :]
    w = gl.exp2(x)
    y = gl.where(w > 0.0, w * v_scale[:, None], 0.0) * (1.0 / top)
    put_weights(y, p_tile)
    tell((x > RISE_OF_BYTES) | ~(y <= 2.0), flags)
    fence_async_shared()
    barrier()
    if any_told(flags):
        m_i, l_i, acc = relative_to(s, m_i, l_i, acc)
        w = gl.exp2(s - m_i[None, :])
        y = gl.where(w > 0.0, w * v_scale[:, None], 0.0)
        undefined = gl.max((y != y).to(gl.int32), 0)
        acc = gl.where(along(undefined, acc, 1) > 0, float("nan"), acc)
        top = gl.maximum(top, gl.max(gl.where(v_scale == v_scale, v_scale, 0.0), 0))
        put_weights(y * (1.0 / top), p_tile)
        fence_async_shared()
        barrier()
    l_i += thread_sums(w)
    mbarrier.arrive(k_empty.index(stage))  # all warps have read their codes before they told
    mbarrier.arrive(v_empty.index(stage))
    v = integer_values(codes, fixed.encoding, PRODUCT)
    zeros = gl.zeros([D_V, 2 * R], gl.int32, layout=PRODUCT)
    added = warpgroup_mma(v, p_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc += joined(warpgroup_mma_wait(0, deps=(added,))) * (top * (1.0 / (LARGEST * PART * TIMES)))
    return m_i, l_i, acc, top
