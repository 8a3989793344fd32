"""The facts of one call that takes queries' largest dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """The `rank` dimensions along which queries that share a head of keys are largest, by the sums of their sizes, and
    their numbers there (Ribar et al., "SparQ Attention"). Implementations read this and nothing else.

    `q` is (rows, num_heads_q, dim), `heads` is num_heads_kv. Numbers come times `scale` and times the square root of
    what a query's sizes sum to, over what those do that are taken, which makes up for the others. Of equal sums the
    first dimensions are taken; a sum that is no finite number is the largest.
    """

    q: torch.Tensor
    heads: int
    rank: int
    scale: float

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.heads


def results(call: Call) -> Tensors:
    """Empty ones: dims int32 (rows, num_heads_kv, rank), ascending, and parts float32 (rows, num_heads_kv, group,
    rank).
    """
    lead, device = (call.q.shape[0], call.heads), call.q.device
    return {
        "dims": torch.empty((*lead, call.rank), dtype=torch.int32, device=device),
        "parts": torch.empty((*lead, call.group, call.rank), dtype=torch.float32, device=device),
    }


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: which tokens are read has no gradient."""
    return {}
