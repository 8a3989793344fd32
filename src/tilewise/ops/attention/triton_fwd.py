"""FlashAttention-2's forward as one portable Triton kernel: a program owns a tile of queries and walks the visible tiles of keys."""

import triton
import triton.language as tl

from tilewise.tiles.arithmetic import LN2, LOG2E
from tilewise.tiles.dropout import keep_tile
from tilewise.tiles.visit import locate, partial_tile, row_ends, span_tiles


@triton.jit
def fold_tile(
    acc, l_i, m_i, q, n, K_base, V_base, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale, dropout, seed, row,
    mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, VISIBLE: tl.constexpr, SCORE: tl.constexpr, SCALE_FIRST: tl.constexpr, GUARD: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold key tile n into the online softmax state; m_i is in units of s, and p = exp2((s - m) * c)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    start_n = n * BLOCK_N
    k_ptrs = K_base + start_n.to(tl.int64) * stride_ks + offs_n[None, :] * stride_ks + offs_d[:, None]  # [D, BLOCK_N]
    v_ptrs = V_base + start_n.to(tl.int64) * stride_vs + offs_n[:, None] * stride_vs + offs_dv[None, :]  # [BLOCK_N, DV]
    in_k = start_n + offs_n < seqlen_k
    if MASKED:
        if BLOCK_D == HEAD_DIM:
            kt = tl.load(k_ptrs, mask=in_k[None, :], other=0.0)
        else:
            kt = tl.load(k_ptrs, mask=in_k[None, :] & (offs_d[:, None] < HEAD_DIM), other=0.0)
    else:
        if BLOCK_D == HEAD_DIM:
            kt = tl.load(k_ptrs)
        else:
            kt = tl.load(k_ptrs, mask=offs_d[:, None] < HEAD_DIM, other=0.0)
    s = tl.dot(q, kt, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if SCALE_FIRST:
        s = s * scale
    offs_j = start_n + offs_n
    valid_j = offs_j
    if MASKED:
        valid_j = tl.minimum(offs_j, seqlen_k - 1)  # formulas see valid positions only
    if SCORE is not None:
        s = SCORE(s, b, h, offs_i[:, None], valid_j[None, :], score_once, score_args, score_nums)
    if MASKED:
        if VISIBLE is not None:
            seen = VISIBLE(b, h, offs_i[:, None], valid_j[None, :], mask_once, mask_args, mask_nums) & in_k[None, :]
        else:
            seen = (offs_j[None, :] >= first_j[:, None]) & (offs_j[None, :] <= last_j[:, None])
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    m_use = m_new
    if GUARD:
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    p = tl.math.exp2(s * c - (m_use * c)[:, None])
    alpha = tl.math.exp2((m_i - m_use) * c)
    l_i = l_i * alpha + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(keep_tile(seed, row, offs_i, start_n, dropout, BLOCK_N, False), p, 0.0)
    acc = acc * alpha[:, None]
    if MASKED:
        if BLOCK_DV == HEAD_DIM_V:
            v = tl.load(v_ptrs, mask=in_k[:, None], other=0.0)
        else:
            v = tl.load(v_ptrs, mask=in_k[:, None] & (offs_dv[None, :] < HEAD_DIM_V), other=0.0)
    else:
        if BLOCK_DV == HEAD_DIM_V:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=offs_dv[None, :] < HEAD_DIM_V, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_new


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "list_strides", "mask_nums", "score_nums", "scale", "dropout", "keep_scale"])
def attention_fwd(
    Q, K, V, SINK, O, LSE, CU_Q, CU_K, SEED,
    PARTIAL_COUNT, PARTIAL, FULL_COUNT, FULL, list_strides,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, scale, dropout, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SCALE_FIRST: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # who am I: slots run fastest, so neighbours share keys; the last queries, which see most, go first
    pid = tl.program_id(0)
    slot = slots - 1 - pid % slots
    h = (pid // slots) % HEADS
    b = pid // slots // HEADS
    row0_q = 0
    row0_k = 0
    m = slot
    if PACKED:
        b, m = locate(slot, CU_Q, batch, BLOCK_M)
        row0_q = tl.load(CU_Q + b)
        row0_k = tl.load(CU_K + b)
        seqlen_q = tl.load(CU_Q + b + 1) - row0_q
        seqlen_k = tl.load(CU_K + b + 1) - row0_k
    start_m = m * BLOCK_M
    if start_m >= seqlen_q:
        return
    shift = seqlen_k - seqlen_q
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_i = tl.minimum(offs_m, seqlen_q - 1) + shift
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_q = offs_m < seqlen_q

    # pointers: 64 bits for whatever grows with the tensors, 32 inside a tile
    if PACKED:
        b_q = row0_q.to(tl.int64) * stride_qs
        b_k = row0_k.to(tl.int64) * stride_ks
        b_v = row0_k.to(tl.int64) * stride_vs
        b_o = row0_q.to(tl.int64) * stride_os
        lse_base = h.to(tl.int64) * rows_q + row0_q
    else:
        b_q = b.to(tl.int64) * stride_qb
        b_k = b.to(tl.int64) * stride_kb
        b_v = b.to(tl.int64) * stride_vb
        b_o = b.to(tl.int64) * stride_ob
        lse_base = (b.to(tl.int64) * HEADS + h) * rows_q
    hk = h // GROUP
    Q_base = Q + b_q + h.to(tl.int64) * stride_qh + start_m.to(tl.int64) * stride_qs
    K_base = K + b_k + hk.to(tl.int64) * stride_kh
    V_base = V + b_v + hk.to(tl.int64) * stride_vh
    O_base = O + b_o + h.to(tl.int64) * stride_oh + start_m.to(tl.int64) * stride_os

    # prologue
    offs_r = tl.arange(0, BLOCK_M)
    q_ptrs = Q_base + offs_r[:, None] * stride_qs + offs_d[None, :]
    q = tl.load(q_ptrs, mask=in_q[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)  # [BLOCK_M, D]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E  # exp(x) = exp2(x * log2 e), in units of s
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    row = b * HEADS + h
    first_j, last_j = row_ends(b, h, offs_i, 0, seqlen_k, mask_args, mask_nums, ROWS)
    mask_once = ()
    if MASK_ONCE is not None:
        mask_once = MASK_ONCE(b, h, offs_i[:, None], mask_args, mask_nums)
    score_once = ()
    if SCORE_ONCE is not None:
        score_once = SCORE_ONCE(b, h, offs_i[:, None], score_args, score_nums)

    # main loop: tiles without a hidden pair, then those that need the mask or the sequence's end
    list_row = 0
    if LISTS:
        list_row = b.to(tl.int64) * list_strides[0] + h.to(tl.int64) * list_strides[1] + slot
        if PACKED:
            list_row = h.to(tl.int64) * list_strides[1] + slot
        full_begin = 0
        full_end = tl.load(FULL_COUNT + list_row)
        num_partial = tl.load(PARTIAL_COUNT + list_row)
        begin = 0
    else:
        if TILES is not None:
            i0 = start_m + shift
            i1 = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + shift
            first_any, last_any, first_all, last_all = TILES(b, h, i0, i1, mask_args, mask_nums)
            begin, end, full_begin, full_end = span_tiles(first_any, last_any, first_all, last_all, seqlen_k, BLOCK_N)
        else:
            begin, end, full_begin, full_end = span_tiles(0, seqlen_k - 1, 0, seqlen_k - 1, seqlen_k, BLOCK_N)
        num_partial = end - begin - (full_end - full_begin)
    for t in range(full_begin, full_end):
        n = t
        if LISTS:
            n = tl.load(FULL + list_row * list_strides[2] + t)
        acc, l_i, m_i = fold_tile(
            acc, l_i, m_i, q, n, K_base, V_base, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale,
            dropout, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, False, VISIBLE, SCORE, SCALE_FIRST,
            SCORE is not None, DROPOUT, PRECISION,
        )  # fmt: skip
    for t in range(0, num_partial):
        if LISTS:
            n = tl.load(PARTIAL + list_row * list_strides[2] + t)
        else:
            n = partial_tile(t, begin, full_begin, full_end)
        acc, l_i, m_i = fold_tile(
            acc, l_i, m_i, q, n, K_base, V_base, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale,
            dropout, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, True, VISIBLE, SCORE, SCALE_FIRST,
            True, DROPOUT, PRECISION,
        )  # fmt: skip

    # epilogue
    m2 = m_i * c  # base 2 from here on
    if SINK is not None:
        sink2 = tl.load(SINK + h).to(tl.float32) * LOG2E
        m_all = tl.maximum(m2, sink2)
        m_all = tl.where(m_all == float("-inf"), 0.0, m_all)
        alpha = tl.math.exp2(m2 - m_all)
        l_i = l_i * alpha + tl.math.exp2(sink2 - m_all)
        acc = acc * alpha[:, None]
        m2 = m_all
    empty = l_i == 0.0
    l_safe = tl.where(empty, 1.0, l_i)
    acc = acc * (keep_scale / l_safe)[:, None]
    lse = tl.where(empty, float("-inf"), (m2 + tl.math.log2(l_safe)) * LN2)
    tl.store(LSE + lse_base + offs_m, lse, mask=in_q)
    o_ptrs = O_base + offs_r[:, None] * stride_os + offs_dv[None, :]
    tl.store(o_ptrs, acc.to(O.dtype.element_ty), mask=in_q[:, None] & (offs_dv[None, :] < HEAD_DIM_V))
