"""One launch: a program has some heads of some tokens, all of them of q, of k or of v.

Keys and queries are normalised and rotated in float32, and rounded or encoded once. Whatever is multiplied by a stride
is 64 bits wide.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.kv_write.triton_kv_write import encode_rows
from tilewise.ops.qkv_prologue.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.quant.codes import BY_DTYPE
from tilewise.tiles.codes import codes_of, scales_of
from tilewise.tiles.rotary import angles_of, run_of, turned

_ELEMENTS = 1024  # of a program's tile (heads, head_dim), however few there are: it decides in which order norms sum
_WARPS = 4
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def load_heads(rows, dim, inside):
    return tl.load(rows + dim[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, WEIGHT, rstd, dim, there):
    """x, normalised where there is a WEIGHT  # [BLOCK_R, BLOCK]"""
    if WEIGHT is not None:
        w = tl.load(WEIGHT + dim, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = x * rstd[:, None] * w[None, :]
    return x


@triton.jit
def rotated(
    x, rows, WEIGHT, rstd, dim, cos, sin, there, used,
    STEP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Dimensions `dim` of some heads, x as loaded, normalised and rotated, float32. They are neighbours, from a
    multiple of STEP to the next  # [BLOCK_R, BLOCK]
    """
    inside = used[:, None] & there[None, :]
    HALF: tl.constexpr = ROTARY // 2
    x = scaled(x, WEIGHT, rstd, dim, there)
    if WEIGHT is None or (INTERLEAVED and STEP % 2 == 0):
        return turned(x, rows, dim, cos, sin, inside, used, STEP, ROTARY, INTERLEAVED)
    else:  # the other number of a pair, which is near, is loaded and normalised once more
        if INTERLEAVED:
            is_first = dim % 2 == 0
            pair = dim // 2
            other = dim ^ 1
        else:
            RUN: tl.constexpr = run_of(HALF | STEP)
            is_first = dim < HALF
            pair = tl.max_contiguous(tl.multiple_of(tl.where(is_first, dim, dim - HALF), RUN), RUN)
            other = tl.max_contiguous(tl.multiple_of(tl.where(is_first, dim + HALF, dim - HALF), RUN), RUN)
        is_turned = there & (dim < ROTARY)
        some = used[:, None] & is_turned[None, :]
        y = scaled(load_heads(rows, other, some), WEIGHT, rstd, other, is_turned)  # [BLOCK_R, BLOCK]
        c = tl.load(cos[:, None] + pair[None, :], mask=some, other=0.0).to(tl.float32)
        s = tl.load(sin[:, None] + pair[None, :], mask=some, other=0.0).to(tl.float32)
        return tl.where(is_turned[None, :], x * c + y * tl.where(is_first[None, :], -s, s), x)


@triton.jit
def heads_of(
    rows, WEIGHT, ROPE, token, used, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """(the first, the second) of PARTS of some heads of q or of k, normalised and rotated  # [BLOCK_R, BLOCK // PARTS];
    of one part it is both
    """
    STEP: tl.constexpr = DIM // PARTS
    offs = tl.arange(0, BLOCK // PARTS)
    there = offs < STEP
    inside = used[:, None] & there[None, :]
    cos, sin = angles_of(ROPE, token, used)
    low = load_heads(rows, offs, inside)
    high = low
    if PARTS == 2:
        high = load_heads(rows, offs + STEP, inside)
    rstd = None
    if WEIGHT is not None:
        square = tl.sum(low * low, 1)  # [BLOCK_R]
        if PARTS == 2:
            square += tl.sum(high * high, 1)
        rstd = 1.0 / tl.sqrt_rn(square / DIM + eps)
    low = rotated(low, rows, WEIGHT, rstd, offs, cos, sin, there, used, STEP, ROTARY, INTERLEAVED)
    if PARTS == 2:
        high = rotated(high, rows, WEIGHT, rstd, offs + STEP, cos, sin, there, used, STEP, ROTARY, INTERLEAVED)
        return low, high
    else:
        return low, low


@triton.jit
def some_heads(tile, tokens, HEADS: tl.constexpr, BLOCK_R: tl.constexpr):
    """(token, head, whether there is such a token) of a tile of rows, HEADS of them a token  # [BLOCK_R]"""
    row = tile.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row // HEADS
    return token, row % HEADS, token < tokens


@triton.jit
def places_of(SLOTS, token, there, PAGE: tl.constexpr):
    """(page, offset, whether it is written) of some tokens  # [BLOCK_R]"""
    slot = tl.load(SLOTS + token, mask=there, other=-1).to(tl.int64)
    return slot // PAGE, slot % PAGE, slot >= 0


@triton.jit
def store_queries(
    X, Q, WEIGHT, ROPE, stride_xt, stride_xh, stride_qt, stride_qh, tile, tokens, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token, head, there = some_heads(tile, tokens, HEADS, BLOCK_R)
    rows = X + tl.multiple_of(token * stride_xt + head * stride_xh, VECTOR)[:, None]
    q, _ = heads_of(rows, WEIGHT, ROPE, token, there, eps, DIM, BLOCK, 1, ROTARY, INTERLEAVED)
    offs = tl.arange(0, BLOCK)
    place = tl.multiple_of(token * stride_qt + head * stride_qh, VECTOR)
    tl.store(Q + place[:, None] + offs[None, :], q.to(Q.dtype.element_ty), mask=there[:, None] & (offs < DIM)[None, :])


@triton.jit
def write_keys(
    X, PAGES, SCALES, SLOTS, WEIGHT, ROPE, stride_xt, stride_xh, stride_pp, stride_ps, stride_ph, stride_sp, stride_ss,
    stride_sh, tile, tokens, eps,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, ENCODING: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if ENCODING == "int4" else 1  # of a head, that share bytes
    token, head, there = some_heads(tile, tokens, HEADS, BLOCK_R)
    page, offset, used = places_of(SLOTS, token, there, PAGE)
    rows = X + tl.multiple_of(token * stride_xt + head * stride_xh, VECTOR)[:, None]
    k, high = heads_of(rows, WEIGHT, ROPE, token, used, eps, DIM, BLOCK, PARTS, ROTARY, INTERLEAVED)
    offs = tl.arange(0, BLOCK // PARTS)
    inside = used[:, None] & (offs < DIM // PARTS)[None, :]
    place = tl.multiple_of(page * stride_pp + offset * stride_ps + head * stride_ph, VECTOR)
    into = PAGES + place[:, None] + offs[None, :]
    if ENCODING is None:
        tl.store(into, k.to(PAGES.dtype.element_ty), mask=inside)
    else:
        scale = scales_of(k, high, ENCODING)
        code = codes_of(k, scale, ENCODING)
        if PARTS == 2:
            code |= codes_of(high, scale, ENCODING) << 4
        tl.store(into, code.to(tl.uint8), mask=inside)
        tl.store(SCALES + page * stride_sp + offset * stride_ss + head * stride_sh, scale, mask=used)


@triton.jit
def write_values(
    X, PAGES, SCALES, SLOTS, stride_xt, stride_xh, stride_pp, stride_ps, stride_ph, stride_sp, stride_ss, stride_sh,
    tile, tokens,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, ENCODING: tl.constexpr,
):  # fmt: skip
    token, head, there = some_heads(tile, tokens, HEADS, BLOCK_R)
    page, offset, used = places_of(SLOTS, token, there, PAGE)
    if ENCODING is None:
        offs = tl.arange(0, BLOCK)
        inside = used[:, None] & (offs < DIM)[None, :]
        rows = X + tl.multiple_of(token * stride_xt + head * stride_xh, VECTOR)[:, None]
        v = tl.load(rows + offs[None, :], mask=inside)
        place = tl.multiple_of(page * stride_pp + offset * stride_ps + head * stride_ph, VECTOR)
        tl.store(PAGES + place[:, None] + offs[None, :], v, mask=inside)
    else:
        encode_rows(
            X, PAGES, SCALES, None, stride_xt, stride_xh, stride_pp, stride_ps, stride_ph, stride_sp, stride_ss,
            stride_sh, token, head, page, offset, used, DIM, BLOCK, ENCODING, 0, False,
        )  # fmt: skip


# kernel --------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def prepare_heads(
    QKV, Q, K_PAGES, V_PAGES, K_SCALES, V_SCALES, SLOTS, Q_NORM, K_NORM, ROPE, stride_xt, stride_xh, stride_qt,
    stride_qh, stride_kpp, stride_kps, stride_kph, stride_vpp, stride_vps, stride_vph, stride_ksp, stride_kss,
    stride_ksh, stride_vsp, stride_vss, stride_vsh, tokens, eps,
    PAGE: tl.constexpr, HEADS: tl.constexpr, HEADS_KV: tl.constexpr, DIM: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, ENCODING: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # who am I: tiles of q come first, then those of k and of v
    tile = tl.program_id(0)
    tiles = tl.cdiv(tl.cast(tokens, tl.int64) * HEADS, BLOCK_R)
    tiles_kv = tl.cdiv(tl.cast(tokens, tl.int64) * HEADS_KV, BLOCK_R)
    keys = QKV + tl.cast(stride_xh, tl.int64) * HEADS
    values = keys + tl.cast(stride_xh, tl.int64) * HEADS_KV

    if tile < tiles:
        store_queries(
            QKV, Q, Q_NORM, ROPE, stride_xt, stride_xh, stride_qt, stride_qh, tile, tokens, eps,
            HEADS, DIM, VECTOR, BLOCK_R, BLOCK_D, ROTARY, INTERLEAVED,
        )  # fmt: skip
    elif tile < tiles + tiles_kv:
        write_keys(
            keys, K_PAGES, K_SCALES, SLOTS, K_NORM, ROPE, stride_xt, stride_xh, stride_kpp, stride_kps, stride_kph,
            stride_ksp, stride_kss, stride_ksh, tile - tiles, tokens, eps,
            PAGE, HEADS_KV, DIM, VECTOR, BLOCK_R, BLOCK_D, ENCODING, ROTARY, INTERLEAVED,
        )  # fmt: skip
    else:
        write_values(
            values, V_PAGES, V_SCALES, SLOTS, stride_xt, stride_xh, stride_vpp, stride_vps, stride_vph, stride_vsp,
            stride_vss, stride_vsh, tile - tiles - tiles_kv, tokens,
            PAGE, HEADS_KV, DIM, VECTOR, BLOCK_R, BLOCK_D, ENCODING,
        )  # fmt: skip


# launch --------------------------------------------------------------------------------------------------------------


def forward(call: Call) -> torch.Tensor:
    """Writes keys and values; returns queries."""
    write, rope = call.write, call.write.rope
    q = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    norms, scales = call.norms or (None, None), write.scales or (None, None)
    given = (q, call.q, write.k_pages, write.v_pages, *scales, write.slots, *norms, rope.cos, rope.sin, rope.positions)
    key = tensors_key(*(x for x in given if x is not None))
    key = None if key is None else (key, call.norms is None, write.scales is None, rope.interleaved)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(call, q))
    pages = [x if write.scales is None else x.view(torch.uint8) for x in (write.k_pages, write.v_pages)]
    angles = (rope.cos, rope.sin, rope.positions, rope.cos.stride(0), rope.sin.stride(0))
    with on_device(q):
        plan.launch((call.qk, q, *pages, *scales, write.slots, *norms, angles), (), (call.eps,))
    return q


def _plan(call: Call, q: torch.Tensor) -> Plan:
    write, rope = call.write, call.write.rope
    tokens, heads, dim = q.shape
    heads_kv, page_size = write.k.shape[1], write.k_pages.shape[1]
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, _ELEMENTS // block_d)
    strides = (
        *call.qk.stride()[:2], *q.stride()[:2], *write.k_pages.stride()[:3], *write.v_pages.stride()[:3],
    )  # fmt: skip
    vector = math.gcd(16, *strides)  # numbers between which heads lie: so many travel together
    of_scales = (0,) * 6 if write.scales is None else (*write.scales[0].stride(), *write.scales[1].stride())
    encoding = None if write.scales is None else BY_DTYPE[write.v_pages.dtype]
    constants = (
        page_size, heads, heads_kv, dim, vector, block_r, block_d, encoding, rope.rotary_dim, rope.interleaved,
    )  # fmt: skip
    grid = triton.cdiv(tokens * heads, block_r) + 2 * triton.cdiv(tokens * heads_kv, block_r)
    options = {"enable_fp_fusion": False}  # products of a rotation are rounded
    return Plan(prepare_heads, grid, strides + of_scales, (tokens,), constants, _WARPS, 1, options=options)
