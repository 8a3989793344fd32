"""Scores of pairs of tiles, of means, or out of sums of rows that were made beside their codes (`table.TILE_SCORES`),
which says how alike a tile's rows are, too.
"""

from __future__ import annotations

import torch


def scores_of_means(of_q: torch.Tensor, of_k: torch.Tensor, scale: float) -> torch.Tensor:
    """(batch, heads, tiles_q, tiles_k): products of means of queries (batch, heads, tiles_q, dim) and of keys (batch,
    kv heads, tiles_k, dim), times `scale`.
    """
    (batch, heads_kv), dim = of_k.shape[:2], of_k.shape[-1]
    grouped = of_q.reshape(batch * heads_kv, -1, dim)
    with torch.autocast(of_q.device.type, enabled=False):
        nothing = grouped.new_empty((1, 1, 1))  # times 0, which makes the factor part of the product
        s = torch.baddbmm(nothing, grouped, of_k.flatten(0, 1).transpose(-1, -2), beta=0, alpha=scale)
    return s.view(*of_q.shape[:3], of_k.shape[2])
