"""Sums of a block's rows, as they are and as rows of length 1, for the pass that makes their codes."""

import triton
import triton.language as tl


@triton.jit
def sums_of_rows(given, x):
    """(sum, sum of rows of length 1) of rows, `x` being `given` in float32  # [ROWS, COLS]; [COLS]

    Rows in bfloat16 are added up by a product with ones and with what makes their length 1, in three parts that
    together are float32: adding columns across threads would take as many instructions as making codes does.
    """
    one, other = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
    square = tl.sum(tl.fma(one, one, other * other), 1)
    inverse = tl.where(square == 0.0, 0.0, 1.0 / tl.sqrt_rn(square))
    if given.dtype == tl.bfloat16:
        part = tl.arange(0, 16)[:, None]
        given_part = tl.where(part == 0, 1.0, inverse[None, :])
        high = given_part.to(tl.bfloat16).to(tl.float32)
        middle = (given_part - high).to(tl.bfloat16).to(tl.float32)
        of_three = tl.where(part == 2, middle, given_part - high - middle)
        parts = tl.where(part < 2, high, tl.where(part < 4, of_three, 0.0)).to(tl.bfloat16)
        sums = tl.dot(parts, given)
        found = tl.sum(tl.where(part == 0, sums, 0.0), 0), tl.sum(tl.where(part == 0, 0.0, sums), 0)
    else:
        found = tl.sum(x, 0), tl.sum(x * inverse[:, None], 0)
    return found
