"""FlashAttention-2's forward as one portable Triton kernel: a program owns a tile of queries and walks the visible
tiles of keys.
"""

import triton
import triton.language as tl

from tilewise.formula import limits
from tilewise.tiles.arithmetic import LN2, LOG2E, power_below, weights_of
from tilewise.tiles.dropout import keep_tile
from tilewise.tiles.load import HOST, POINTER, load_rows, rows_of, store_rows
from tilewise.tiles.visit import call_once, locate, proved, row_ends, take_turns, visit, visit_ahead, visits

MOST = tl.constexpr(limits.MOST)


@triton.jit
def fold_tile(
    acc, l_i, m_i, q, n, K_rows, V_rows, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j,
    c, scale, dropout, skip, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, VISIBLE: tl.constexpr, SCORE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, SKIPS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Fold key tile n into the online softmax state; m_i is in units of s, and p = exp2((s - m) * c). If it SKIPS, a
    tile that is more than `skip`, in base 2, below all maxima changes nothing.
    """
    start_n = n * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    in_k = offs_n < seqlen_k
    k = load_rows(K_rows, start_n, stride_ks, in_k, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED, TMA)  # [BLOCK_N, D]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if SCALE_FIRST:
        s = s * scale
    offs_j = offs_n
    if MASKED:
        offs_j = tl.minimum(offs_n, seqlen_k - 1)  # formulas see valid positions only
    if SCORE is not None:
        s = SCORE(s, b, h, offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
    if MASKED:
        if VISIBLE is not None:
            seen = VISIBLE(b, h, offs_i[:, None], offs_j[None, :], mask_once, mask_args, mask_nums) & in_k[None, :]
        else:
            seen = (offs_n[None, :] >= first_j[:, None]) & (offs_n[None, :] <= last_j[:, None])
        s = tl.where(seen, s, float("-inf"))
    largest = tl.max(s, 1)
    if SKIPS:
        above = tl.where(m_i == float("-inf"), float("inf"), largest - m_i)
        # (in a layout of its own: in that of rows Triton 3.6 does not compile the largest of them for sm_100)
        if tl.max(tl.ravel(above, can_reorder=True), 0) * c >= -skip:
            acc, l_i, m_i = fold_scores(
                acc, l_i, m_i, s, largest, start_n, V_rows, stride_vs, in_k, offs_i, c, dropout, seed, row,
                HEAD_DIM_V, BLOCK_N, BLOCK_DV, MASKED, SCORE, DROPOUT, PRECISION, TMA,
            )  # fmt: skip
    else:
        acc, l_i, m_i = fold_scores(
            acc, l_i, m_i, s, largest, start_n, V_rows, stride_vs, in_k, offs_i, c, dropout, seed, row,
            HEAD_DIM_V, BLOCK_N, BLOCK_DV, MASKED, SCORE, DROPOUT, PRECISION, TMA,
        )  # fmt: skip
    return acc, l_i, m_i


@triton.jit
def fold_scores(
    acc, l_i, m_i, s, largest, start_n, V_rows, stride_vs, in_k, offs_i, c, dropout, seed, row,
    HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr,
    SCORE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Fold the scores of the tile of keys from start_n on, and its values."""
    m_new = tl.maximum(m_i, largest)
    m_use = m_new
    if SCORE is not None:  # in base 2 a larger one is infinite, and so are its weights
        m_use = tl.maximum(tl.minimum(m_new, MOST), -MOST)
    elif MASKED:
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    p, alpha = weights_of(s, m_i, m_use, c, SCORE)
    l_i = l_i * alpha + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(keep_tile(seed, row, offs_i, start_n, dropout, BLOCK_N, False), p, 0.0)
    acc = acc * alpha[:, None]
    v = load_rows(V_rows, start_n, stride_vs, in_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, MASKED, TMA)  # [BLOCK_N, DV]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_new


@triton.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "scale", "dropout", "keep_scale",
    ]
)  # fmt: skip
def attention_fwd(
    Q, K, V, SINK, O, LSE, CU_Q, CU_K, SEED, SKIP, LISTED, list_stride_b, list_stride_h,
    list_stride_r,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, scale, dropout, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SCALE_FIRST: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, SKIPS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
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

    # rows: a packed tensor has no batch stride and starts at its sequence's first row
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    hk = h // GROUP
    OUT: tl.constexpr = HOST if TMA == HOST else POINTER  # what is written once is worth no descriptor made here
    Q_rows = rows_of(Q, b, row0_q, h, seqlen_q, stride_qb, stride_qs, stride_qh, HEAD_DIM, BLOCK_M, BLOCK_D, POINTER)
    K_rows = rows_of(K, b, row0_k, hk, seqlen_k, stride_kb, stride_ks, stride_kh, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
    V_rows = rows_of(V, b, row0_k, hk, seqlen_k, stride_vb, stride_vs, stride_vh, HEAD_DIM_V, BLOCK_N, BLOCK_DV, TMA)
    O_rows = rows_of(O, b, row0_q, h, seqlen_q, stride_ob, stride_os, stride_oh, HEAD_DIM_V, BLOCK_M, BLOCK_DV, OUT)
    LSE_base = LSE + (h64 * rows_q + row0_q if PACKED else row.to(tl.int64) * rows_q)

    # prologue
    q = load_rows(Q_rows, start_m, stride_qs, in_q, HEAD_DIM, BLOCK_M, BLOCK_D, True, POINTER)  # [BLOCK_M, D]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E  # exp(x) = exp2(x * log2 e), in units of s
    seed = tl.load(SEED) if DROPOUT else 0
    skip = tl.load(SKIP + h) * LOG2E if SKIPS else 0.0
    first_j, last_j = row_ends(b, h, offs_i, 0, seqlen_k, mask_args, mask_nums, ROWS)
    mask_once = call_once(b, h, offs_i[:, None], mask_args, mask_nums, MASK_ONCE)
    score_once = call_once(b, h, offs_i[:, None], score_args, score_nums, SCORE_ONCE)

    # main loop: tiles without a hidden pair, then those that need the mask or the sequence's end
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
            acc, l_i, m_i = fold_tile(
                acc, l_i, m_i, q, n, K_rows, V_rows, stride_ks, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j,
                c, scale, dropout, skip, seed, row, mask_once, mask_args, mask_nums, score_once, score_args, score_nums,
                HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, MASKED, VISIBLE, SCORE, SCALE_FIRST, DROPOUT,
                PRECISION, SKIPS, TMA,
            )  # fmt: skip

    # epilogue
    m2 = m_i * c  # base 2 from here on
    if SINK is not None:
        sink2 = tl.load(SINK + h).to(tl.float32) * LOG2E
        m_all = tl.maximum(m2, sink2)
        m_all = tl.where(m_all == float("-inf"), 0.0, m_all)
        alpha = power_below(m2, m_all)
        l_i = l_i * alpha + power_below(sink2, m_all)
        acc = acc * alpha[:, None]
        m2 = m_all
    empty = l_i == 0.0
    l_safe = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), (m2 + tl.math.log2(l_safe)) * LN2)
    tl.store(LSE_base + offs_m, lse, mask=in_q)
    acc = acc * (keep_scale / l_safe)[:, None]
    store_rows(O_rows, start_m, stride_os, acc, in_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, OUT)
