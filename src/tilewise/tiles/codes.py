"""Codes of keys and values (`tilewise.quant`) in a kernel: bytes to numbers, and numbers to bytes and scales.

Conversions are arithmetic on bits: it runs on every GPU, while instructions that convert small types are few or slow.
"""

import triton
import triton.language as tl

WHOLE = tl.constexpr(0x4B000000)  # the bits of 2**23, whose float32 neighbours are 1 apart
MIDDLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, to even where two are as near
SMALLEST = tl.constexpr(2.0**-126)  # a scale


@triton.constexpr_function
def in_byte(encoding, bits):
    """Numbers of a byte: of keys by channel, where there are bits, or else of an encoding."""
    return 8 // bits if bits else 2 if encoding == "int4" else 1


@triton.jit
def columns_of_codes(columns, DIM: tl.constexpr, ENCODING: tl.constexpr, BITS: tl.constexpr = 0):
    """The dimension that each column of a tile of `numbers_of` or `keys_of_codes` holds, DIM for none: the parts of a
    row that share bytes take turns.
    """
    PARTS: tl.constexpr = in_byte(ENCODING, BITS)
    if PARTS > 1:
        return tl.where(columns < DIM, columns % PARTS * (DIM // PARTS) + columns // PARTS, DIM)
    else:
        return columns


@triton.jit
def load_codes(
    X, rows, in_rows, DIM: tl.constexpr, BLOCK: tl.constexpr, ENCODING: tl.constexpr, BITS: tl.constexpr = 0
):  # fmt: skip
    """The bytes of some rows  # [ROWS, BLOCK], of int4 half as many, of keys by channel BITS / 8"""
    IN_BYTE: tl.constexpr = in_byte(ENCODING, BITS)
    offs = tl.arange(0, BLOCK // IN_BYTE)
    inside = in_rows[:, None] & (offs < DIM // IN_BYTE)[None, :]
    return tl.load(X + rows[:, None] + offs[None, :], mask=inside, other=0)


@triton.jit
def numbers_of(codes, ENCODING: tl.constexpr):
    """What bytes stand for, float32  # [ROWS, BLOCK]"""
    ROWS: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    if ENCODING == "int4":
        codes = codes.to(tl.int32)
        return tl.join(whole(codes & 15, 8), whole(codes >> 4, 8)).reshape(ROWS, 2 * BYTES)
    else:  # as pairs: rearranged for the product are then numbers, not bytes one by one
        even, odd = tl.split(codes.reshape(ROWS, BYTES // 2, 2))
        return tl.join(number_of_byte(even, ENCODING), number_of_byte(odd, ENCODING)).reshape(ROWS, BYTES)


@triton.jit
def keys_of_codes(codes, scale, least, BITS: tl.constexpr):
    """The keys that bytes by channel stand for, float32; scale and least of each, or of all rows  # [ROWS, COLS]"""
    ROWS: tl.constexpr = codes.shape[0]
    COLS: tl.constexpr = codes.shape[1] * 8 // BITS
    codes = codes.to(tl.int32)
    if BITS == 4:
        numbers = tl.join(whole(codes & 15, 0), whole(codes >> 4, 0))
    else:
        even = tl.join(whole(codes & 3, 0), whole((codes >> 4) & 3, 0))
        odd = tl.join(whole((codes >> 2) & 3, 0), whole(codes >> 6, 0))
        numbers = tl.join(even, odd)
    return numbers.reshape(ROWS, COLS) * scale.to(tl.float32) + least.to(tl.float32)


@triton.jit
def number_of_byte(code, ENCODING: tl.constexpr):
    code = code.to(tl.int32)
    if ENCODING == "int8":
        return whole(code ^ 128, 128)
    else:
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * 2.0**120  # exponents of float32 begin 120 lower


@triton.jit
def whole(number, offset: tl.constexpr):
    """number - offset as float32, for 0 <= number < 2**23."""
    return (number | WHOLE).to(tl.float32, bitcast=True) - (8388608.0 + offset)


@triton.jit
def scales_of(x, y, ENCODING: tl.constexpr):
    """The scale of each row of x and y  # [ROWS]"""
    LARGEST: tl.constexpr = 127.0 if ENCODING == "int8" else 448.0 if ENCODING == "fp8" else 7.0
    largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(scale < SMALLEST, 0.0, scale)
    infinite = tl.max((~(tl.abs(x) < float("inf")) | ~(tl.abs(y) < float("inf"))).to(tl.int32), 1)
    return tl.where(infinite > 0, float("nan"), scale)


@triton.jit
def codes_of(x, scale, ENCODING: tl.constexpr):
    """The code of each number, int32: a byte of it, of int4 4 bits  # [ROWS, COLS]"""
    some = scale > 0  # neither 0 nor NaN
    x = tl.where(some[:, None], x, 0.0)
    x = tl.div_rn(x, tl.where(some, scale, 1.0)[:, None] + tl.zeros_like(x))
    if ENCODING == "fp8":
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = (tl.abs(x) * 512.0 + MIDDLE).to(tl.int32, bitcast=True) & 15
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
        code = tl.where(tl.abs(x) < 0.015625, subnormal, normal) | sign
    elif ENCODING == "int8":
        code = (x + MIDDLE).to(tl.int32, bitcast=True) & 255
    else:
        code = (x + (MIDDLE + 8.0)).to(tl.int32, bitcast=True) & 15
    return code


@triton.jit
def spans_of(x, inside, BITS: tl.constexpr):
    """(steps between codes, least numbers) of the columns of x, of rows that are `inside`  # [COLS]"""
    low = tl.min(tl.where(inside[:, None], x, float("inf")), 0)
    span = tl.max(tl.where(inside[:, None], x, float("-inf")), 0) - low
    step = tl.div_rn(span, tl.full(span.shape, 2**BITS - 1.0, tl.float32))
    step = tl.where(step < SMALLEST, 0.0, step)
    infinite = tl.max((inside[:, None] & ~(tl.abs(x) < float("inf"))).to(tl.int32), 0)
    finite = (infinite == 0) & (span < float("inf"))
    return tl.where(finite, step, float("nan")), tl.where(finite, low, float("nan")) + 0.0  # not -0.0


@triton.jit
def codes_by_channel(x, step, least, BITS: tl.constexpr):
    """The code of each number, int32  # [ROWS, COLS]"""
    some = step > 0  # neither 0 nor NaN
    x = tl.where(some[None, :], x - least[None, :], 0.0)
    x = tl.div_rn(x, tl.where(some, step, 1.0)[None, :] + tl.zeros_like(x))
    x = tl.minimum(tl.maximum(x, 0.0), 2**BITS - 1.0)
    return (x + MIDDLE).to(tl.int32, bitcast=True) & (2**BITS - 1)
