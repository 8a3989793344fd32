"""Weights of `gluon_sm90_codes` as FP8 codes, straight from their exponents: no exponential is taken.

A positive float's bits, as a whole number, are the logarithm of what it stands for, but for a line in place of a curve
between powers of two (Schraudolph, "A Fast, Compact Approximation of the Exponential Function", 1999). With three bits
behind the point that line is off by hardly more than the rounding is, and is centred so that it is right on average.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.hopper import of_threads, parts_of

EVERY_NAN = gl.constexpr(tl.PropagateNan.ALL)
CENTRE = 0.4566  # of a code: what the line lies above 2 ** x, on average over x in one power of two
LARGEST_CODE = 126.0  # of 448
OF_A_CODE = gl.constexpr(8.0 / LARGEST_CODE)  # what an exponent is worth in the largest code
OF_ONE = gl.constexpr((8.0 * 7.0 - CENTRE) / LARGEST_CODE)  # a weight of 1
_CODES = (
    "{ .reg .f32 a, b; .reg .b32 most, point; "
    "fma.rn.sat.f32 a, $1, $3, $4; fma.rn.sat.f32 b, $2, $3, $4; cvt.rn.f16x2.f32 $0, b, a; "
    "mov.b32 most, 0x3BE03BE0; mov.b32 point, 0x4A004A00; "  # 126 / 128; 12, whose last bit is 1 / 128
    "fma.rn.f16x2 $0, $0, most, point; }"
)
CODES = gl.constexpr(_CODES)


@gluon.jit
def larger(a, b):
    """The larger of two, NaN where one is."""
    return gl.maximum(a, b, propagate_nan=EVERY_NAN)


@gluon.jit
def largest_of(x, AXIS: gl.constexpr):
    """The largest along an axis, NaN where one is."""
    return gl.reduce(x, AXIS, larger)


@gluon.jit
def largest_of_thread(s):
    """`tiles.hopper.thread_max`, but NaN where one is."""
    parts = s.reshape([64, s.shape[1] // 32, 4, 4, 2])
    largest = largest_of(largest_of(largest_of(parts, 1), 3), 1)
    return gl.convert_layout(largest, of_threads(parts_of(s)), assert_trivial=True)


@gluon.jit
def codes_of_exponents(x, factor, offset):
    """The codes of 2 ** (x * factor + offset), x [64, N / 8, 4, 2], the others [64, 4]: two in an int32 [64, N / 8, 4],
    each in the low byte of a half. Below 2 ** -7 they are 0, above 448 that of 448; NaN becomes 0.
    """
    a, b = gl.split(x)
    OF_PAIRS: gl.constexpr = gl.SliceLayout(1, a.type.layout)
    none = gl.zeros_like(a)
    step = gl.convert_layout(factor * OF_A_CODE, OF_PAIRS, assert_trivial=True)[:, None] + none
    start = gl.convert_layout(offset * OF_A_CODE + OF_ONE, OF_PAIRS, assert_trivial=True)[:, None] + none
    return gl.inline_asm_elementwise(CODES, "=&r,f,f,f,f", [a, b, step, start], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def packed_codes(codes):
    """`codes_of_exponents`, four of a thread in an int32 [64, N / 16, 4], as `packed_weights` has them."""
    pairs = gl.permute(codes.reshape([64, codes.shape[1] // 2, 2, 4]), (0, 1, 3, 2))
    a, b = gl.split(pairs)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )
