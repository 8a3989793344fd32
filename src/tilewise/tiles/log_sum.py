"""Sums of exponentials, by their logarithms."""

import triton
import triton.language as tl

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def log_sum(x, AXIS: tl.constexpr):
    """The logarithm of the sum of exponentials along the last axis, AXIS, of numbers below 2**127, -inf if all are."""
    top = tl.max(x, AXIS)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0) * LOG2E  # in base 2: an exponential is two instructions
    return (top + tl.log2(tl.sum(tl.exp2(x * LOG2E - tl.expand_dims(top, AXIS)), AXIS))) * LN2
