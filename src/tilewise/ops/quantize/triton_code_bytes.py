"""The scale of a group of numbers, and the bytes of the codes nearest to them."""

import triton
import triton.language as tl

from tilewise.tiles.codes import MIDDLE, SMALLEST, codes_of


@triton.jit
def scale_of(largest, CODE: tl.constexpr):
    """The scale of groups whose largest numbers become CODE"""
    scale = tl.div_rn(largest, tl.full(largest.shape, CODE, tl.float32))
    scale = tl.where(scale < SMALLEST, 0.0, scale)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def bytes_of(x, scale, ENCODING: tl.constexpr, CONVERTS: tl.constexpr):
    """The bytes of the codes nearest to x; CONVERTS where the GPU makes FP8 of float32  # [ROWS, COLS], [ROWS]"""
    some = scale > 0  # neither 0 nor NaN
    by = tl.div_rn(some.to(tl.float32), tl.where(some, scale, 1.0))
    x = tl.where(some[:, None], x, 0.0) * by[:, None]
    if ENCODING == "int8":
        return (x + MIDDLE).to(tl.int32, bitcast=True).to(tl.uint8)
    elif CONVERTS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return codes_of(x, some.to(tl.float32), "fp8").to(tl.uint8)
