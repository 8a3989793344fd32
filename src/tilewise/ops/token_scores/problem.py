"""The facts of one call that predicts scores of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
OF_SAMPLE = 32  # tokens one of which a sample has
PLACE = 13  # an odd number: of run m the sample has token m * PLACE % OF_SAMPLE


@dataclass(eq=False, slots=True)
class Call:
    """The products of queries with all keys of their request over a few dimensions. Implementations read this and
    nothing else.

    `q` is float32 (rows, num_heads_kv, group, rank), what of queries is multiplied, scale included, and `dims` int32
    (rows, num_heads_kv, rank) says by which dimensions of keys; row t is of request `request[t]`, int32, or t where
    that is None, and sees its first `lengths[t]` tokens, int32. Keys are `columns`, `least` and `largest` as
    `layouts.PageSummaries` has them, and `table` is int32 (batch, max_pages).
    """

    q: torch.Tensor
    dims: torch.Tensor
    columns: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor
    table: torch.Tensor
    request: torch.Tensor | None
    lengths: torch.Tensor
    page_size: int

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.columns.shape[-1] * 8 // self.page_size

    @property
    def runs(self) -> int:
        """Of tokens that columns hold side by side, in all pages of a request."""
        return self.table.shape[1] * 8 // self.bits


def results(call: Call) -> Tensors:
    """Empty ones: scores float32 (rows, num_heads_kv, group, tokens), tokens those of max_pages pages; total, their
    sums over a group, likewise (rows, num_heads_kv, tokens), without tokens where a group is one query, whose score it
    is (`total_of`); lse, float32 (rows, num_heads_kv, group, runs), the log-sum-exp of the scores of each run; and
    sample, float32 (rows, num_heads_kv, samples), which is `sample_of` the sums. Nothing is said of what a row does not
    see, nor of the sample of less than OF_SAMPLE tokens.
    """
    rows, heads, group, _ = call.q.shape
    tokens, device = call.table.shape[1] * call.page_size, call.q.device
    return {
        "scores": torch.empty((rows, heads, group, tokens), dtype=torch.float32, device=device),
        "total": torch.empty((rows, heads, tokens if group > 1 else 0), dtype=torch.float32, device=device),
        "lse": torch.empty((rows, heads, group, call.runs), dtype=torch.float32, device=device),
        "sample": torch.empty((rows, heads, -(-tokens // OF_SAMPLE)), dtype=torch.float32, device=device),
    }


def total_of(scores: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The sums of scores over a group."""
    return total if scores.shape[2] > 1 else scores[:, :, 0]


def sample_of(total: torch.Tensor) -> torch.Tensor:
    """One of each OF_SAMPLE tokens, at places that are not even, since scores may be periodic."""
    tokens = total.shape[-1]
    run = torch.arange(-(-tokens // OF_SAMPLE), device=total.device)
    return total[..., (run * OF_SAMPLE + run * PLACE % OF_SAMPLE).clamp(max=tokens - 1)]


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: which tokens are read has no gradient."""
    return {}
