"""The facts of one call that scores pairs of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """Tiles of queries and keys, each of which is some blocks of rows whose sums are known. Implementations read this
    and nothing else.

    `q_sums` (batch, heads, blocks, dim) and `k_sums` (batch, kv heads, blocks, dim) are sums of rows, `q_units` and
    `k_units` of these as long as 1, or None where nobody asks how alike rows are; float32, contiguous. A sequence has
    `rows` queries and keys, a tile `block` of them, which are so many blocks, `each`; the last tile and the last block
    have what is left. A pair's score is the product of the means of its rows, times `scale`.
    """

    q_sums: torch.Tensor
    k_sums: torch.Tensor
    q_units: torch.Tensor | None
    k_units: torch.Tensor | None
    rows: tuple[int, int]
    block: tuple[int, int]
    each: tuple[int, int]
    scale: float

    @property
    def tiles(self) -> tuple[int, int]:
        """Of queries, and of keys."""
        return -(-self.rows[0] // self.block[0]), -(-self.rows[1] // self.block[1])


def results(call: Call) -> Tensors:
    """Empty ones, by name: scores (batch, heads, tiles_q, tiles_k), and where rows are compared `similar_q` (batch,
    heads, tiles_q) and `similar_k` (batch, kv heads, tiles_k), the mean of all cosines of a tile's rows.
    """
    (batch, heads), heads_kv = call.q_sums.shape[:2], call.k_sums.shape[1]
    shapes: dict[str, tuple[int, ...]] = {"scores": (batch, heads, *call.tiles)}
    if call.q_units is not None:
        shapes |= {"similar_q": (batch, heads, call.tiles[0]), "similar_k": (batch, heads_kv, call.tiles[1])}
    return {name: call.q_sums.new_empty(shape) for name, shape in shapes.items()}


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: codes have no gradient."""
    return {}


def scores_of_means(of_q: torch.Tensor, of_k: torch.Tensor, scale: float) -> torch.Tensor:
    """(batch, heads, tiles_q, tiles_k): products of means of queries (batch, heads, tiles_q, dim) and of keys (batch,
    kv heads, tiles_k, dim), times `scale`.
    """
    (batch, heads_kv), dim = of_k.shape[:2], of_k.shape[-1]
    grouped = of_q.reshape(batch * heads_kv, of_q.shape[1] // heads_kv * of_q.shape[2], dim)
    with torch.autocast(of_q.device.type, enabled=False):
        nothing = grouped.new_empty((1, 1, 1))  # times 0, which makes the factor part of the product
        s = torch.baddbmm(nothing, grouped, of_k.flatten(0, 1).transpose(-1, -2), beta=0, alpha=scale)
    return s.view(*of_q.shape[:3], of_k.shape[2])
