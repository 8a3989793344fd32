"""The facts of one call that summarizes pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """The pages that new tokens lie in: of request r the last cu_seqlens_q[r + 1] - cu_seqlens_q[r] of its seqlens[r].
    Implementations read this and nothing else.

    `k` and `v` are (num_pages, page_size, num_heads_kv, dim), `table` int32 (batch, max_pages), `cu_seqlens_q` int32
    (batch + 1,), whose last is `tokens`. `bits` are those of codes of columns (`layouts.PageSummaries`), 8, 4, or 0
    where there are none.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    tokens: int
    bits: int

    @property
    def slots(self) -> int:
        """Places for pages: request r has those from cu_seqlens_q[r] // page_size + 2 r on, which are enough."""
        return self.tokens // self.k.shape[1] + 2 * self.table.shape[0]


def results(call: Call) -> Tensors:
    """Empty ones: of each slot its page, -1 for none, and that page's least, largest and mean keys, mean values, and
    columns.
    """
    heads, dim, dim_v = *call.k.shape[2:], call.v.shape[3]
    made = {"page": torch.empty(call.slots, dtype=torch.int32, device=call.k.device)}
    for name, width in (("least", dim), ("largest", dim), ("k_mean", dim), ("v_mean", dim_v)):
        made[name] = torch.empty((call.slots, heads, width), dtype=call.k.dtype, device=call.k.device)
    if call.bits:
        shape = (call.slots, heads, dim, call.k.shape[1] * call.bits // 8)
        made["columns"] = torch.empty(shape, dtype=torch.uint8, device=call.k.device)
    return made


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: pages have no gradient."""
    return {}


def touched(call: Call) -> Iterator[tuple[int, int, int]]:
    """(slot, page, how many of its tokens are there) of all pages with new tokens; reads lengths on the host."""
    size = call.k.shape[1]
    starts, lengths, table = call.cu_seqlens_q.tolist(), call.seqlens.tolist(), call.table.tolist()
    for r, length in enumerate(lengths):
        count = starts[r + 1] - starts[r]
        first = max(length - count, 0) // size
        for n in range(first, -(-length // size) if count else first):
            slot = starts[r] // size + 2 * r + n - first
            yield slot, table[r][n], min(size, length - n * size)
