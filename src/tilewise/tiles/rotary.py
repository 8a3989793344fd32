"""Rotary position embedding in a kernel: rows of angles, and a tile of some heads' dimensions turned.

Compile whoever uses it with `enable_fp_fusion=False`: each product is then rounded, as `tilewise.Rope` promises.
"""

import triton
import triton.language as tl


@triton.jit
def angles_of(ROPE, token, used):
    """Where cosines and sines of some tokens lie, by ROPE (cos, sin, positions, stride_cos, stride_sin)  # [ROWS]"""
    position = tl.load(ROPE[2] + token, mask=used, other=0).to(tl.int64)
    return ROPE[0] + position * ROPE[3], ROPE[1] + position * ROPE[4]


@triton.jit
def turned(
    x, rows, dim, cos, sin, inside, used, STEP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x, turned, float32: dimensions `dim` of heads that begin at `rows`, 0 where not `inside`. They are neighbours,
    from a multiple of STEP to the next  # [ROWS, COLS]
    """
    HALF: tl.constexpr = ROTARY // 2
    x = x.to(tl.float32)
    if INTERLEAVED and STEP % 2 == 0:
        ROWS: tl.constexpr = x.shape[0]
        PAIRS: tl.constexpr = x.shape[1] // 2
        RUN: tl.constexpr = run_of(STEP // 2)
        a, b = tl.split(x.reshape(ROWS, PAIRS, 2))
        even, _ = tl.split(dim.reshape(PAIRS, 2))
        pair = tl.max_contiguous(tl.multiple_of(even // 2, RUN), RUN)
        is_turned = (pair < HALF)[None, :]
        c = tl.load(cos[:, None] + pair[None, :], mask=used[:, None] & is_turned).to(tl.float32)
        s = tl.load(sin[:, None] + pair[None, :], mask=used[:, None] & is_turned).to(tl.float32)
        first = tl.where(is_turned, a * c - b * s, a)
        second = tl.where(is_turned, b * c + a * s, b)
        return tl.join(first, second).reshape(ROWS, 2 * PAIRS)
    else:  # the other number of a pair is loaded once more: it is near
        if INTERLEAVED:
            is_first = dim % 2 == 0
            pair = dim // 2
            other = dim ^ 1
        else:
            RUN: tl.constexpr = run_of(HALF | STEP)
            is_first = dim < HALF
            pair = tl.max_contiguous(tl.multiple_of(tl.where(is_first, dim, dim - HALF), RUN), RUN)
            other = tl.max_contiguous(tl.multiple_of(tl.where(is_first, dim + HALF, dim - HALF), RUN), RUN)
        is_turned = (dim < ROTARY)[None, :]
        y = tl.load(rows + other[None, :], mask=inside & is_turned, other=0.0).to(tl.float32)
        c = tl.load(cos[:, None] + pair[None, :], mask=used[:, None] & is_turned).to(tl.float32)
        s = tl.load(sin[:, None] + pair[None, :], mask=used[:, None] & is_turned).to(tl.float32)
        return tl.where(is_turned, x * c + y * tl.where(is_first[None, :], -s, s), x)


@triton.constexpr_function
def run_of(number):
    """The largest power of 2 that divides a number, 16 at most: so many neighbours begin at a multiple of it."""
    return min(number & -number, 16)
