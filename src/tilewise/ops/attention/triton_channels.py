"""Keys by channel (`tilewise.quant.ByChannel`) for `triton_paged`: codes of full pages, and open pages as they are.

A page's scales vary along the sum of a product, so they are applied to keys, not to scores. A tile takes both kinds of
page without a branch: what a token does not have is not read, by a mask.
"""

import triton
import triton.language as tl

from tilewise.ops.attention.problem import Call
from tilewise.tiles.arithmetic import decoded
from tilewise.tiles.codes import keys_of_codes, load_codes


@triton.jit
def load_by_channel(K, SCALES, k_rows, pages, offsets, in_k, hk, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                    BITS: tl.constexpr, ONE_PAGE: tl.constexpr):  # fmt: skip
    """(codes, scales, least numbers, keys that are open, who is) of a tile's tokens. SCALES go on, behind 8, with least
    numbers, open pages, places, the strides of the former (page, head) and the latter (page, token, head).
    """
    place = tl.load(SCALES[10] + pages)
    is_open = in_k & (place >= 0)  # [BLOCK_N]
    in_d = offs_d < HEAD_DIM
    codes = load_codes(K, k_rows, in_k & (place < 0), HEAD_DIM, BLOCK_D, None, BITS)
    rows = place.to(tl.int64) * decoded(SCALES[13]) + offsets * decoded(SCALES[14]) + hk * decoded(SCALES[15])
    opened = tl.load(SCALES[9] + rows[:, None] + offs_d[None, :], mask=is_open[:, None] & in_d[None, :], other=0.0)
    page = pages.to(tl.int64)
    scale_at = page * decoded(SCALES[2]) + hk * decoded(SCALES[3])
    least_at = page * decoded(SCALES[11]) + hk * decoded(SCALES[12])
    if ONE_PAGE:  # [1, BLOCK_D], else [BLOCK_N, BLOCK_D]
        coded = in_d[None, :] & (place < 0)
        scale = tl.load(SCALES[0] + scale_at + offs_d[None, :], mask=coded, other=0.0)
        least = tl.load(SCALES[8] + least_at + offs_d[None, :], mask=coded, other=0.0)
    else:
        coded = (in_k & (place < 0))[:, None] & in_d[None, :]
        scale = tl.load(SCALES[0] + scale_at[:, None] + offs_d[None, :], mask=coded, other=0.0)
        least = tl.load(SCALES[8] + least_at[:, None] + offs_d[None, :], mask=coded, other=0.0)
    return codes, scale, least, opened, is_open


@triton.jit
def keys_by_channel(loaded, BITS: tl.constexpr):
    """The keys of such a tile, float32  # [BLOCK_N, BLOCK_D]"""
    codes, scale, least, opened, is_open = loaded
    return tl.where(is_open[:, None], opened.to(tl.float32), keys_of_codes(codes, scale, least, BITS))


def bits_by_channel(call: Call) -> int:
    """Bits of a code of keys by channel; 0 of all other calls."""
    return 8 * call.k.shape[3] // call.head_dim if call.keys_by_channel else 0
