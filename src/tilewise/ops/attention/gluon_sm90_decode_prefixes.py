"""Prefixes that requests share, on Hopper, in Gluon: the launch before `gluon_sm90_decode` (`triton_prefixes`).

The queries of all requests that share a prefix are many rows, and all of them see all of its keys. So rows of queries
are the rows of both products here, 64 of them for each of one or two warpgroups, which run the same instructions, since
it takes long until these come from memory (benchmarks/NOTES.md). Weights stay in registers. Keys are gathered as they
are for few rows (`gluon_sm90_gather`). Sources: Juravsky et al., "Hydragen"; Ye et al., "FlashInfer".
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

from tilewise.ops.attention.gluon_sm90_decode import leave_part
from tilewise.ops.attention.gluon_sm90_fold import NOTHING, scores_of
from tilewise.ops.attention.gluon_sm90_gather import PIECE, fetch
from tilewise.ops.attention.triton_prefixes import row_of_part
from tilewise.ops.attention.triton_work import next_tile, unit_of
from tilewise.tiles.hopper import message_board, posted, ring_turn

PLACES = gl.constexpr(2)  # for rows of queries


@gluon.constexpr_function
def rows_layout(columns, warps):
    """Registers of an accumulator of 64 rows for each four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.jit
def compute(parts, work, memory, bars, formula, scalars, fixed):
    """The warps that compute, tile after tile of the program's piece."""
    UNITS = work[0]
    q_ring, k_ring, v_ring, board = memory[0], memory[1], memory[2], memory[4]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    scale, rows_q = scalars
    HEADS_KV: gl.constexpr = fixed.heads // fixed.group
    BLOCK_N: gl.constexpr = fixed.block_n
    D_V: gl.constexpr = fixed.block_dv
    R: gl.constexpr = fixed.block_r
    SCORES: gl.constexpr = rows_layout(BLOCK_N, fixed.warps)
    OUT: gl.constexpr = rows_layout(D_V, fixed.warps)
    RIGHT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    O_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    r = gl.arange(0, R, layout=ROW)
    r_of_o = gl.arange(0, R, layout=O_ROW)
    dv = gl.arange(0, D_V, layout=gl.SliceLayout(0, OUT))
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    zeros = gl.zeros([R, BLOCK_N], gl.float32, layout=SCORES)
    new = (
        gl.full([R], NOTHING, gl.float32, layout=ROW),
        gl.zeros([R], gl.float32, layout=ROW),
        gl.zeros([R, D_V], gl.float32, layout=OUT),
    )
    m_i, l_i, acc = new
    row = 0
    count, _lo, u, hk, t, piece = posted(0, board, fixed.warps)
    unit = unit_of(UNITS, u)
    coming = unit_of(UNITS, u + 1)
    for n in range(count):
        place, turn = ring_turn(row, PLACES)
        mbarrier.wait(q_full.index(place), turn)
        stage, phase = ring_turn(n, k_ring.shape[0])
        mbarrier.wait(k_full.index(stage), phase)
        fence_async_shared()
        k = k_ring.index(stage).permute((1, 0))
        s = warpgroup_mma(q_ring.index(place), k, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage))
        s = scores_of(s, unit, hk, r, (unit[2] + t) * BLOCK_N + keys, formula, scale, 1, fixed)
        largest = gl.maximum(m_i, gl.max(s, 1))
        alpha = gl.exp2(m_i - largest)
        w = gl.exp2(s - largest[:, None])
        l_i = l_i * alpha + gl.sum(w, 1)
        acc = acc * gl.convert_layout(alpha, O_ROW, assert_trivial=True)[:, None]
        p = gl.convert_layout(w.to(v_ring.dtype), RIGHT, assert_trivial=True)
        m_i = largest
        mbarrier.wait(v_full.index(stage), phase)
        fence_async_shared()
        acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage))

        # the end of a row of tiles, or of what this piece has of it
        after = next_tile(u, hk, t, unit, coming, HEADS_KV)
        if (after[2] == 0) | (n + 1 == count):
            rows = unit[5] * fixed.group
            to = row_of_part(unit[0], hk, rows, rows_q * fixed.group, piece, HEADS_KV, fixed.block_r)
            total = gl.convert_layout(l_i, O_ROW, assert_trivial=True)
            top = gl.convert_layout(m_i, O_ROW, assert_trivial=True)
            leave_part(parts, to, rows, r_of_o, dv, acc, total, top, 1, fixed)
            m_i, l_i, acc = new
            mbarrier.arrive(q_empty.index(place))
            row += 1
        moved = after[0] != u
        u, hk, t, unit = after
        if moved:
            coming = unit_of(UNITS, u + 1)


@gluon.jit(do_not_specialize=["stride_t", "rows_q", "slots", "mask_nums", "score_nums"])
def attention_prefixes_sm90(
    Q, K, V, SINK, O, LSE, O_PART, LSE_PART, UNITS, BEFORE, ARRIVED, TABLE, FIRST, SCALES, OTHERS,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_t, mask_args, mask_nums, score_args, score_nums, rows_q, slots,
    scale, fixed,
):  # fmt: skip
    """As `attention_decode_sm90`, whose parameters these are, over the line of prefixes: of all rows parts are left.

    Requests may start as soon as there is a plan, and wait for this launch's end where they merge.
    """
    stored: gl.constexpr = K.dtype.element_ty
    K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, fixed.block_d], stored)
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_n, fixed.block_dv], stored)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([fixed.block_r, fixed.block_d], stored)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    k_ring = gl.allocate_shared_memory(stored, [fixed.stages, fixed.block_n, fixed.block_d], K_TILE)
    v_ring = gl.allocate_shared_memory(stored, [fixed.stages, fixed.block_n, fixed.block_dv], V_TILE)
    q_ring = gl.allocate_shared_memory(stored, [PLACES, fixed.block_r, fixed.block_d], Q_TILE)
    board = message_board(PIECE, 1)
    q_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [fixed.stages, 1], BAR)
    for n in gl.static_range(PLACES):
        mbarrier.init(q_full.index(n), count=128)
        mbarrier.init(q_empty.index(n), count=1)
    for stage in gl.static_range(fixed.stages):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    fence_async_shared()
    tl.extra.cuda.gdc_wait()  # for the plan
    tl.extra.cuda.gdc_launch_dependents()
    tiles = gl.load(BEFORE + slots) * (fixed.heads // fixed.group)
    programs = gl.load(BEFORE + slots + 1)
    if gl.program_id(0) >= programs:
        return
    memory = (q_ring, k_ring, v_ring, (), board, (), ())
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    work = (UNITS, BEFORE, ARRIVED, slots, tiles, 1, programs)  # a piece for each program
    strides_q = (stride_qb, stride_qs, stride_qh, rows_q)
    strides = (strides_q, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh)
    inputs = (Q, K, V, TABLE, FIRST, SCALES, stride_t)
    formula = (mask_args, mask_nums, score_args, score_nums)
    parts = (O_PART, LSE_PART)
    scalars = (scale, rows_q)
    gl.warp_specialize(
        [
            (compute, (parts, work, memory, bars, formula, scalars, fixed)),
            (fetch, (inputs, strides, work, memory, bars, fixed)),
        ],
        [4],
        [fixed.registers],
    )
