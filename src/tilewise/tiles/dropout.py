"""Dropout's random bits on the device: the counters of `core.philox`."""

import triton
import triton.language as tl


@triton.jit
def keep_tile(seed, row, offs_i, start_j, dropout, BLOCK_J: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Which scores survive: bool [BLOCK_I, BLOCK_J], or [BLOCK_J, BLOCK_I] when KEYS_FIRST. start_j is a multiple of
    4.
    """
    NARROW: tl.constexpr = BLOCK_J < 32 or offs_i.shape[0] < 32
    if NARROW:
        words = _words_alone(seed, row, offs_i, start_j, BLOCK_J, KEYS_FIRST)
    else:
        words = _words_together(seed, row, offs_i, start_j, BLOCK_J, KEYS_FIRST)
    return words >= tl.minimum(dropout * 4294967296.0, 4294967040.0).to(tl.uint32)


@triton.jit
def _words_alone(seed, row, offs_i, start_j, BLOCK_J: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Each score draws four words and takes its own. Of a join, Triton's compiler makes operands of tensor cores that
    are wider than 16 rows of a product's inner dimension, and wrong numbers with it.
    """
    j = start_j + tl.arange(0, BLOCK_J)
    if KEYS_FIRST:
        c0, c1 = (j // 4)[:, None] + offs_i[None, :] * 0, offs_i[None, :] + j[:, None] * 0
        place = (j % 4)[:, None]
    else:
        c0, c1 = (j // 4)[None, :] + offs_i[:, None] * 0, offs_i[:, None] + j[None, :] * 0
        place = (j % 4)[None, :]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, row + c0 * 0, c0 * 0)
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def _words_together(seed, row, offs_i, start_j, BLOCK_J: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Four scores share what they draw."""
    groups = start_j // 4 + tl.arange(0, BLOCK_J // 4)
    if KEYS_FIRST:
        c0 = groups[:, None] + offs_i[None, :] * 0
        c1 = offs_i[None, :] + groups[:, None] * 0
    else:
        c0 = groups[None, :] + offs_i[:, None] * 0
        c1 = offs_i[:, None] + groups[None, :] * 0
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, row + c0 * 0, c0 * 0)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., .., 2, 2]: word 2x + y at [x, y]
    if KEYS_FIRST:
        return words.permute(0, 2, 3, 1).reshape(BLOCK_J, offs_i.shape[0])
    else:
        return words.reshape(offs_i.shape[0], BLOCK_J)
