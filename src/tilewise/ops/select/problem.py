"""The facts of one call that takes tiles of keys for tiles of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
LONGEST = 16384  # tiles of keys that a row of scores may have: kernels hold it in registers
SLACK = 1.0 - 2.0**-20  # of a share: 0.3 of 10 tiles are 3, although the float32 next to 0.3 is larger


@dataclass(eq=False, slots=True)
class Call:
    """For each tile of queries, a row, tiles of keys by a prediction. Implementations read this and nothing else.

    `scores` (batch, heads, tiles_q, tiles_k) are of pairs of tiles, float32 (float64 for the reference); `classes`
    int8 (1 or batch, 1 or heads, tiles_q, tiles_k) those that the mask gives them (`schedule.tilemap`). `similar_q`
    (batch, heads, tiles_q) and `similar_k` (batch, kv heads, tiles_k) are self-similarities, float32. `least` is how
    alike, and `amount` how much, for each head, float32 (heads,): of a row's weights with `kind` "mass", of its tiles
    "count", of its visible tiles "share", or the least weight of a tile "weight".
    """

    scores: torch.Tensor
    classes: torch.Tensor
    similar_q: torch.Tensor | None
    similar_k: torch.Tensor | None
    least: torch.Tensor
    amount: torch.Tensor
    kind: str

    @property
    def group(self) -> int:
        """Heads of scores for each head of keys."""
        return 1 if self.similar_k is None else self.scores.shape[1] // self.similar_k.shape[1]


def results(call: Call) -> Tensors:
    """An empty `kept`."""
    return {"kept": torch.empty(call.scores.shape, dtype=torch.bool, device=call.scores.device)}


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: which tiles are taken has no gradient."""
    return {}
