"""FlashAttention-2's backward as portable Triton kernels: delta, then dK and dV by tile of keys, and dQ by tile of queries.

Scores are recomputed from lse in both; each gradient row is written once by one program, so nothing depends on the order in which programs
run. The GQA group is looped inside the program that owns the keys.
"""

import triton
import triton.language as tl

from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.dropout import keep_tile
from tilewise.tiles.visit import locate, partial_tile, row_ends, span_tiles


@triton.jit(do_not_specialize=["rows_q", "rows"])
def attention_delta(
    O, DO, LSE, DLSE, DELTA, LSE2, stride_ob, stride_os, stride_oh, stride_db, stride_ds, stride_dh, rows_q, rows,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(do * o) - dlse, and lse in base 2 with empty rows at 0; a row is one (batch, query, head)."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_DV)
    in_r = offs_r < rows
    h = offs_r % HEADS
    s = offs_r // HEADS % rows_q
    b = offs_r // HEADS // rows_q
    keep = in_r[:, None] & (offs_d[None, :] < HEAD_DIM_V)
    o = tl.load(O + (b * stride_ob + s * stride_os + h * stride_oh)[:, None] + offs_d[None, :], mask=keep, other=0.0)
    do = tl.load(DO + (b * stride_db + s * stride_ds + h * stride_dh)[:, None] + offs_d[None, :], mask=keep, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = (b * HEADS + h) * rows_q + s
    if DLSE is not None:
        delta -= tl.load(DLSE + at, mask=in_r, other=0.0)
    lse = tl.load(LSE + at, mask=in_r, other=0.0)
    tl.store(DELTA + at, delta, mask=in_r)
    tl.store(LSE2 + at, tl.where(lse == float("-inf"), 0.0, lse * LOG2E), mask=in_r)


@triton.jit
def keys_tile(
    dk, dv, k, v, m, Q_base, DO_base, LSE_base, DELTA_base, stride_qs, stride_ds, seqlen_q, seqlen_k, shift, b, h, offs_j, first_i, last_i,
    start_n, c, scale, dropout, keep_scale, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, VISIBLE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add query tile m to dk and dv of this program's keys. Scores are held transposed, so p and ds feed the products as they are."""
    offs_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_q = offs_m < seqlen_q
    start_m = (m * BLOCK_M).to(tl.int64)
    q_ptrs = Q_base + start_m * stride_qs + offs_r[:, None] * stride_qs + offs_d[None, :]
    do_ptrs = DO_base + start_m * stride_ds + offs_r[:, None] * stride_ds + offs_dv[None, :]
    if MASKED:
        q = tl.load(q_ptrs, mask=in_q[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)  # [BLOCK_M, D]
        lse2 = tl.load(LSE_base + offs_m, mask=in_q, other=float("inf"))  # rows beyond the end get p = 0
    else:
        if BLOCK_D == HEAD_DIM:
            q = tl.load(q_ptrs)
        else:
            q = tl.load(q_ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
        lse2 = tl.load(LSE_base + offs_m)
    st = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    if SCALE_FIRST:
        st = st * scale
    raw = st
    offs_i = offs_m + shift
    if MASKED:
        offs_i = tl.minimum(offs_m, seqlen_q - 1) + shift
    if SCORE is not None:
        st = SCORE(st, b, h, offs_i[None, :], offs_j[:, None], score_once, score_args, score_nums)
    pt = tl.math.exp2(st * c - lse2[None, :])
    if MASKED:
        # rows beyond the last query have lse = inf and p = 0; keys beyond the last are never stored
        if VISIBLE is not None:
            seen = VISIBLE(b, h, offs_i[None, :], offs_j[:, None], mask_once, mask_args, mask_nums)
        else:
            seen = (offs_i[None, :] >= first_i[:, None]) & (offs_i[None, :] <= last_i[:, None])
        pt = tl.where(seen, pt, 0.0)
        do = tl.load(do_ptrs, mask=in_q[:, None] & (offs_dv[None, :] < HEAD_DIM_V), other=0.0)  # [BLOCK_M, DV]
        delta = tl.load(DELTA_base + offs_m, mask=in_q, other=0.0)
    else:
        if BLOCK_DV == HEAD_DIM_V:
            do = tl.load(do_ptrs)
        else:
            do = tl.load(do_ptrs, mask=offs_dv[None, :] < HEAD_DIM_V, other=0.0)
        delta = tl.load(DELTA_base + offs_m)
    if DROPOUT:
        keep = keep_tile(seed, row, offs_m + shift, start_n, dropout, BLOCK_N, True)
        dropped = tl.where(keep, pt * keep_scale, 0.0)
    else:
        dropped = pt
    dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
    dpt = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if DROPOUT:
        dpt = tl.where(keep, dpt * keep_scale, 0.0)
    dst = pt * (dpt - delta[None, :])
    if SLOPE is not None:
        dst = SLOPE(dst, raw, b, h, offs_i[None, :], offs_j[:, None], score_once, score_args, score_nums)
        if MASKED:
            dst = tl.where(pt == 0.0, 0.0, dst)  # a hidden score may have no finite derivative
    dk = tl.dot(dst.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "list_strides", "mask_nums", "score_nums", "scale", "dropout", "keep_scale"])
def attention_bwd_keys(
    Q, K, V, DO, LSE2, DELTA, DK, DV, CU_Q, CU_K, SEED,
    PARTIAL_COUNT, PARTIAL, FULL_COUNT, FULL, list_strides,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_db, stride_ds, stride_dh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, scale, dropout, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # who am I: the first keys, which most queries see under a causal mask, go first
    pid = tl.program_id(0)
    slot = pid % slots
    HEADS_KV: tl.constexpr = HEADS // GROUP
    hk = (pid // slots) % HEADS_KV
    b = pid // slots // HEADS_KV
    row0_q = 0
    row0_k = 0
    n = slot
    if PACKED:
        b, n = locate(slot, CU_K, batch, BLOCK_N)
        row0_q = tl.load(CU_Q + b)
        row0_k = tl.load(CU_K + b)
        seqlen_q = tl.load(CU_Q + b + 1) - row0_q
        seqlen_k = tl.load(CU_K + b + 1) - row0_k
    start_n = n * BLOCK_N
    if start_n >= seqlen_k:
        return
    shift = seqlen_k - seqlen_q
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_N)
    offs_j = tl.minimum(offs_n, seqlen_k - 1)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_k = offs_n < seqlen_k

    # pointers
    if PACKED:
        b_q = row0_q.to(tl.int64) * stride_qs
        b_d = row0_q.to(tl.int64) * stride_ds
        b_k = row0_k.to(tl.int64) * stride_ks
        b_v = row0_k.to(tl.int64) * stride_vs
        b_dk = row0_k.to(tl.int64) * stride_dks
        b_dv = row0_k.to(tl.int64) * stride_dvs
    else:
        b_q = b.to(tl.int64) * stride_qb
        b_d = b.to(tl.int64) * stride_db
        b_k = b.to(tl.int64) * stride_kb
        b_v = b.to(tl.int64) * stride_vb
        b_dk = b.to(tl.int64) * stride_dkb
        b_dv = b.to(tl.int64) * stride_dvb
    start = start_n.to(tl.int64)
    keep_d = in_k[:, None] & (offs_d[None, :] < HEAD_DIM)
    keep_dv = in_k[:, None] & (offs_dv[None, :] < HEAD_DIM_V)

    # prologue
    k_ptrs = K + b_k + hk.to(tl.int64) * stride_kh + start * stride_ks + offs_r[:, None] * stride_ks + offs_d[None, :]
    v_ptrs = V + b_v + hk.to(tl.int64) * stride_vh + start * stride_vs + offs_r[:, None] * stride_vs + offs_dv[None, :]
    k = tl.load(k_ptrs, mask=keep_d, other=0.0)  # [BLOCK_N, D]
    v = tl.load(v_ptrs, mask=keep_dv, other=0.0)  # [BLOCK_N, DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    # main loop: the query heads of the group, one after another
    for g in range(0, GROUP):
        h = hk * GROUP + g
        row = b * HEADS + h
        Q_base = Q + b_q + h.to(tl.int64) * stride_qh
        DO_base = DO + b_d + h.to(tl.int64) * stride_dh
        if PACKED:
            rows_base = h.to(tl.int64) * rows_q + row0_q
        else:
            rows_base = row.to(tl.int64) * rows_q
        first_i, last_i = row_ends(b, h, offs_j, shift, seqlen_k, mask_args, mask_nums, ROWS)
        mask_once = ()
        if MASK_ONCE is not None:
            mask_once = MASK_ONCE(b, h, offs_j[:, None], mask_args, mask_nums)
        score_once = ()
        if SCORE_ONCE is not None:
            score_once = SCORE_ONCE(b, h, offs_j[:, None], score_args, score_nums)
        list_row = 0
        if LISTS:
            list_row = b.to(tl.int64) * list_strides[0] + h.to(tl.int64) * list_strides[1] + slot
            if PACKED:
                list_row = h.to(tl.int64) * list_strides[1] + slot
            begin = 0
            full_begin = 0
            full_end = tl.load(FULL_COUNT + list_row)
            num_partial = tl.load(PARTIAL_COUNT + list_row)
        else:
            if TILES is not None:
                j1 = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1
                first_any, last_any, first_all, last_all = TILES(b, h, start_n, j1, mask_args, mask_nums)
                begin, end, full_begin, full_end = span_tiles(
                    first_any - shift, last_any - shift, first_all - shift, last_all - shift, seqlen_q, BLOCK_M
                )
            else:
                begin, end, full_begin, full_end = span_tiles(0, seqlen_q - 1, 0, seqlen_q - 1, seqlen_q, BLOCK_M)
            num_partial = end - begin - (full_end - full_begin)
        for t in range(full_begin, full_end):
            m = t
            if LISTS:
                m = tl.load(FULL + list_row * list_strides[2] + t)
            dk, dv = keys_tile(
                dk, dv, k, v, m, Q_base, DO_base, LSE2 + rows_base, DELTA + rows_base, stride_qs, stride_ds, seqlen_q, seqlen_k,
                shift, b, h, offs_j, first_i, last_i, start_n, c, scale, dropout, keep_scale, seed, row,
                mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
                HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, VISIBLE, SCORE, SLOPE, SCALE_FIRST, DROPOUT,
                PRECISION,
            )  # fmt: skip
        for t in range(0, num_partial):
            if LISTS:
                m = tl.load(PARTIAL + list_row * list_strides[2] + t)
            else:
                m = partial_tile(t, begin, full_begin, full_end)
            dk, dv = keys_tile(
                dk, dv, k, v, m, Q_base, DO_base, LSE2 + rows_base, DELTA + rows_base, stride_qs, stride_ds, seqlen_q, seqlen_k,
                shift, b, h, offs_j, first_i, last_i, start_n, c, scale, dropout, keep_scale, seed, row,
                mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
                HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True, VISIBLE, SCORE, SLOPE, SCALE_FIRST, DROPOUT,
                PRECISION,
            )  # fmt: skip

    # epilogue
    dk_ptrs = DK + b_dk + hk.to(tl.int64) * stride_dkh + start * stride_dks + offs_r[:, None] * stride_dks + offs_d[None, :]
    dv_ptrs = DV + b_dv + hk.to(tl.int64) * stride_dvh + start * stride_dvs + offs_r[:, None] * stride_dvs + offs_dv[None, :]
    tl.store(dk_ptrs, (dk * scale).to(DK.dtype.element_ty), mask=keep_d)
    tl.store(dv_ptrs, dv.to(DV.dtype.element_ty), mask=keep_dv)


@triton.jit
def query_tile(
    dq, q, do, lse2, delta, n, K_base, V_base, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale, dropout,
    keep_scale, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums, grads,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, VISIBLE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add key tile n to dq; captured tensors take their gradients here."""
    offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_k = offs_n < seqlen_k
    start_n = (n * BLOCK_N).to(tl.int64)
    k_ptrs = K_base + start_n * stride_ks + offs_r[:, None] * stride_ks + offs_d[None, :]
    v_ptrs = V_base + start_n * stride_vs + offs_r[:, None] * stride_vs + offs_dv[None, :]
    if MASKED:
        k = tl.load(k_ptrs, mask=in_k[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)  # [BLOCK_N, D]
        v = tl.load(v_ptrs, mask=in_k[:, None] & (offs_dv[None, :] < HEAD_DIM_V), other=0.0)  # [BLOCK_N, DV]
    else:
        if BLOCK_D == HEAD_DIM:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
        if BLOCK_DV == HEAD_DIM_V:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=offs_dv[None, :] < HEAD_DIM_V, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if SCALE_FIRST:
        s = s * scale
    raw = s
    offs_j = offs_n
    if MASKED:
        offs_j = tl.minimum(offs_n, seqlen_k - 1)
    if SCORE is not None:
        s = SCORE(s, b, h, offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
    p = tl.math.exp2(s * c - lse2[:, None])
    if MASKED:
        if VISIBLE is not None:
            seen = VISIBLE(b, h, offs_i[:, None], offs_j[None, :], mask_once, mask_args, mask_nums) & in_k[None, :]
        else:
            seen = (offs_n[None, :] >= first_j[:, None]) & (offs_n[None, :] <= last_j[:, None])
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        keep = keep_tile(seed, row, offs_i, n * BLOCK_N, dropout, BLOCK_N, False)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if ACCUMULATE is not None:
        ACCUMULATE(ds, raw, b, h, offs_i[:, None], offs_j[None, :], score_once, ds, grads, score_args, score_nums)
    if SLOPE is not None:
        ds = SLOPE(ds, raw, b, h, offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
        if MASKED:
            ds = tl.where(p == 0.0, 0.0, ds)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "list_strides", "mask_nums", "score_nums", "scale", "dropout", "keep_scale"])
def attention_bwd_queries(
    Q, K, V, DO, LSE2, DELTA, DQ, CU_Q, CU_K, SEED,
    PARTIAL_COUNT, PARTIAL, FULL_COUNT, FULL, list_strides,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_db, stride_ds, stride_dh,
    stride_dqb, stride_dqs, stride_dqh,
    mask_args, mask_nums, score_args, score_nums, grads,
    batch, seqlen_q, seqlen_k, rows_q, slots, scale, dropout, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr,
    ACCUMULATE: tl.constexpr, SCALE_FIRST: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # who am I
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
    offs_r = tl.arange(0, BLOCK_M)
    offs_i = tl.minimum(offs_m, seqlen_q - 1) + shift
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_q = offs_m < seqlen_q
    hk = h // GROUP
    row = b * HEADS + h

    # pointers
    if PACKED:
        b_q = row0_q.to(tl.int64) * stride_qs
        b_d = row0_q.to(tl.int64) * stride_ds
        b_dq = row0_q.to(tl.int64) * stride_dqs
        b_k = row0_k.to(tl.int64) * stride_ks
        b_v = row0_k.to(tl.int64) * stride_vs
        rows_base = h.to(tl.int64) * rows_q + row0_q
    else:
        b_q = b.to(tl.int64) * stride_qb
        b_d = b.to(tl.int64) * stride_db
        b_dq = b.to(tl.int64) * stride_dqb
        b_k = b.to(tl.int64) * stride_kb
        b_v = b.to(tl.int64) * stride_vb
        rows_base = row.to(tl.int64) * rows_q
    start = start_m.to(tl.int64)
    K_base = K + b_k + hk.to(tl.int64) * stride_kh
    V_base = V + b_v + hk.to(tl.int64) * stride_vh
    keep_d = in_q[:, None] & (offs_d[None, :] < HEAD_DIM)

    # prologue
    q_ptrs = Q + b_q + h.to(tl.int64) * stride_qh + start * stride_qs + offs_r[:, None] * stride_qs + offs_d[None, :]
    do_ptrs = DO + b_d + h.to(tl.int64) * stride_dh + start * stride_ds + offs_r[:, None] * stride_ds + offs_dv[None, :]
    q = tl.load(q_ptrs, mask=keep_d, other=0.0)  # [BLOCK_M, D]
    do = tl.load(do_ptrs, mask=in_q[:, None] & (offs_dv[None, :] < HEAD_DIM_V), other=0.0)  # [BLOCK_M, DV]
    lse2 = tl.load(LSE2 + rows_base + offs_m, mask=in_q, other=float("inf"))
    delta = tl.load(DELTA + rows_base + offs_m, mask=in_q, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    first_j, last_j = row_ends(b, h, offs_i, 0, seqlen_k, mask_args, mask_nums, ROWS)
    mask_once = ()
    if MASK_ONCE is not None:
        mask_once = MASK_ONCE(b, h, offs_i[:, None], mask_args, mask_nums)
    score_once = ()
    if SCORE_ONCE is not None:
        score_once = SCORE_ONCE(b, h, offs_i[:, None], score_args, score_nums)

    # main loop
    list_row = 0
    if LISTS:
        list_row = b.to(tl.int64) * list_strides[0] + h.to(tl.int64) * list_strides[1] + slot
        if PACKED:
            list_row = h.to(tl.int64) * list_strides[1] + slot
        begin = 0
        full_begin = 0
        full_end = tl.load(FULL_COUNT + list_row)
        num_partial = tl.load(PARTIAL_COUNT + list_row)
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
        dq = query_tile(
            dq, q, do, lse2, delta, n, K_base, V_base, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale,
            dropout, keep_scale, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums, grads,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, False, VISIBLE, SCORE, SLOPE, ACCUMULATE, SCALE_FIRST, DROPOUT,
            PRECISION,
        )  # fmt: skip
    for t in range(0, num_partial):
        if LISTS:
            n = tl.load(PARTIAL + list_row * list_strides[2] + t)
        else:
            n = partial_tile(t, begin, full_begin, full_end)
        dq = query_tile(
            dq, q, do, lse2, delta, n, K_base, V_base, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale,
            dropout, keep_scale, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums, grads,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, True, VISIBLE, SCORE, SLOPE, ACCUMULATE, SCALE_FIRST, DROPOUT,
            PRECISION,
        )  # fmt: skip

    # epilogue
    dq_ptrs = DQ + b_dq + h.to(tl.int64) * stride_dqh + start * stride_dqs + offs_r[:, None] * stride_dqs + offs_d[None, :]
    tl.store(dq_ptrs, (dq * scale).to(DQ.dtype.element_ty), mask=keep_d)
