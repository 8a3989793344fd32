"""What tiles of rows have in common: their mean, how alike they are, how far they spread."""

from __future__ import annotations

import torch

from tilewise.ops.tile_means.problem import make_call
from tilewise.ops.tile_means.table import TILE_MEANS


def tile_means(
    x: torch.Tensor,
    block: int,
    *,
    cu_seqlens: torch.Tensor | None = None,
    similarity: bool = False,
    variance: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """The mean of each tile of `block` rows of each head, in one reading.

    Args:
        x: (batch, seqlen, heads, dim), or with `cu_seqlens` (total, heads, dim); float16, bfloat16, float32 or float64,
            unit stride in dim. A sequence's last tile has the rows that are left.
        block: rows of a tile.
        cu_seqlens: int32 (batch + 1,) of packed sequences. Sequence b's tiles stand in slots from
            cu_seqlens[b] // block + b on; slots that no tile has hold 0.
        similarity: also how alike a tile's rows are: the mean of all their cosines, itself the squared length of the
            mean of rows of length 1 (Zhang et al., "SpargeAttention", 2025). A row shorter than 2**-63 has no
            direction, and counts as zeros.
        variance: also the mean squared distance from the mean, in each dimension.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        mean (batch, heads, tiles, dim), packed (heads, slots, dim), and as asked similarity (..., tiles) and variance
        like mean; float32, float64 for float64. Mean and variance are differentiable, again and again; similarity
        is not.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
    """
    return TILE_MEANS(make_call(x, block, cu_seqlens, similarity, variance), impl)
