"""Sums of a block's rows, as they are and as rows of length 1, for the pass that makes their codes."""

import triton
import triton.language as tl

from tilewise.schedule.selection import SHORTEST

NORMAL = tl.constexpr(SHORTEST**2)


@triton.jit
def store_sums(SUM, UNIT_SUM, cell, given, x, d, DIM: tl.constexpr):
    """Store a cell's sum of rows, and that of them as rows of length 1; `x` is `given` in float32  # [ROWS, COLS]

    Rows in bfloat16 are added up by a product with ones and with what makes their length 1, in two parts of 16 bits and
    more together: adding columns across threads would take as many instructions as making codes does. Row 0 of the
    product is the first sum, rows 1 and 9, which one thread has, are the second.
    """
    one, other = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
    square = tl.sum(tl.fma(one, one, other * other), 1)
    inverse = tl.where(square < NORMAL, 0.0, tl.math.rsqrt(square))
    if given.dtype == tl.bfloat16:
        part = tl.arange(0, 16)[:, None]
        high = tl.where(part == 0, 1.0, inverse[None, :]).to(tl.bfloat16)
        rest = (inverse[None, :] - high.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(tl.where(part < 2, high, tl.where(part == 9, rest, 0.0)), given)
        sums = tl.sum(sums.reshape(2, 8, x.shape[1]), 0)
        row = tl.arange(0, 8)[:, None]
        at, inside = cell * DIM + d[None, :] + row * 0, d[None, :] < DIM
        tl.store(SUM + at, sums, mask=inside & (row == 0))
        tl.store(UNIT_SUM + at, sums, mask=inside & (row == 1))
    else:
        at, inside = cell * DIM + d, d < DIM
        tl.store(SUM + at, tl.sum(x, 0), mask=inside)
        tl.store(UNIT_SUM + at, tl.sum(x * inverse[:, None], 0), mask=inside)
