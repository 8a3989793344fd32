"""Keys and values out of pages, as rows of packed sequences: for what has no kernel over pages (attention in few bits,
selections of tiles), and reads each key so often that a copy costs little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import constant, host_values
from tilewise.layouts import Packed, Paged, Pages, in_int32
from tilewise.ops.attention.problem import make_call
from tilewise.quant import ByChannel, Encoded
from tilewise.quant.codes import decoded


@dataclass(frozen=True, eq=False)
class PagedRows:
    """q, k and v of a paged call as packed tensors (total, heads, dim), and where their sequences lie; `shape` is q's
    (batch, seqlen_q) where it was not packed.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Packed
    shape: tuple[int, int] | None

    def results(self, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of the packed call, shaped as those of the paged one."""
        if self.shape is None:
            return o, lse
        lse = lse.view(lse.shape[0], *self.shape).transpose(0, 1).contiguous()
        return o.view(*self.shape, *o.shape[1:]), lse


def rows_of_call(q: Any, k: Any, v: Any, layout: Paged) -> PagedRows:
    """The tensors of a call over pages: requests as sequences, codes decoded. What follows is differentiable, to pages
    that are not codes, too.

    There are as many rows as the declared bound allows (`Paged(max_seqlen_k=)`), those behind the requests' last tokens
    at the end, where no sequence has them. Without one lengths are read on the host, which waits for a GPU; while a
    CUDA graph is captured they cannot be, and there are as many rows as pages can hold. A region of torch.compile
    breaks here.

    Raises:
        InputError: an argument is wrong, or keys are encoded by channel.
    """
    if isinstance(k, ByChannel):
        hint = "pages that are not encoded, or by token (Encoded)"
        raise InputError(
            "k",
            got="keys by channel",
            expected="keys encoded by token, or not encoded, which can be copied out of their pages",
            hint=hint,
        )
    if torch.compiler.is_compiling():  # (not a decorator: that imports PyTorch's compiler for everyone)
        rows: PagedRows = torch.compiler.disable(_rows)(q, k, v, layout)  # type: ignore[no-untyped-call]
        return rows
    return _rows(q, k, v, layout)


def _rows(q: Any, k: Any, v: Any, layout: Paged) -> PagedRows:
    layout = in_int32(layout)
    make_call(q, k, v, layout=layout)  # which checks them
    pages = layout.pages
    starts, size, bound = _cumulative(pages.seqlens), k.shape[1], layout.max_seqlen_k
    waits = bound is None or not pages.seqlens.is_cuda
    lengths = host_values(pages.seqlens) if waits else None
    if lengths is not None:
        total, bound = sum(lengths), max(lengths, default=0)
    else:
        held = pages.table.numel() * size
        total = held if bound is None else min(held, bound * (starts.shape[0] - 1))
    page, place = _slots(pages, starts, total, size)
    shape = None if layout.cu_seqlens_q is not None else (q.shape[0], q.shape[1])
    starts_q = layout.cu_seqlens_q if shape is None else _even(*shape, q.device)
    assert starts_q is not None
    rows = q if shape is None else q.flatten(0, 1)
    found_k = _gathered(k, page, place, q.dtype)
    found_v = found_k if v is k else _gathered(v, page, place, q.dtype)
    most_q = None if shape is None else shape[1]
    packed = Packed(starts_q, starts, max_seqlen_q=most_q, max_seqlen_k=bound)
    return PagedRows(rows, found_k, found_v, packed, shape)


def reads(layout: Paged) -> list[str]:
    """What `rows_of_call` reads on the host, with what spares it."""
    if layout.max_seqlen_k is not None:
        return []
    return ["lengths of requests, since keys are copied out of pages; declare tilewise.Paged(..., max_seqlen_k=...)"]


def _slots(pages: Pages, starts: torch.Tensor, total: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, place in it) of each of `total` rows, int64; of rows behind the last token any."""
    batch = starts.shape[0] - 1
    if not batch or not total:
        return (torch.empty(0, dtype=torch.int64, device=starts.device),) * 2
    row = torch.arange(total, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], row, right=True).clamp(max=batch - 1)
    token = (row - starts[request]).long()
    entry = token // size
    if pages.first is None:
        page = pages.table[request, entry.clamp(max=pages.table.shape[1] - 1)]
    else:
        page = pages.table[(pages.first[request].long() + entry).clamp(max=pages.table.shape[0] - 1)]
    return torch.where(row < starts[-1], page, 0).long(), token % size


def _gathered(x: torch.Tensor | Encoded, page: torch.Tensor, place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows (total, heads, dim) of pages."""
    if isinstance(x, Encoded):
        return decoded(x.data[page, place], x.scale[page, place]).to(dtype)
    return x[page, place]


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Running sums, int32 (n + 1,)."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


@constant
def _even(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    """Cumulative lengths of sequences that are alike."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen
