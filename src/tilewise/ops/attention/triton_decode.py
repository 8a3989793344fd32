"""Few queries, many keys: a head's keys are split over programs, and partial results merge by log-sum-exp.

All queries of a group share the head's keys, so a program holds seqlen_q * group rows (Flash-Decoding, Dao et al.
2023). The merge law: lse = log sum exp(lse_s), o = sum exp(lse_s - lse) o_s.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_fwd import MOST
from tilewise.ops.attention.triton_keys import call_key
from tilewise.ops.attention.triton_plans import formula_arguments, functions, matmul_precision, strides_of
from tilewise.ops.triton_launch import Plan, Plans, on_device
from tilewise.tiles.arithmetic import LN2, LOG2E, softmax_step
from tilewise.tiles.load import POINTER, load_rows
from tilewise.tiles.visit import call_once, row_ends, span_tiles

_PROGRAMS_PER_SM = 4
_PLANS = Plans()


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "splits", "mask_nums", "score_nums"])
def attention_split(
    Q, K, V, O_PART, LSE_PART,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    mask_args, mask_nums, score_args, score_nums, seqlen_q, seqlen_k, splits, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, MASK_ONCE: tl.constexpr, VISIBLE: tl.constexpr,
    SCORE_ONCE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # who am I: one split of the keys of one key/value head
    pid = tl.program_id(0)
    split = pid % splits
    HEADS_KV: tl.constexpr = HEADS // GROUP
    hk = (pid // splits) % HEADS_KV
    b = pid // splits // HEADS_KV
    shift = seqlen_k - seqlen_q
    offs_r = tl.arange(0, BLOCK_R)  # row r is query r // GROUP of head hk * GROUP + r % GROUP
    rows = seqlen_q * GROUP
    in_r = offs_r < rows
    r = tl.minimum(offs_r, rows - 1)
    offs_m = r // GROUP
    h = hk * GROUP + r % GROUP
    offs_i = offs_m + shift
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    # pointers
    q_ptrs = (
        Q
        + b.to(tl.int64) * stride_qb
        + (offs_m.to(tl.int64) * stride_qs + h.to(tl.int64) * stride_qh)[:, None]
        + offs_d[None, :]
    )
    K_base = K + b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh
    V_base = V + b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh

    # prologue: the run of tiles that any row of any head of the group sees
    q = tl.load(q_ptrs, mask=in_r[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)  # [BLOCK_R, D]
    m_i = tl.full([BLOCK_R], float("-inf") if SCORE is None else -MOST, tl.float32)  # what is less is hidden
    l_i = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    x0 = shift + 0 * h
    first_tile, end_tile, _, _ = span_tiles(
        b, h, x0, x0 + (seqlen_q - 1), 0, seqlen_k, mask_args, mask_nums, TILES, BLOCK_N
    )
    begin = tl.min(first_tile + 0 * h, 0)
    end = tl.max(tl.where(end_tile > first_tile, end_tile, 0) + 0 * h, 0)
    first_j, last_j = row_ends(b, h, offs_i, 0, seqlen_k, mask_args, mask_nums, ROWS)
    mask_once = call_once(b, h[:, None], offs_i[:, None], mask_args, mask_nums, MASK_ONCE)
    score_once = call_once(b, h[:, None], offs_i[:, None], score_args, score_nums, SCORE_ONCE)
    share = tl.maximum(end - begin + splits - 1, 0) // splits  # of what is visible, however long the sequence
    begin += split * share
    end = tl.minimum(end, begin + share)

    # main loop
    for n in range(begin, end):
        start_n = begin * 0 + n * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_k = offs_n < seqlen_k
        offs_j = tl.minimum(offs_n, seqlen_k - 1)
        k = load_rows(K_base, start_n, stride_ks, in_k, HEAD_DIM, BLOCK_N, BLOCK_D, True, POINTER)  # [BLOCK_N, D]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_R, BLOCK_N]
        if SCORE is not None:
            s = SCORE(s, b, h[:, None], offs_i[:, None], offs_j[None, :], score_once, score_args, score_nums)
        if VISIBLE is not None:
            seen = (
                VISIBLE(b, h[:, None], offs_i[:, None], offs_j[None, :], mask_once, mask_args, mask_nums)
                & in_k[None, :]
            )
        else:
            seen = (offs_n[None, :] >= first_j[:, None]) & (offs_n[None, :] <= last_j[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_i, l_i, p, alpha = softmax_step(s, m_i, l_i)
        v = load_rows(V_base, start_n, stride_vs, in_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, True, POINTER)  # [BLOCK_N, DV]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    # epilogue: a normalised partial result and its lse; an empty part has lse = -inf
    empty = l_i == 0.0
    l_safe = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), m_i + tl.math.log2(l_safe) * LN2)
    row = ((b.to(tl.int64) * seqlen_q + offs_m) * HEADS + h) * splits + split
    tl.store(LSE_PART + row, lse, mask=in_r)
    o_ptrs = O_PART + row[:, None] * HEAD_DIM_V + offs_dv[None, :]
    tl.store(o_ptrs, acc / l_safe[:, None], mask=in_r[:, None] & (offs_dv[None, :] < HEAD_DIM_V))


@triton.jit(do_not_specialize=["seqlen_q", "splits"])
def attention_merge(
    O_PART, LSE_PART, SINK, O, LSE, stride_ob, stride_os, stride_oh, seqlen_q, splits,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program per row (batch, query, head): fold its splits in order."""
    pid = tl.program_id(0)
    row = pid.to(tl.int64)
    h = pid % HEADS
    m = (pid // HEADS) % seqlen_q
    b = (pid // HEADS // seqlen_q).to(tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_s = tl.arange(0, BLOCK_S)
    top = float("-inf")
    total = 0.0
    if SINK is not None:
        top = tl.load(SINK + h).to(tl.float32)
        total = 1.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, splits, BLOCK_S):
        s = start + offs_s
        lse = tl.load(LSE_PART + row * splits + s, mask=s < splits, other=float("-inf"))
        o_ptrs = O_PART + (row * splits + s)[:, None] * HEAD_DIM_V + offs_dv[None, :]
        o = tl.load(o_ptrs, mask=(s < splits)[:, None] & (offs_dv[None, :] < HEAD_DIM_V), other=0.0)  # [BLOCK_S, DV]
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.math.exp2((lse - safe) * LOG2E)
        alpha = tl.math.exp2((top - safe) * LOG2E)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(o * weight[:, None], 0)
        top = new_top
    empty = total == 0.0
    safe_total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.math.log2(safe_total) * LN2)
    tl.store(LSE + (b * HEADS + h) * seqlen_q + m, lse)
    o_ptrs = O + b * stride_ob + m.to(tl.int64) * stride_os + h.to(tl.int64) * stride_oh + offs_dv
    tl.store(o_ptrs, (acc / safe_total).to(O.dtype.element_ty), mask=offs_dv < HEAD_DIM_V)


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by split keys and a merge."""
    key = call_key(call)
    plan = _PLANS.get(key) or _PLANS.put(key, _plan(call))
    split, merge, splits = plan
    o, lse = call.new_output(), call.new_lse()
    rows = call.batch * call.rows_q * call.num_heads_q
    o_part = torch.empty((rows, splits, call.head_dim_v), dtype=torch.float32, device=call.q.device)
    lse_part = torch.empty((rows, splits), dtype=torch.float32, device=call.q.device)
    with on_device(call.q):
        split.launch((call.q, call.k, call.v, o_part, lse_part), formula_arguments(call), (call.scale,))
        merge.launch((o_part, lse_part, call.sink, o, lse), ())
    return o, lse


def _plan(call: Call) -> tuple[Plan, Plan, int]:
    mask, score = functions(call)
    widest = max(padded(call.head_dim), padded(call.head_dim_v))
    block_n = max(16, min(64, 16384 // (widest * call.q.element_size())))  # 16 KB of keys or values a tile
    tiles = -(-call.rows_k // block_n)
    heads = call.batch * call.num_heads_kv
    per_split = -(-tiles // max(1, min(tiles, _PROGRAMS_PER_SM * _num_sms(call.q.device) // heads)))
    splits = -(-tiles // per_split)
    sizes = (call.num_heads_q, call.group, call.head_dim, call.head_dim_v)
    rows = max(16, 1 << (call.rows_q * call.group - 1).bit_length())
    side = mask and mask.queries
    visibility = (side and side.tiles, side and side.rows, side and side.once, side and side.visible)
    scoring = (score and score.queries.once, score and score.queries.apply)
    block_d, block_dv = padded(call.head_dim), padded(call.head_dim_v)
    split = Plan(
        attention_split, heads * splits, (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v)),
        (call.rows_q, call.rows_k, splits),
        (*sizes, rows, block_n, block_d, block_dv, *visibility, *scoring, matmul_precision(call)), 4,
        3 if block_d <= 128 else 2,
    )  # fmt: skip
    merge = Plan(
        attention_merge, call.batch * call.rows_q * call.num_heads_q, strides_of(call.new_output()), (call.rows_q,
        splits),
        (call.num_heads_q, call.head_dim_v, 16, block_dv), 4, 1,
    )  # fmt: skip
    return split, merge, splits


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
