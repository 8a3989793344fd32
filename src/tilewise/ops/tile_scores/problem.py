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
