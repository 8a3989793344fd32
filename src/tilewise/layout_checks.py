"""What a call checks of the lengths and pages that `tilewise.layouts` describe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import host_range, host_values, values_checked
from tilewise.core.tensors import check_dense
from tilewise.layouts import LengthBounds, Packed, Paged, Pages

_HINT = "cumulative lengths: torch.tensor([0, *lengths], device=q.device).cumsum(0)"


def check_pages(pages: Pages, cu_seqlens_q: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise InputError unless pages and cumulative query lengths fit q and the pool k."""
    table, first, seqlens = pages
    if first is not None:
        _check_index("layout block_table indptr", first, (None,), q.device, "(batch + 1,)")
        _check_index("layout block_table indices", table, (None,), q.device, "(total,)")
    else:
        _check_index("layout block_table", table, (None, None), q.device, "(batch, max_pages), or a pair", apart=True)
    batch = table.shape[0] if first is None else first.shape[0] - 1
    _check_index("layout seqlens_k", seqlens, (batch,), q.device, f"({batch},): one for each request")
    if cu_seqlens_q is None and q.shape[0] != batch:
        raise InputError(
            "q",
            got=f"batch {q.shape[0]}",
            expected=f"{batch}, the requests of the block table",
            hint="queries of different lengths are packed: layout=tilewise.Paged(..., cu_seqlens_q=...)",
        )
    read = values_checked(q.device)
    if cu_seqlens_q is not None:
        _check_cu_seqlens("layout cu_seqlens_q", cu_seqlens_q, q.shape[0], q.device, read)
        if cu_seqlens_q.shape[0] != batch + 1:
            raise InputError(
                "layout cu_seqlens_q",
                got=tuple(cu_seqlens_q.shape),
                expected=f"({batch + 1},), one entry more than there are requests",
                hint="an empty request has two equal entries",
            )
    if read:
        _check_page_values(pages, k.shape[0], k.shape[1])


def _check_index(
    name: str, x: Any, shape: tuple[int | None, ...], device: torch.device, says: str, *, apart: bool = False
) -> None:
    """Raise InputError unless x is an int32 tensor of this shape, contiguous or, where rows may lie `apart`, nearly."""
    expected = f"a contiguous int32 or int64 tensor {says} on {device}"
    check_dense(name, x, expected, "torch.tensor(...)")
    fits = x.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
    if not fits or (name.endswith("indptr") and x.shape[0] < 1):
        raise InputError(name, got=f"shape {tuple(x.shape)}", expected=expected, hint="see `tilewise.Paged`")
    if x.dtype != torch.int32 or x.device != device or not (apart or x.is_contiguous()) or x.stride(-1) not in (0, 1):
        raise InputError(
            name,
            got=f"{x.dtype} on {x.device}, strides {x.stride()}",
            expected=expected,
            hint="use .to(q.device, torch.int32).contiguous()",
        )


def _check_page_values(pages: Pages, num_pages: int, page_size: int) -> None:
    """Raise InputError unless every request has pages enough for its length, and all of them exist."""
    for r, table in enumerate(tables_of(pages, page_size, check=True) or ()):
        low, high = host_range(table) or (0, 0)
        if table.numel() and not 0 <= low <= high < num_pages:
            raise InputError(
                "layout block_table",
                got=f"page {low if low < 0 else high} in request {r}",
                expected=f"0 to {num_pages - 1}",
                hint="k and v have one row for each page of the pool",
            )


