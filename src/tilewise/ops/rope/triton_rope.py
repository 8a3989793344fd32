"""Queries and keys turned on a GPU: a program has some heads of q and of k, of some tokens.

Both numbers of a pair are loaded once and stored once, and cosines and sines once for all heads of a program. Gradients
of values, where they go into one tensor with those of queries and keys, are copied on the way. Whatever is multiplied
by a stride is 64 bits wide.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.rope.problem import Call, parts
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.rotary import angles_of

_PAIRS = 1024  # of a program's tile of queries, or of keys
_EACH = 128  # bytes of a thread, all under way before the first is waited for
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def heads_of(X, strides, sequence, at, head, ALIGN: tl.constexpr):
    """Where heads of tokens begin, strides written so that the compiler sees ALIGN divide them  # [T, H, 1]"""
    token = sequence * (strides[0] // ALIGN * ALIGN) + at * (strides[1] // ALIGN * ALIGN)
    return X + (token[:, None] + (head * (strides[2] // ALIGN * ALIGN))[None, :])[:, :, None]


@triton.jit
def load_pairs(rows, inside, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """First and second numbers of pairs  # [T, H, BLOCK_P]"""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_P)[None, None, :]
        x = tl.load(rows + dim, mask=inside & (dim < 2 * HALF), other=0.0)
        return tl.split(x.reshape(x.shape[0], x.shape[1], BLOCK_P, 2))
    else:
        pair = tl.arange(0, BLOCK_P)[None, None, :]
        there = inside & (pair < HALF)
        return tl.load(rows + pair, mask=there, other=0.0), tl.load(rows + HALF + pair, mask=there, other=0.0)


@triton.jit
def turned(a, b, cos, sin):
    """Pairs (a, b), turned, each product rounded before it is added"""
    first = a.to(tl.float32) * cos - b.to(tl.float32) * sin
    second = b.to(tl.float32) * cos + a.to(tl.float32) * sin
    return first.to(a.dtype), second.to(a.dtype)


@triton.jit
def store_pairs(
    rows, inside, first, second, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    if INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_P)[None, None, :]
        both = tl.join(first, second).reshape(first.shape[0], first.shape[1], 2 * BLOCK_P)
        tl.store(rows + dim, both, mask=inside & (dim < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_P)[None, None, :]
        tl.store(rows + pair, first, mask=inside & (pair < HALF))
        tl.store(rows + HALF + pair, second, mask=inside & (pair < HALF))


@triton.jit
def copy_rest(rows, into, inside, ROTARY: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The dimensions that are not turned"""
    for start in range(ROTARY, DIM, BLOCK):
        dim = start + tl.arange(0, BLOCK)[None, None, :]
        x = tl.load(rows + dim, mask=inside & (dim < DIM))
        tl.store(into + dim, x, mask=inside & (dim < DIM))


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seqlen", "tokens"])
def rope_pairs(
    Q, K, V, OQ, OK, OV, ROPE, strides_q, strides_k, strides_v, strides_oq, strides_ok, strides_ov, seqlen, tokens,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr, INPLACE: tl.constexpr, ALIGN: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # who am I
    HALF: tl.constexpr = ROTARY // 2
    program = tl.program_id(0)
    token = program // PARTS * BLOCK_T + tl.arange(0, BLOCK_T)
    used = token < tokens
    cos_rows, sin_rows = angles_of(ROPE, token, used)
    sequence, at = (token // seqlen).to(tl.int64), (token % seqlen).to(tl.int64)

    # all pairs are asked for before the angles are there
    head_q = program % PARTS * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside_q = (used[:, None] & (head_q < HEADS_Q)[None, :])[:, :, None]
    q = heads_of(Q, strides_q, sequence, at, head_q.to(tl.int64), ALIGN)
    oq = heads_of(OQ, strides_oq, sequence, at, head_q.to(tl.int64), ALIGN)
    a_q, b_q = load_pairs(q, inside_q, HALF, INTERLEAVED, BLOCK_P)
    if K is not None:
        head_k = program % PARTS * BLOCK_K + tl.arange(0, BLOCK_K)
        inside_k = (used[:, None] & (head_k < HEADS_K)[None, :])[:, :, None]
        k = heads_of(K, strides_k, sequence, at, head_k.to(tl.int64), ALIGN)
        ok = heads_of(OK, strides_ok, sequence, at, head_k.to(tl.int64), ALIGN)
        a_k, b_k = load_pairs(k, inside_k, HALF, INTERLEAVED, BLOCK_P)
    if V is not None:  # as many heads as of keys; what is not turned is no pair of neighbours
        v = heads_of(V, strides_v, sequence, at, head_k.to(tl.int64), ALIGN)
        ov = heads_of(OV, strides_ov, sequence, at, head_k.to(tl.int64), ALIGN)
        a_v, b_v = load_pairs(v, inside_k, HALF, False, BLOCK_P)

    # by which angles
    pair = tl.arange(0, BLOCK_P)[None, :]
    there = used[:, None] & (pair < HALF)
    cos = tl.load(cos_rows[:, None] + pair, mask=there, other=0.0).to(tl.float32)[:, None, :]
    sin = tl.load(sin_rows[:, None] + pair, mask=there, other=0.0).to(tl.float32)[:, None, :]
    if BACK:
        sin = -sin

    a_q, b_q = turned(a_q, b_q, cos, sin)
    store_pairs(oq, inside_q, a_q, b_q, HALF, INTERLEAVED, BLOCK_P)
    if K is not None:
        a_k, b_k = turned(a_k, b_k, cos, sin)
        store_pairs(ok, inside_k, a_k, b_k, HALF, INTERLEAVED, BLOCK_P)
    if V is not None:
        store_pairs(ov, inside_k, a_v, b_v, HALF, False, BLOCK_P)
    if ROTARY < DIM and not INPLACE:
        copy_rest(q, oq, inside_q, ROTARY, DIM, BLOCK_P)
        if K is not None:
            copy_rest(k, ok, inside_k, ROTARY, DIM, BLOCK_P)
        if V is not None:
            copy_rest(v, ov, inside_k, ROTARY, DIM, BLOCK_P)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills q and k."""
    _turn(call, list(call.given.values()), list(results.values()), back=False)


def backward(call: Call, kept: dict[str, torch.Tensor], incoming, gradients: dict[str, torch.Tensor]) -> None:
    """Fills dq and dk, or all of dqkv."""
    _, given, into = zip(*parts(call, incoming, gradients), strict=True)
    _turn(call, list(given), list(into), back=True)


def _turn(call: Call, given: list[torch.Tensor], into: list[torch.Tensor], back: bool) -> None:
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in given]
    key = tensors_key(*given, *into, call.cos, call.sin, call.positions)
    inplace = given[0] is into[0]
    key = None if key is None else (key, call.interleaved, back, inplace)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(call, given, into, (back, inplace)))
    absent = [None] * (3 - len(given))
    angles = (call.cos, call.sin, call.positions, call.cos.stride(0), call.sin.stride(0))
    with on_device(call.cos):
        plan.launch((*given, *absent, *into, *absent, angles), ())


def _plan(call: Call, given: list[torch.Tensor], into: list[torch.Tensor], how: tuple[bool, bool]) -> Plan:
    tokens, half = call.positions.numel(), call.cos.shape[1]
    strides = [_strides(x) for x in (*given, *into)]
    align = math.gcd(16, *(stride for three in strides for stride in three))
    heads = [x.shape[-2] for x in given]
    block_p = triton.next_power_of_2(half)
    most = min(max(1, _PAIRS // block_p), triton.next_power_of_2(max(heads)))
    parts = triton.cdiv(max(heads), most)
    block_q, block_k = (triton.next_power_of_2(triton.cdiv(n, parts)) for n in (heads[0], heads[-1]))
    block_t = min(max(1, _PAIRS // (most * block_p)), triton.next_power_of_2(tokens))
    pairs = block_t * block_p * (block_q + block_k * (len(given) - 1))
    warps = min(32, 2 ** max(0, (2 * pairs * given[0].element_size() // (32 * _EACH)).bit_length() - 1))
    constants = (
        heads[0], heads[-1], call.dim, 2 * half, call.interleaved, *how, align, parts, block_t, block_q, block_k,
        block_p,
    )  # fmt: skip
    absent = [None] * (3 - len(given))
    between = (*strides[: len(given)], *absent, *strides[len(given) :], *absent)
    seqlen = call.positions.shape[-1]
    grid = triton.cdiv(tokens, block_t) * parts
    return Plan(
        rope_pairs, grid, between, (seqlen, tokens), constants, warps, 1, options={"enable_fp_fusion": False}
    )  # fmt: skip


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Between sequences, tokens and heads."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])
