"""The facts of one call that adds what stands for tokens that were not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """The mean of all values a row of queries sees, beside what attention gave for the tokens that it read, each by the
    share of weights that it is predicted to have (Ribar et al., "SparQ Attention"). Implementations read this and
    nothing else.

    `o` (rows, num_heads_q, dim_v) and `lse` (rows, num_heads_q), float32, or float64 like `o`, are what attention gave.
    `read` (rows, num_heads_kv, group, tiles) and `seen` (rows, num_heads_kv, group, parts) are float32: the
    log-sum-exps of predicted scores of what is read, and of all that a row sees. `values` (rows, num_heads_kv, parts,
    dim_v), float32, sum to those of all tokens, with `last`, float32 (rows, num_heads_kv, dim_v), of those that no part
    has, or None where parts have all. Row t sees `lengths[t]` tokens, int32, and has read all where these are at most
    `width`.

    Nothing is added where all was read, where attention gave an lse of -inf, nor where what is seen does not weigh more
    than what is read.
    """

    o: torch.Tensor
    lse: torch.Tensor
    read: torch.Tensor
    seen: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    width: int
    last: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.read.shape[1]

    @property
    def group(self) -> int:
        return self.read.shape[2]


def results(call: Call) -> Tensors:
    """Empty ones: o and lse, as the call has them; where something is added lse is less the logarithm of the share."""
    return {
        "o": torch.empty(call.o.shape, dtype=call.o.dtype, device=call.o.device),
        "lse": torch.empty(call.lse.shape, dtype=call.lse.dtype, device=call.lse.device),
    }


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: which tokens are read has no gradient."""
    return {}
