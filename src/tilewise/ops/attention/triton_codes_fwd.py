"""Attention over codes as one portable Triton kernel: `triton_fwd` with other products (Zhang et al., "SageAttention").

Keys of a tile stand in the order in which FP8 values do (`quant.blocks.KEY_ORDER`), so that nothing is moved; masks and
scores ask for their positions. Where a GPU has no FP8, its codes are multiplied as float16, which holds them all.
"""

import triton
import triton.language as tl

from tilewise.ops.attention.triton_fwd import MOST
from tilewise.tiles.arithmetic import LN2, LOG2E, power_below, weights_of
from tilewise.tiles.codes import number_of_byte
from tilewise.tiles.visit import call_once, locate, proved, row_ends, take_turns, visit, visit_ahead, visits

QUERIES = tl.constexpr(64)  # of a block that has scales
KEYS = tl.constexpr(128)


@triton.jit
def operand(x, ENCODING: tl.constexpr, CONVERTS: tl.constexpr):
    """Bytes, or numbers, as a product takes them; CONVERTS where the GPU multiplies FP8."""
    if ENCODING == "fp8" and CONVERTS:
        return x.to(tl.float8e4nv, bitcast=True)
    elif ENCODING == "fp8":
        return number_of_byte(x, "fp8").to(tl.float16)
    else:
        return x


@triton.jit
def key_at(place):
    """Which key stands at a place of a tile."""
    return place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2


@triton.jit
def group_of_query(row, GROUPS: tl.constexpr):
    """Of a block's scales, that of each of its rows (`quant.blocks.row_groups`)."""
    if GROUPS == QUERIES:
        return row
    elif GROUPS == QUERIES // 2:
        return row // 16 * 8 + row % 8
    elif GROUPS == QUERIES // 16:
        return row // 16
    else:
        return row * 0


@triton.jit
def group_of_key(row, GROUPS: tl.constexpr):
    if GROUPS == KEYS:
        return row
    elif GROUPS == 4:
        return row % 8 // 2
    else:
        return row * 0


@triton.jit
def fold_codes(
    acc, l_i, m_i, q, q_scale, q_mean, bias, n, K_rows, KX_rows, V_tile, KS, VS, stride_ks, stride_kxs, stride_vc,
    stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale, skip, mask_once, mask_args, mask_nums, score_once,
    score_args, score_nums, K_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE: tl.constexpr, SCALE_FIRST: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr, LARGEST: tl.constexpr,
    CONVERTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Fold key tile n into the online softmax state, as `triton_fwd.fold_tile`."""
    offs_n = n * BLOCK_N + key_at(tl.arange(0, BLOCK_N))
    in_k = offs_n < seqlen_k
    d = tl.arange(0, BLOCK_D)
    there = in_k[:, None] & (d < HEAD_DIM)[None, :]
    k = operand(
        tl.load(K_rows + offs_n.to(tl.int64)[:, None] * stride_ks + d[None, :], mask=there, other=0), QK, CONVERTS
    )
    k_scale = tl.load(KS + (n * BLOCK_N // KEYS).to(tl.int64) * K_GROUPS + group_of_key(offs_n % KEYS, K_GROUPS))
    s = tl.dot(q, tl.trans(k)).to(tl.float32) * q_scale[:, None] * k_scale[None, :]
    if KX_rows is not None:
        exact = tl.load(KX_rows + offs_n.to(tl.int64)[:, None] * stride_kxs + d[None, :], mask=there, other=0.0)
        s += tl.sum(exact.to(tl.float32) * q_mean[None, :], 1)[None, :]
    s += bias[:, None]
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
        # (in a layout of its own, as in triton_fwd)
        if tl.max(tl.ravel(above, can_reorder=True), 0) * c >= -skip:
            acc, l_i, m_i = fold_scores(
                acc, l_i, m_i, s, largest, n, offs_n, in_k, V_tile, VS, stride_vc, stride_vs, c, HEAD_DIM_V, BLOCK_N,
                BLOCK_DV, MASKED, SCORE, PV, LARGEST, CONVERTS,
            )  # fmt: skip
    else:
        acc, l_i, m_i = fold_scores(
            acc, l_i, m_i, s, largest, n, offs_n, in_k, V_tile, VS, stride_vc, stride_vs, c, HEAD_DIM_V, BLOCK_N,
            BLOCK_DV, MASKED, SCORE, PV, LARGEST, CONVERTS,
        )  # fmt: skip
    return acc, l_i, m_i


@triton.jit
def fold_scores(
    acc, l_i, m_i, s, largest, n, offs_n, in_k, V_tile, VS, stride_vc, stride_vs, c, HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, SCORE: tl.constexpr, PV: tl.constexpr,
    LARGEST: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Fold the scores of key tile n, and its values."""
    m_new = tl.maximum(m_i, largest)
    m_use = m_new
    if SCORE is not None:  # in base 2 a smaller one is infinite
        m_use = tl.maximum(m_new, -MOST)
    elif MASKED:
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    p, alpha = weights_of(s, m_i, m_use, c, SCORE)
    l_i = l_i * alpha + tl.sum(p, 1)
    d_v = tl.arange(0, BLOCK_DV)
    in_dim = d_v < HEAD_DIM_V
    if PV == "fp8":
        places = n * BLOCK_N + tl.arange(0, BLOCK_N)
        at = V_tile + d_v.to(tl.int64)[None, :] * stride_vc + places[:, None]
        v = operand(tl.load(at, mask=in_dim[None, :], other=0), "fp8", CONVERTS)  # zeros behind the last key
    else:
        at = V_tile + offs_n.to(tl.int64)[:, None] * stride_vs + d_v[None, :]
        v = tl.load(at, mask=in_k[:, None] & in_dim[None, :], other=0.0)
    w = (p * LARGEST).to(tl.float8e4nv) if PV == "fp8" and CONVERTS else p.to(v.dtype)
    if VS is not None:  # of this block of keys
        acc = acc * alpha[:, None] + tl.dot(w, v, max_num_imprecise_acc=32) * tl.load(VS + n * BLOCK_N // KEYS)
    else:
        acc = tl.dot(w, v, acc * alpha[:, None], max_num_imprecise_acc=32)
    return acc, l_i, m_new


@triton.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_k", "rows_q", "slots", "together", "list_stride_b", "list_stride_h",
        "list_stride_r", "mask_nums", "score_nums", "blocks_q", "blocks_k", "scale",
    ]
)  # fmt: skip
def attention_codes_fwd(
    Q, K, V, KX, SINK, O, LSE, CU_Q, CU_K, SKIP, QS, KS, VS, QM, VM, QB, LISTED, list_stride_b, list_stride_h,
    list_stride_r,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_xb, stride_xs, stride_xh,
    stride_vb, stride_vs, stride_vh, stride_vc, stride_ob, stride_os, stride_oh,
    mask_args, mask_nums, score_args, score_nums,
    batch, seqlen_q, seqlen_k, rows_q, slots, together, blocks_q, blocks_k, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LISTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, SCALE_FIRST: tl.constexpr, PACKED: tl.constexpr,
    QK: tl.constexpr, PV: tl.constexpr, Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr, BY_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, CONVERTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """A program has a block of queries. BY_BLOCK: values have a scale for each block of keys, else for each channel."""
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
    row = tl.arange(0, BLOCK_M)
    offs_m = start_m + row
    offs_i = proved(tl.minimum(offs_m, seqlen_q - 1) + shift, seqlen_k)
    in_q = offs_m < seqlen_q

    # rows, and the blocks' numbers: packed, a sequence's slots begin behind all that those before it may have
    b64, h64, hk64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    HEADS_KV: tl.constexpr = HEADS // GROUP
    Q_rows = Q + b64 * stride_qb + row0_q.to(tl.int64) * stride_qs + h64 * stride_qh
    K_rows = K + b64 * stride_kb + row0_k.to(tl.int64) * stride_ks + hk64 * stride_kh
    O_rows = O + b64 * stride_ob + row0_q.to(tl.int64) * stride_os + h64 * stride_oh
    KX_rows = KX
    if KX is not None:
        KX_rows = KX + b64 * stride_xb + row0_k.to(tl.int64) * stride_xs + hk64 * stride_xh
    V_tile = V + b64 * stride_vb + hk64 * stride_vh
    row_of_lse = (b64 * HEADS + h64) * rows_q
    block = (b64 * HEADS + h64) * blocks_q + m
    block_k = (b64 * HEADS_KV + hk64) * blocks_k
    if PACKED:
        row_of_lse = h64 * rows_q + row0_q
        block = h64 * blocks_q + slot
        slot_k = row0_k // KEYS + b
        block_k = hk64 * blocks_k + slot_k
        V_tile += slot_k.to(tl.int64) * KEYS if PV == "fp8" else row0_k.to(tl.int64) * stride_vs
    KS_blocks = KS + block_k * K_GROUPS
    VS_blocks = None
    if BY_BLOCK:
        VS_blocks = VS + block_k

    # prologue
    d = tl.arange(0, BLOCK_D)
    at = Q_rows + offs_m.to(tl.int64)[:, None] * stride_qs + d[None, :]
    q = operand(tl.load(at, mask=in_q[:, None] & (d < HEAD_DIM)[None, :], other=0), QK, CONVERTS)
    q_scale = tl.load(QS + block * Q_GROUPS + group_of_query(row, Q_GROUPS))
    q_mean = tl.zeros([BLOCK_D], tl.float32)
    if QM is not None:
        q_mean = tl.load(QM + block * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    bias = tl.zeros([BLOCK_M], tl.float32)
    if QB is not None:
        bias = tl.load(QB + row_of_lse + offs_m, mask=in_q, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    c = LOG2E if SCALE_FIRST else scale * LOG2E
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
            acc, l_i, m_i = fold_codes(
                acc, l_i, m_i, q, q_scale, q_mean, bias, n, K_rows, KX_rows, V_tile, KS_blocks, VS_blocks, stride_ks,
                stride_xs, stride_vc, stride_vs, seqlen_k, b, h, offs_i, first_j, last_j, c, scale, skip, mask_once,
                mask_args, mask_nums, score_once, score_args, score_nums, K_GROUPS, HEAD_DIM, HEAD_DIM_V, BLOCK_N,
                BLOCK_D, BLOCK_DV, MASKED, VISIBLE, SCORE, SCALE_FIRST, QK, PV, LARGEST, CONVERTS, SKIPS,
            )  # fmt: skip

    # epilogue
    m2 = m_i * c  # base 2 from here on
    share = l_i
    if SINK is not None:
        sink2 = tl.load(SINK + h).to(tl.float32) * LOG2E
        m_all = tl.maximum(m2, sink2)
        m_all = tl.where(m_all == float("-inf"), 0.0, m_all)
        alpha = power_below(m2, m_all)
        share = l_i * alpha
        l_i = share + power_below(sink2, m_all)
        acc = acc * alpha[:, None]
        m2 = m_all
    empty = l_i == 0.0
    l_safe = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), (m2 + tl.math.log2(l_safe)) * LN2)
    tl.store(LSE + row_of_lse + offs_m, lse, mask=in_q)
    acc = acc / (l_safe * (LARGEST if PV == "fp8" and CONVERTS else 1.0))[:, None]
    d_v = tl.arange(0, BLOCK_DV)
    in_dim = d_v < HEAD_DIM_V
    of_head = (b64 * HEADS_KV + hk64) * HEAD_DIM_V
    if PV == "fp8" and not BY_BLOCK:
        acc = acc * tl.load(VS + of_head + d_v, mask=in_dim, other=0.0)[None, :]
    if VM is not None:
        mean = tl.load(VM + of_head + d_v, mask=in_dim, other=0.0)
        acc += mean[None, :] * (share / l_safe)[:, None]
    at = O_rows + offs_m.to(tl.int64)[:, None] * stride_os + d_v[None, :]
    tl.store(at, acc.to(O.dtype.element_ty), mask=in_q[:, None] & in_dim[None, :])
