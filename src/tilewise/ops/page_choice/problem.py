"""The facts of one call that chooses pages for queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
FORCED = 3e38  # the score of a page that is read whatever its keys are
LONGEST = 16384  # pages of a request: kernels hold their scores in registers
COMPARED = 2**26  # pairs of pages


@dataclass(eq=False, slots=True)
class Call:
    """Of the pages of its request those that score best for a row of queries, for each head of keys. Implementations
    read this and nothing else.

    `q` is (rows, num_heads_q, dim); row t is of request `request[t]`, int32, or t where that is None, and sees its
    first `lengths[t]` tokens, int32. `least` and `largest` are (num_pages, num_heads_kv, dim); with `means` both are
    means, and the second is not read. `table` is int32 (batch, max_pages). The `first` pages, and the `local` newest,
    score `FORCED`, and so do those whose scores are no finite number. The newest page is always among the `width` that
    are read, so lengths alone say how many tokens these hold; of the others, of equal scores the first ones.
    """

    q: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor
    table: torch.Tensor
    request: torch.Tensor | None
    lengths: torch.Tensor
    means: bool
    page_size: int
    first: int
    local: int
    width: int
    by_page: int
    by_head: int

    @property
    def heads(self) -> int:
        return self.least.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.heads

    @property
    def by_score(self) -> bool:
        """Whether what is read lies in the order of scores: pages are so few that each is compared with all others."""
        return self.q.shape[0] * self.heads * self.table.shape[1] ** 2 <= COMPARED


def results(call: Call) -> Tensors:
    """Empty ones: tables int32 (rows, num_heads_kv, width) of what is read, page p of head h as p * by_page +
    h * by_head, then 0; how many tokens these hold, int32 (rows, num_heads_kv); whether a page is read, bool (rows,
    num_heads_kv, max_pages); and scores, float32 of that shape, -inf for pages that a row does not see. The newest page
    is the last that is read; the others lie in the order of tokens, or where the call says `by_score` from the largest
    score down, of equal scores in that order.
    """
    shape, device = (call.q.shape[0], call.heads), call.q.device
    pages = call.table.shape[1]
    return {
        "tables": torch.empty((*shape, call.width), dtype=torch.int32, device=device),
        "tokens": torch.empty(shape, dtype=torch.int32, device=device),
        "kept": torch.empty((*shape, pages), dtype=torch.bool, device=device),
        "scores": torch.empty((*shape, pages), dtype=torch.float32, device=device),
    }


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: which pages are read has no gradient."""
    return {}
