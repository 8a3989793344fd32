"""Weights of `gluon_sm90_codes` as `gluon_sm90_weight_codes` has them, of integer scores, two an instruction.

Of each score bits 8 to 23 are kept, two in a register: the larger of pairs, what they lie above a row's zero, and the
line from there to codes are an instruction each, where scores by themselves are made floats first. What lies above zero
is less than 2048, whose bits are a half of 2 ** -24 times that.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.ops.attention.gluon_sm90_weight_codes import CENTRE, larger, largest_of

UNIT = 256.0  # integers to one that is kept
MOST_CODES = 1.0  # to a unit: beyond, what is dropped of scores is more than codes are rounded by
LEAST_CODES = 126.1 / 2047.0  # else a row's zero would be too far below its largest
OF_UNIT = gl.constexpr(UNIT)
OF_CODES = gl.constexpr(8.0 * UNIT)  # codes to a unit of scores, by what one of these is worth
MOST = gl.constexpr(MOST_CODES)
LEAST = gl.constexpr(LEAST_CODES)
BELOW_ONE = gl.constexpr((8.0 * 7.0 - CENTRE) / 8.0)  # exponents from a code of 0 to a weight of 1
FIRST = gl.constexpr(-16384.0)
LAST = gl.constexpr(16383.0)  # a zero that no score reaches
AMONG_FLOATS = gl.constexpr(1.5 * 2.0**23)  # the float whose bits, and a small integer, are those of their sum
AMONG_HALVES = gl.constexpr(2.0**12)  # from 2 ** -24 to the last bit of a quarter
_KEPT = "prmt.b32 $0, $1, $2, 0x6521;"  # bytes 1 and 2 of both
_LARGER = "max.s16x2 $0, $1, $2;"
_LARGEST = (
    "{ .reg .b32 a; .reg .b16 x, y; "
    "prmt.b32 a, $1, 0, 0x1032; max.s16x2 a, a, $1; mov.b32 {x, y}, a; cvt.s32.s16 $0, x; }"
)
_RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"
_TWICE = "prmt.b32 $0, $1, 0, 0x1010;"
_HALVES = "cvt.rn.f16x2.f32 $0, $1, $1;"
_CODES = (
    "{ .reg .b32 none, quarter; mov.b32 none, 0; mov.b32 quarter, 0x34003400; "
    "add.s16x2 $0, $1, $2; max.s16x2 $0, $0, none; fma.rn.f16x2 $0, $0, $3, quarter; }"
)
KEPT, LARGER, LARGEST = gl.constexpr(_KEPT), gl.constexpr(_LARGER), gl.constexpr(_LARGEST)
RECIPROCAL, TWICE = gl.constexpr(_RECIPROCAL), gl.constexpr(_TWICE)
HALVES, CODES = gl.constexpr(_HALVES), gl.constexpr(_CODES)


@gluon.constexpr_function
def _codes(shift):
    """From a row's zero to its largest, where a weight of 2 ** shift is at most the largest code."""
    return math.floor(8.0 * (shift + 7.0) - CENTRE)


@gluon.jit
def _each(ASM: gl.constexpr, PLACES: gl.constexpr, x):
    """An instruction for each number of tensors, whose result is an int32."""
    return gl.inline_asm_elementwise(ASM, PLACES, x, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def are_near(of_rows, of_keys, ALIKE: gl.constexpr):
    """Whether a tile's scores have weights by `weights_of_kept`. `of_rows` are the least and the largest of the rows'
    scales, `of_keys` those of the keys, or where they are ALIKE a number; their product is exponents an integer.
    """
    least, most = of_rows
    if ALIKE:
        least, most = least * of_keys, most * of_keys
    else:
        least, most = least * gl.min(of_keys, 0), most * gl.max(of_keys, 0)
    return (least * OF_CODES >= LEAST) & (most * OF_CODES <= MOST)


@gluon.jit
def kept(s):
    """Of integers [64, N] bits 8 to 23, two in an int32: [64, N / 8, 4]."""
    a, b = gl.split(s.reshape([64, s.shape[1] // 8, 4, 2]))
    return _each(KEPT, "=r,r,r", [a, b])


@gluon.jit
def larger_pair(a, b):
    """The larger of each of two."""
    return gl.inline_asm_elementwise(LARGER, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def largest_kept(x):
    """[64, 4]: the largest that each thread of a quad has kept of a row, in float32, found in four chains."""
    pairs = x.reshape([64, 4, x.shape[1] // 4, 4])
    pair = gl.reduce(gl.reduce(pairs, 1, larger_pair), 1, larger_pair)
    return _each(LARGEST, "=r,r", [pair]).to(gl.float32)


@gluon.jit
def weights_of_kept(x, factor, level, most, fall, shift: gl.constexpr, ALIKE: gl.constexpr):
    """`gluon_sm90_codes.weights_of`, of what is `kept` of scores, which are `factor` exponents each: [64, 4], or a
    number where all are ALIKE.

    What is kept stands for the middle of what it was kept of. A row's zero is a whole number, and the line from there
    is tilted so that its largest has a code without rounding, as `shift` leaves room for.
    """
    unit, slope = factor * OF_UNIT, factor * OF_CODES
    units = gl.inline_asm_elementwise(RECIPROCAL, "=f,f", [unit], dtype=gl.float32, is_pure=True, pack=1)
    SPAN: gl.constexpr = _codes(shift) / 8.0  # exponents
    BEYOND: gl.constexpr = shift + BELOW_ONE - SPAN
    raw = gl.convert_layout(largest_kept(x), level.type.layout.parent, assert_trivial=True)
    if ALIKE:
        top = gl.max(raw, 1)
        most = larger(most, (top + 0.5) * unit)
        apart = AMONG_FLOATS + SPAN * units - AMONG_FLOATS  # as a whole number
        zero = gl.minimum(gl.maximum(top, (most - fall) * units) - apart, LAST)
        bits = AMONG_FLOATS - zero
        here = larger((AMONG_FLOATS - bits + apart) * unit + (0.5 * unit + BEYOND), most - fall)
        tilt = apart - SPAN * units
    else:
        largest = largest_of((raw + 0.5) * unit, 1)
        most = larger(most, largest)
        here = larger(largest + BEYOND, most - fall)
        zero = gl.minimum(gl.maximum((here - (shift + BELOW_ONE))[:, None] * units - 0.5, FIRST), LAST)
        bits = AMONG_FLOATS - zero
        tilt = zero - (AMONG_FLOATS - bits)
    before = gl.exp2(level - here)
    minus = _each(TWICE, "=r,r", [bits.to(gl.int32, bitcast=True)])
    steps = _each(HALVES, "=r,f", [(slope - tilt * slope * slope * (0.125 / SPAN)) * AMONG_HALVES])
    OF_PAIRS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if ALIKE:
        minus = minus[:, None] + gl.zeros_like(raw.to(gl.int32))
    else:
        steps = gl.convert_layout(steps, OF_PAIRS, assert_trivial=True)[:, None]
    minus = gl.convert_layout(minus, OF_PAIRS, assert_trivial=True)[:, None] + gl.zeros_like(x)
    w = _each(CODES, "=&r,r,r,r", [x, minus, steps + gl.zeros_like(x)])
    return w, here, most, before
