"""The facts of one call that chooses tokens for queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.ops.page_choice.problem import FORCED

__all__ = ["FORCED", "Call", "gradients", "results"]

Tensors = dict[str, torch.Tensor]

_TILE = 512  # tokens whose log-sum-exp is one number: what one warp has at once
_VALUES = 8192  # of means of pages whose sum is one of a part


@dataclass(eq=False, slots=True)
class Call:
    """Of the tokens of its request the `width` that score best for a row of queries, for each head of keys: of equal
    scores the first ones. The `local` newest tokens score `FORCED`, and so do those whose scores sum to no finite
    number. Implementations read this and nothing else.

    `scores`, `total`, `lse` and `sample` are float32, what `SCORE_TOKENS` gives for a row's queries, their sums over a
    group, the log-sum-exps of runs of `run` tokens, and some of the sums, which implementations may look at first. Row
    t is of request `request[t]`, int32, or t where that is None, and sees its first `lengths[t]` tokens, int32; `table`
    is int32 (batch, max_pages). `v_mean`, (num_pages, num_heads_kv, dim_v), are means of pages' values, or None where
    nothing stands for tokens that are not read; they count for the first `counted[t]` tokens of a row, int32, or for
    all that it sees where that is None.
    """

    scores: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor
    sample: torch.Tensor
    table: torch.Tensor
    request: torch.Tensor | None
    lengths: torch.Tensor
    v_mean: torch.Tensor | None
    page_size: int
    width: int
    local: int
    by_page: int
    by_token: int
    by_head: int
    counted: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.total.shape[1]

    def keys(self, row: int, length: int) -> torch.Tensor:
        """What a row's tokens are compared by, (num_heads_kv, length)."""
        total = self.total[row, :, :length]
        newest = torch.arange(length, device=total.device) >= length - self.local
        return torch.where(total.isfinite() & ~newest, total, FORCED)

    @property
    def run(self) -> int:
        """Tokens of a run."""
        return self.total.shape[2] // self.lse.shape[3] if self.lse.shape[3] else 1

    @property
    def tile(self) -> int:
        """Tokens of a tile, a power of two."""
        return within((min(16, _TILE), _TILE), self.total.shape[2])

    @property
    def tiles(self) -> int:
        return max(1, -(-self.total.shape[2] // self.tile))

    @property
    def some(self) -> int:
        """Pages of a part, a power of two."""
        dim = 0 if self.v_mean is None else self.v_mean.shape[2]
        return within((1, max(1, _VALUES // within((16, 2**20), dim))), self.table.shape[1])

    @property
    def parts(self) -> int:
        """None where nothing stands for the rest."""
        return 0 if self.v_mean is None else max(1, -(-self.table.shape[1] // self.some))


def within(bounds: tuple[int, int], size: int) -> int:
    """The power of two at or above a size, within bounds that are powers of two."""
    found, most = bounds
    while found < min(size, most):
        found *= 2
    return found


def results(call: Call) -> Tensors:
    """Empty ones: tables int32 (rows, num_heads_kv, width) of what is read, in the order of tokens, token n of page p
    of head h as p * by_page + n * by_token + h * by_head, then 0; and how many these are, int32 (rows, num_heads_kv).

    For what stands for the others, in float32, and without `v_mean` empty: the log-sum-exp of the scores that are read
    of each tile of tokens, (rows, num_heads_kv, group, tiles); that of all scores of each part, of some pages, (rows,
    num_heads_kv, group, parts); and the sum of the values that are counted there, (rows, num_heads_kv, parts, dim_v).
    Of nothing these are -inf, -inf and 0.
    """
    rows, heads, group, _ = call.scores.shape
    device, stands = call.total.device, call.v_mean is not None
    dim = call.v_mean.shape[2] if call.v_mean is not None else 0
    return {
        "tables": torch.empty((rows, heads, call.width), dtype=torch.int32, device=device),
        "tokens": torch.empty((rows, heads), dtype=torch.int32, device=device),
        "read": torch.empty((rows, heads, group, call.tiles if stands else 0), dtype=torch.float32, device=device),
        "seen": torch.empty((rows, heads, group, call.parts), dtype=torch.float32, device=device),
        "values": torch.empty((rows, heads, call.parts, dim), dtype=torch.float32, device=device),
    }


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: which tokens are read has no gradient."""
    return {}
