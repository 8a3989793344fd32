"""One call of `flash_attn_with_kvcache`: its arguments, and what follows from them without a look at any value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.tensors import as_int32

Rows = tuple[torch.Tensor, torch.Tensor]  # of each row: its request, and which of its request's rows it is


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheCall:
    """The arguments by FlashAttention's names; `table_name` is what the caller calls `block_table`. Properties are not
    cached, since torch.compile traces no `cached_property`.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any = None
    v: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    block_table: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k_new: Any = None
    rotary_seqlens: Any = None
    descales: Sequence[Any] = (None, None, None)
    softmax_scale: Any = None
    causal: bool = False
    window_size: Any = (-1, -1)
    softcap: Any = 0.0
    rotary_interleaved: bool = True
    alibi_slopes: Any = None
    num_splits: Any = 0
    table_name: str = "block_table"

    @property
    def device(self) -> torch.device:
        device: torch.device = self.q.device
        return device

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return int(self.q.shape[-2] // self.k_cache.shape[2])

    @property
    def batch(self) -> int:
        return int(self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1)

    @property
    def page_size(self) -> int:
        """Tokens of a page; of a whole row where the cache is contiguous."""
        return int(self.k_cache.shape[1])

    @property
    def capacity(self) -> int:
        """Tokens that one request can have, those before its left padding's end included."""
        return self.page_size if self.block_table is None else self.block_table.shape[1] * self.page_size

    @property
    def table(self) -> torch.Tensor:
        """int32 (batch, pages): where each request's tokens are."""
        if self.block_table is not None:
            return int32(self.block_table)
        if self.cache_batch_idx is not None:
            return int32(self.cache_batch_idx)[:, None]
        return torch.arange(self.batch, dtype=torch.int32, device=self.device)[:, None]

    @property
    def lengths(self) -> torch.Tensor:
        """int32 (batch,): tokens in the cache before this call."""
        if isinstance(self.cache_seqlens, torch.Tensor):
            return int32(self.cache_seqlens)
        length = self.capacity if self.cache_seqlens is None else int(self.cache_seqlens)
        return torch.full((self.batch,), length, dtype=torch.int32, device=self.device)

    @property
    def seqlens(self) -> torch.Tensor:
        """int32 (batch,): tokens in the cache after it."""
        if self.k is None:
            return self.lengths
        if self.cu_seqlens_k_new is None:
            return self.lengths + int(self.k.shape[1])
        return self.lengths + int32(self.cu_seqlens_k_new).diff()

    @property
    def queries(self) -> Rows:
        return _rows(self.q, self.cu_seqlens_q)

    @property
    def news(self) -> Rows:
        """Of the new keys."""
        return _rows(self.k, self.cu_seqlens_k_new)

    @property
    def slots(self) -> torch.Tensor:
        """int64 (new tokens,): where they go, -1 for none."""
        request, row = self.news
        at = self.lengths[request] + row
        page = self.table[request, (at // self.page_size).clamp(max=self.table.shape[1] - 1)].long()
        return torch.where(at < self.capacity, page * self.page_size + at % self.page_size, -1)

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 (rows,): where on the rotary axis each query stands, and each new key. Without an order among the
        queries all stand where the first new key does.
        """
        start = self.lengths if self.rotary_seqlens is None else int32(self.rotary_seqlens)
        (of_query, row), (of_key, new) = self.queries, self.news
        ordered = self.causal or any(side is not None and side >= 0 for side in self.window_size)
        return start[of_query] + (row if ordered else 0 * row), start[of_key] + new


def int32(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = as_int32(x)
    return found.contiguous()


def _rows(x: torch.Tensor, sums: torch.Tensor | None) -> Rows:
    """Of x (batch, rows, heads, dim), or packed with running sums of lengths."""
    if sums is None:
        rows = torch.arange(x.shape[0] * x.shape[1], device=x.device)
        return rows // max(x.shape[1], 1), rows % max(x.shape[1], 1)
    rows = torch.arange(x.shape[0], device=x.device)
    request = torch.searchsorted(sums[1:].long(), rows, right=True).clamp(max=sums.shape[0] - 2)
    return request, rows - sums[request]


def stride_of(x: torch.Tensor) -> int:
    """Elements from one token to the next."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0) if x.shape[0] > 1 else x.shape[2] * x.shape[3]


def step_of(x: torch.Tensor) -> int:
    """Tokens from one page to the next, 0 where it is no number of tokens."""
    if x.shape[0] == 1:
        return x.shape[1]
    return 0 if not stride_of(x) or x.stride(0) % stride_of(x) else x.stride(0) // stride_of(x)
