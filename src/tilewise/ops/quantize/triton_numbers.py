"""What a block's numbers become, on a GPU: sizes, scales and bytes. FUSED is where instructions are named one by one,
which the interpreter does not have.
"""

import triton
import triton.language as tl

from tilewise.tiles.codes import SMALLEST, codes_of

TF32 = tl.constexpr(-8192)  # the bits that tensor cores keep of float32
WHOLE_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b32 x, y; "
    "fma.rn.f32 a, $1, $5, 0f4B400000; fma.rn.f32 b, $2, $6, 0f4B400000; "  # 1.5 * 2 ** 23, whose last bit is 1
    "fma.rn.f32 c, $3, $7, 0f4B400000; fma.rn.f32 d, $4, $8, 0f4B400000; "
    "prmt.b32 x, a, b, 0x40; prmt.b32 y, c, d, 0x40; prmt.b32 $0, x, y, 0x5410; }"
)
MIDDLE_64 = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def size_of(x):
    """How large numbers are, what is no number infinitely."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit
def larger_bits(most, x, FUSED: tl.constexpr):
    """The larger of sizes and of numbers of 16 bits without their signs, as bits; those of no number are the largest"""
    if FUSED:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x7FFF7FFF; max.u16x2 $0, $0, $1;", "=&r,r,r", [most, x.to(tl.int16, bitcast=True)],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.maximum(most, x.to(tl.int16, bitcast=True) & 0x7FFF)


@triton.jit
def in_float32(x, FUSED: tl.constexpr):
    """x as float32; bfloat16 by one instruction for each, where LLVM takes three for two."""
    if FUSED and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def scale_of(largest, CODE: tl.constexpr, FUSED: tl.constexpr):
    """The scale of groups whose largest numbers become CODE: their quotient, rounded to nearest."""
    if FUSED:  # Markstein's correction of a product, which is right for all numbers and each CODE there is
        scale = largest * (1.0 / CODE)
        scale = tl.fma(tl.fma(-scale, CODE + tl.zeros_like(scale), largest), 1.0 / CODE + tl.zeros_like(scale), scale)
    else:
        scale = tl.div_rn(largest, tl.full(largest.shape, CODE, tl.float32))
    scale = tl.where(scale < SMALLEST, 0.0, scale)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def factor_of(largest, CODE: tl.constexpr):
    """What makes codes of the numbers of groups whose largest become CODE; 0 where their scale is 0 or NaN"""
    some = (largest >= CODE * SMALLEST) & (largest < float("inf"))
    return tl.div_rn(some.to(tl.float32) * CODE, tl.where(some, largest, 1.0))


@triton.jit
def nearest_whole(x, by, FUSED: tl.constexpr):
    """The whole numbers nearest to x * by, as bytes, -1 of what is no number; FUSED where the GPU rounds once."""
    if FUSED:
        return tl.inline_asm_elementwise(
            WHOLE_BYTES, "=r,f,f,f,f,f,f,f,f", [x, by + tl.zeros_like(x)], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        exact = x.to(tl.float64) * by.to(tl.float64)
        return tl.where(exact == exact, (exact + MIDDLE_64).to(tl.int64, bitcast=True), 255).to(tl.uint8)


@triton.jit
def bytes_of(x, by, ENCODING: tl.constexpr, CONVERTS: tl.constexpr, FUSED: tl.constexpr):
    """The bytes of the codes nearest to x * by; CONVERTS where the GPU makes FP8 of float32  # [ROWS, COLS], [ROWS]"""
    if ENCODING == "int8":
        return nearest_whole(x, by[:, None], FUSED)
    elif CONVERTS:
        return (x * by[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        x *= by[:, None]
        return tl.where(x == x, codes_of(x, (by > 0).to(tl.float32), "fp8"), 0x7F).to(tl.uint8)


@triton.jit
def rotated_means(mean, turn, before, STEP: tl.constexpr):
    """`before` and the rotation of some columns' means, in three parts that tensor cores of 10 bits take as they are
    # [16, COLS]
    """
    high = (mean.to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
    middle = ((mean - high).to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
    part = tl.arange(0, 16)[:, None]
    parts = tl.where(part == 0, high[None, :], tl.where(part == 1, middle[None, :], (mean - high - middle)[None, :]))
    return tl.dot(tl.where(part < 3, parts, 0.0), turn.to(tl.float32), before, input_precision="tf32")