def tables_of(pages: Pages, page_size: int, *, check: bool = False) -> list[torch.Tensor] | None:
    """The pages that hold each request's tokens, as parts of the table; None where lengths cannot be read now. With
    `check`, raises InputError for lengths that are negative or beyond the pages.
    """
    seqlens = host_values(pages.seqlens)
    first = None if pages.first is None else host_values(pages.first)
    if seqlens is None or (first is None and pages.first is not None):
        return None
    total = pages.table.shape[0]
    if first is not None:
        if check and (first[0] != 0 or first[-1] > total or any(b < a for a, b in itertools.pairwise(first))):
            raise InputError(
                "layout block_table indptr",
                got=f"{first[0]} to {first[-1]}",
                expected=f"values that never fall, from 0 to at most {total}, the number of indices",
                hint=_HINT,
            )
        rows = [pages.table[a:b] for a, b in itertools.pairwise(first)]
    else:
        rows = list(pages.table)
    found = []
    for r, (row, length) in enumerate(zip(rows, seqlens, strict=True)):
        if check and not 0 <= length <= len(row) * page_size:
            raise InputError(
                "layout seqlens_k",
                got=f"{length} in request {r}",
                expected=f"0 to {len(row) * page_size}: {len(row)} pages of {page_size}",
                hint="a request needs pages for its new tokens, too",
            )
        found.append(row[: -(-length // page_size)])
    return found


def check_packing(cu_seqlens_q: Any, cu_seqlens_k: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise InputError unless the cumulative lengths fit packed q and k, and each other."""
    read = values_checked(q.device)
    _check_cu_seqlens("layout cu_seqlens_q", cu_seqlens_q, q.shape[0], q.device, read)
    if cu_seqlens_k is not cu_seqlens_q or k.shape[0] != q.shape[0]:
        _check_cu_seqlens("layout cu_seqlens_k", cu_seqlens_k, k.shape[0], q.device, read)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise InputError(
            "layout cu_seqlens_k",
            got=tuple(cu_seqlens_k.shape),
            expected=f"{tuple(cu_seqlens_q.shape)} as cu_seqlens_q",
            hint="one entry more than there are sequences, for queries and keys alike",
        )


def check_bounds(layout: Packed | Paged) -> None:
    """Raise InputError for a declared bound that is no length or, where values are read, one that does not hold."""
    bounds = layout.bounds
    declared = {"max_seqlen_q": getattr(layout, "max_seqlen_q", None), "max_seqlen_k": layout.max_seqlen_k}
    for name, bound in declared.items():
        if bound is not None and (type(bound) is not int or bound < 0):
            expected, hint = "an int, 0 or more, or None", "a bound of the lengths: int(lengths.max())"
            raise InputError(f"layout {name}", got=repr(bound), expected=expected, hint=hint)
    for name, bound, lengths in _bounded(layout, bounds):
        longest = max(lengths or (), default=0)
        if longest > bound:
            got, hint = f"{bound}, and a sequence of {longest}", "a bound of all lengths, or None"
            raise InputError(f"layout {name}", got=got, expected="a bound that holds", hint=hint)


def _bounded(layout: Packed | Paged, bounds: LengthBounds) -> list[tuple[str, int, Sequence[int] | None]]:
    """(name, bound, lengths) of what is declared, where values are read."""
    index = layout.seqlens_k if isinstance(layout, Paged) else layout.cu_seqlens_q
    if not values_checked(index.device):
        return []
    if isinstance(layout, Paged):
        return [] if bounds.rows_k is None else [("max_seqlen_k", bounds.rows_k, host_values(layout.seqlens_k))]
    sides = (("max_seqlen_q", bounds.rows_q, layout.cu_seqlens_q), ("max_seqlen_k", bounds.rows_k, layout.keys))
    return [(name, bound, steps(cu_seqlens)) for name, bound, cu_seqlens in sides if bound is not None]


def steps(cu_seqlens: torch.Tensor) -> list[int] | None:
    """The lengths whose running sums these are, read on the host; None where they cannot be read now."""
    ends = host_values(cu_seqlens)
    return None if ends is None else [b - a for a, b in itertools.pairwise(ends)]


def _check_cu_seqlens(name: str, cu_seqlens: Any, total: int, device: torch.device, read: bool) -> None:
    """Raise InputError unless `cu_seqlens` is int32 (batch + 1,) and, where values are read, from 0, never falling,
    ending at `total`.
    """
    expected = "a contiguous int32 or int64 tensor (batch + 1,) on the device of q"
    check_dense(name, cu_seqlens, expected, _HINT)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise InputError(name, got=tuple(cu_seqlens.shape), expected=expected, hint=_HINT)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != device or not cu_seqlens.is_contiguous():
        raise InputError(
            name,
            got=f"{cu_seqlens.dtype} on {cu_seqlens.device}, stride {cu_seqlens.stride(0)}",
            expected=expected,
            hint="use .to(q.device, torch.int32).contiguous()",
        )
    if read:
        check_ends(name, cu_seqlens, total)


def check_ends(name: str, cu_seqlens: torch.Tensor, total: int) -> None:
    """Raise InputError unless cumulative lengths go from 0 to `total` and never fall, where they can be read now."""
    values = host_values(cu_seqlens)
    if values is None:
        return
    first, last = values[0], values[-1]
    fall = next((pair for pair in itertools.pairwise(values) if pair[1] < pair[0]), None)
    if first != 0 or last != total:
        raise InputError(
            name,
            got=f"first {first}, last {last}",
            expected=f"from 0 to {total}, the number of rows",
            hint="cumulative lengths, one entry more than there are sequences",
        )
    if fall is not None:
        raise InputError(name, got=f"{fall[1]} after {fall[0]}", expected="values that never fall", hint=_HINT)
