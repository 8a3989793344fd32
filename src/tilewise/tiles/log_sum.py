"""Sums of exponentials, by their logarithms."""

import triton
import triton.language as tl


@triton.jit
def log_sum(x, AXIS: tl.constexpr):
    """The logarithm of the sum of exponentials along the last axis, AXIS, -inf where all are."""
    top = tl.max(x, AXIS)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    return top + tl.log(tl.sum(tl.exp(x - tl.expand_dims(top, AXIS)), AXIS))
