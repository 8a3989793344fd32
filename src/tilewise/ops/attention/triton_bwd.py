"""FlashAttention-2's backward as two portable Triton kernels: dQ by tile of queries, then dK and dV by tile of keys.

Scores are recomputed from lse in both. The first also finds delta = rowsum(dO * O), which the second reads. Each
gradient row is written once by one program, so nothing depends on the order in which programs run; the GQA group is
looped inside the program that owns the keys.
"""

import triton
import triton.language as tl

from tilewise.tiles.arithmetic import LOG2E, lse_of_weights
from tilewise.tiles.dropout import keep_tile
from tilewise.tiles.load import HOST, POINTER, load_rows, load_values, row_values, rows_of, store_rows
from tilewise.tiles.visit import call_once, locate, proved, row_ends, take_turns, visit, visit_ahead, visits


@triton.jit
def query_tile(
    dq, q, do, lse2, delta, n, K_rows, V_rows, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j,
    c, scale, dropout, keep_scale, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
    grads, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, VISIBLE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr,
    ACCUMULATE: tl.constexpr, SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Add key tile n to dq; captured tensors take their gradients here."""
    start_n = n * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    in_k = offs_n < seqlen_k
    k = load_rows(K_rows, start_n, stride_ks, in_k, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED, TMA)  # [BLOCK_N, D]
    v = load_rows(V_rows, start_n, stride_vs, in_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, MASKED, TMA)  # [BLOCK_N, DV]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if SCALE_FIRST:
        s = s * scale
    raw = s
    offs_j = offs_n
    if MASKED:
        offs_j = tl.minimum(offs_n, seqlen_k - 1)  # formulas see valid positions only
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
        keep = keep_tile(seed, row, offs_i, start_n, dropout, BLOCK_N, False)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if ACCUMULATE is not None:
        ACCUMULATE(ds, raw, b, h, offs_i[:, None], offs_j[None, :], score_once, ds, grads, score_args, score_nums)
    if SLOPE is not None:
        ds = SLOPE(ds, raw, b, h, offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
        if MASKED:
            ds = tl.where(p == 0.0, 0.0, ds)  # a hidden score may have no finite derivative
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale", "dropout", "keep_scale",
    ]
)  # fmt: skip
def attention_bwd_queries(
    Q, K, V, O, DO, LSE, DLSE, LSE2, DELTA, DQ, CU_Q, CU_K, SEED, LISTED, list_stride_b, list_stride_h, list_stride_r,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_db, stride_ds, stride_dh, stride_ob, stride_os, stride_oh, stride_dqb, stride_dqs, stride_dqh,
    mask_args, mask_nums, score_args, score_nums, grads,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, scale, dropout, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dQ, and for the keys' kernel delta - dlse and lse in base 2, with empty rows at 0."""
    # who am I: the last queries, which see most under a causal mask, go first
    pair, turn = take_turns(tl.program_id(0), slots, HEADS if PACKED else batch * HEADS, together)
    slot = slots - 1 - turn
    h = pair % HEADS
    b = pair // HEADS
    row0_q = b * 0
    row0_k = b * 0
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
    offs_i = proved(tl.minimum(offs_m, seqlen_q - 1) + shift, seqlen_k)
    in_q = offs_m < seqlen_q
    row = b * HEADS + h

    # rows
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    hk = h // GROUP
    OUT: tl.constexpr = HOST if TMA == HOST else POINTER  # what is written once is worth no descriptor made here
    Q_rows = rows_of(Q, b, row0_q, h, seqlen_q, stride_qb, stride_qs, stride_qh, HEAD_DIM, BLOCK_M, BLOCK_D, POINTER)
    K_rows = rows_of(K, b, row0_k, hk, seqlen_k, stride_kb, stride_ks, stride_kh, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
    V_rows = rows_of(V, b, row0_k, hk, seqlen_k, stride_vb, stride_vs, stride_vh, HEAD_DIM_V, BLOCK_N, BLOCK_DV, TMA)
    O_rows = rows_of(O, b, row0_q, h, seqlen_q, stride_ob, stride_os, stride_oh, HEAD_DIM_V, BLOCK_M, BLOCK_DV, POINTER)
    DO_rows = rows_of(
        DO, b, row0_q, h, seqlen_q, stride_db, stride_ds, stride_dh, HEAD_DIM_V, BLOCK_M, BLOCK_DV, POINTER
    )
    DQ_rows = rows_of(DQ, b, row0_q, h, seqlen_q, stride_dqb, stride_dqs, stride_dqh, HEAD_DIM, BLOCK_M, BLOCK_D, OUT)

    # prologue: all loads are on their way before the first is waited for
    q = load_rows(Q_rows, start_m, stride_qs, in_q, HEAD_DIM, BLOCK_M, BLOCK_D, True, POINTER)  # [BLOCK_M, D]
    do = load_rows(DO_rows, start_m, stride_ds, in_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, POINTER)  # [BLOCK_M, DV]
    o = load_rows(O_rows, start_m, stride_os, in_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, POINTER)  # [BLOCK_M, DV]
    at = (h64 * rows_q + row0_q if PACKED else row.to(tl.int64) * rows_q) + offs_m
    lse = tl.load(LSE + at, mask=in_q, other=float("inf"))
    dlse = 0.0
    if DLSE is not None:
        dlse = tl.load(DLSE + at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) - dlse
    lse2 = lse_of_weights(lse, LOG2E)
    at = row_values(b, h, row0_q, rows_q, batch, HEADS, PACKED) + offs_m
    tl.store(DELTA + at, delta, mask=in_q)
    tl.store(LSE2 + at, lse2, mask=in_q)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E
    seed = tl.load(SEED) if DROPOUT else 0
    first_j, last_j = row_ends(b, h, offs_i, 0, seqlen_k, mask_args, mask_nums, ROWS)
    mask_once = call_once(b, h, offs_i[:, None], mask_args, mask_nums, MASK_ONCE)
    score_once = call_once(b, h, offs_i[:, None], score_args, score_nums, SCORE_ONCE)

    # main loop
    i1 = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + shift
    listed = LISTED
    if LISTS:
        listed = LISTED + (b64 * list_stride_b + h64 * list_stride_h + slot) * list_stride_r
    begin, full_begin, num_full, num_partial = visits(
        b, h, start_m + shift, i1, 0, seqlen_k, mask_args, mask_nums, listed, LISTS, TILES, BLOCK_N
    )
    for MASKED in tl.static_range(2):
        count = num_partial if MASKED else num_full
        ahead = visit(0, begin, full_begin, num_full, listed, list_stride_r, LISTS, MASKED)
        for t in range(count):
            n, ahead = visit_ahead(t, ahead, count, begin, full_begin, num_full, listed, list_stride_r, LISTS, MASKED)
            dq = query_tile(
                dq, q, do, lse2, delta, n, K_rows, V_rows, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j,
                last_j, c, scale, dropout, keep_scale, seed, row, mask_once, mask_args, mask_nums, score_once,
                score_args, score_nums, grads, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, MASKED, VISIBLE,
                SCORE, SLOPE, ACCUMULATE, SCALE_FIRST, DROPOUT, PRECISION, TMA,
            )  # fmt: skip

    # epilogue
    store_rows(DQ_rows, start_m, stride_dqs, dq * scale, in_q, HEAD_DIM, BLOCK_M, BLOCK_D, OUT)


@triton.jit
def keys_tile(
    dk, dv, k, v, m, Q_rows, DO_rows, LSE2, DELTA, row_base, stride_qs, stride_ds, seqlen_q, seqlen_k, shift,
    b, h, offs_j, first_i, last_i, start_n, c, scale, dropout, keep_scale, seed, row, mask_once, mask_args, mask_nums,
    score_once, score_args, score_nums,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, VISIBLE: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add query tile m to dk and dv of this program's keys. Scores are held transposed, so p and ds feed the
    products as they are.
    """
    start_m = m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    in_q = offs_m < seqlen_q
    q = load_rows(Q_rows, start_m, stride_qs, in_q, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED, TMA)  # [BLOCK_M, D]
    at = row_base + start_m
    lse2 = load_values(LSE2, at, in_q, float("inf"), MASKED, BLOCK_M, TMA)  # rows beyond the end get p = 0
    delta = load_values(DELTA, at, in_q, 0.0, MASKED, BLOCK_M, TMA)
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
    if MASKED:  # keys beyond the last are never stored
        if VISIBLE is not None:
            seen = VISIBLE(b, h, offs_i[None, :], offs_j[:, None], mask_once, mask_args, mask_nums)
        else:
            seen = (offs_i[None, :] >= first_i[:, None]) & (offs_i[None, :] <= last_i[:, None])
        pt = tl.where(seen, pt, 0.0)
    do = load_rows(DO_rows, start_m, stride_ds, in_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, MASKED, TMA)  # [BLOCK_M, DV]
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


@triton.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale", "dropout", "keep_scale",
    ]
)  # fmt: skip
def attention_bwd_keys(
    Q, K, V, DO, LSE2, DELTA, DK, DV, CU_Q, CU_K, SEED, LISTED, list_stride_b, list_stride_h, list_stride_r,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_db, stride_ds, stride_dh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, scale, dropout, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, SCALE_FIRST: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # who am I: the first keys, which most queries see under a causal mask, go first
    HEADS_KV: tl.constexpr = HEADS // GROUP
    pair, slot = take_turns(tl.program_id(0), slots, HEADS_KV if PACKED else batch * HEADS_KV, together)
    hk = pair % HEADS_KV
    b = pair // HEADS_KV
    row0_q = b * 0
    row0_k = b * 0
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
    offs_j = tl.minimum(offs_n, seqlen_k - 1)
    in_k = offs_n < seqlen_k
    j1 = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1

    # rows
    b64 = b.to(tl.int64)
    OUT: tl.constexpr = HOST if TMA == HOST else POINTER
    K_rows = rows_of(K, b, row0_k, hk, seqlen_k, stride_kb, stride_ks, stride_kh, HEAD_DIM, BLOCK_N, BLOCK_D, POINTER)
    V_rows = rows_of(
        V, b, row0_k, hk, seqlen_k, stride_vb, stride_vs, stride_vh, HEAD_DIM_V, BLOCK_N, BLOCK_DV, POINTER
    )
    DK_rows = rows_of(DK, b, row0_k, hk, seqlen_k, stride_dkb, stride_dks, stride_dkh, HEAD_DIM, BLOCK_N, BLOCK_D, OUT)
    DV_rows = rows_of(
        DV, b, row0_k, hk, seqlen_k, stride_dvb, stride_dvs, stride_dvh, HEAD_DIM_V, BLOCK_N, BLOCK_DV, OUT
    )

    # prologue
    k = load_rows(K_rows, start_n, stride_ks, in_k, HEAD_DIM, BLOCK_N, BLOCK_D, True, POINTER)  # [BLOCK_N, D]
    v = load_rows(V_rows, start_n, stride_vs, in_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, True, POINTER)  # [BLOCK_N, DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E
    seed = tl.load(SEED) if DROPOUT else 0

    # main loop: the query heads of the group, one after another
    for g in range(GROUP):
        h = hk * GROUP + g
        h64 = h.to(tl.int64)
        row = b * HEADS + h
        Q_rows = rows_of(Q, b, row0_q, h, seqlen_q, stride_qb, stride_qs, stride_qh, HEAD_DIM, BLOCK_M, BLOCK_D, TMA)
        DO_rows = rows_of(
            DO, b, row0_q, h, seqlen_q, stride_db, stride_ds, stride_dh, HEAD_DIM_V, BLOCK_M, BLOCK_DV, TMA
        )
        row_base = row_values(b, h, row0_q, rows_q, batch, HEADS, PACKED)
        own = proved(offs_j, seqlen_q)
        first_i, last_i = row_ends(b, h, own, shift, seqlen_k, mask_args, mask_nums, ROWS)
        mask_once = call_once(b, h, own[:, None], mask_args, mask_nums, MASK_ONCE)
        score_once = call_once(b, h, own[:, None], score_args, score_nums, SCORE_ONCE)
        listed = LISTED
        if LISTS:
            listed = LISTED + (b64 * list_stride_b + h64 * list_stride_h + slot) * list_stride_r
        begin, full_begin, num_full, num_partial = visits(
            b, h, start_n, j1, shift, seqlen_q, mask_args, mask_nums, listed, LISTS, TILES, BLOCK_M
        )
        for MASKED in tl.static_range(2):
            count = num_partial if MASKED else num_full
            ahead = visit(0, begin, full_begin, num_full, listed, list_stride_r, LISTS, MASKED)
            for t in range(count):
                m, ahead = visit_ahead(
                    t, ahead, count, begin, full_begin, num_full, listed, list_stride_r, LISTS, MASKED
                )
                dk, dv = keys_tile(
                    dk, dv, k, v, m, Q_rows, DO_rows, LSE2, DELTA, row_base, stride_qs, stride_ds,
                    seqlen_q, seqlen_k, shift, b, h, offs_j, first_i, last_i, start_n, c, scale, dropout, keep_scale,
                    seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, MASKED, VISIBLE, SCORE, SLOPE,
                    SCALE_FIRST, DROPOUT, PRECISION, TMA,
                )  # fmt: skip

    # epilogue
    store_rows(DK_rows, start_n, stride_dks, dk * scale, in_k, HEAD_DIM, BLOCK_N, BLOCK_D, OUT)
    store_rows(DV_rows, start_n, stride_dvs, dv, in_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, OUT)
