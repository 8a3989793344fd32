"""The largest of some keys, bit by bit."""

import triton
import triton.language as tl


@triton.jit
def least_of(key, there, width):
    """The largest integer at and above which there are `width` of the keys that are there, 0 where there are fewer: the
    least of those that are among the `width` largest. Keys are integers without sign.
    """
    last = tl.full([], 0, tl.uint32)
    bit = 32
    while bit > 0:
        bit -= 1
        higher = last | (tl.full([], 1, tl.uint32) << bit)
        last = tl.where(tl.sum((there & (key >= higher)).to(tl.int32), 0) >= width, higher, last)
    return last
