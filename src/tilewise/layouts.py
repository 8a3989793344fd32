"""Where the rows of q, k and v lie: `Dense` (batch, seqlen, heads, dim), `Packed` (total, heads, dim) or `Paged`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import host_range, host_values, values_checked
from tilewise.core.tensors import check_dense


@dataclass(frozen=True)
class Dense:
    """Tensors of shape (batch, seqlen, heads, dim): the default layout.

    Example:
        >>> o = tw.attention(q, k, v, layout=tw.Dense())
    """


class LengthBounds(NamedTuple):
    """Declared bounds of lengths, None where nothing is; `same` where each sequence has as many queries as keys."""

    rows_q: int | None = None
    rows_k: int | None = None
    same: bool = False


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences of different lengths, one after another: q, k and v are (total, heads, dim).

    Lengths may be 0. Types and shapes are checked at every call; values on a CPU, and on a GPU only with
    TILEWISE_DEBUG=1, since reading them waits for the GPU.

    Args:
        cu_seqlens_q: int32 (batch + 1,), cumulative query lengths, from 0 to total_q, contiguous, on the device of q.
        cu_seqlens_k: the same for keys; None where queries and keys share one.
        max_seqlen_q, max_seqlen_k: bounds of a sequence's lengths, as in FlashAttention; None for the totals. With them
            lists of tiles on a GPU take less memory, and a formula that reads a captured tensor by i or j is known to
            stay inside it.

    Raises:
        InputError: raised by the call that takes the layout, for tensors that do not fit.

    Example:
        >>> layout = tw.Packed(torch.tensor([0, 30, 31, 100], dtype=torch.int32))  # 30, 1 and 69 tokens
        >>> o = tw.attention(q[0], k[0], v[0], mask=tw.causal, layout=layout)
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = field(default=None, kw_only=True)
    max_seqlen_k: int | None = field(default=None, kw_only=True)

    @property
    def bounds(self) -> LengthBounds:
        """What the caller declares of lengths."""
        same = self.cu_seqlens_k is None or self.cu_seqlens_k is self.cu_seqlens_q
        declared = [n for n in (self.max_seqlen_q, self.max_seqlen_k) if n is not None]
        if same and declared:
            return LengthBounds(min(declared), min(declared), True)
        return LengthBounds(self.max_seqlen_q, self.max_seqlen_k, same)

    @property
    def keys(self) -> torch.Tensor:
        """Cumulative key lengths."""
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True, eq=False)
class PageSummaries:
    """Minima, maxima and means of each page's keys, and means of its values, by which pages are selected.

    Each is (num_pages, num_heads_kv, dim), of the dtype of the pages, contiguous; `tilewise.summarize_pages` keeps them
    up to date.

    Args:
        least, largest: of the keys, for each dimension.
        k_mean, v_mean: of keys, and of values.
        columns: None, or the keys as codes, stored by dimension, so that a few dimensions of all keys can be read
            (`tilewise.SparQ`): uint8 (num_pages, num_heads_kv, dim, page_size * bits / 8), contiguous, with 8 bits or
            4. Code c stands for least + c * (largest - least) / (2**bits - 1); of 4 bits, byte n has token n in its low
            bits and token n + page_size / 2 in its high bits.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 8, 16, 2, 16)
        >>> tw.PageSummaries.of(k_pages, v_pages).k_mean.shape
        torch.Size([8, 2, 16])
    """

    least: torch.Tensor
    largest: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    columns: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, and those that must be, by name."""
        return {name: x for name, x in vars(self).items() if x is not None or name != "columns"}

    @staticmethod
    def of(k_pages: torch.Tensor, v_pages: torch.Tensor, columns: int | None = None) -> PageSummaries:
        """Summaries of pages that hold nothing yet.

        Args:
            k_pages, v_pages: (num_pages, page_size, num_heads_kv, dim), floating point.
            columns: bits of the codes of `columns`, 8 or 4; None for none.

        Returns:
            PageSummaries, all 0.

        Raises:
            InputError: no such pages, other bits, 4 bits with an odd page_size, or a head_dim that 4 does not divide.
        """
        for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
            expected, hint = "floats (num_pages, page_size, num_heads_kv, dim)", "codes have no summaries"
            check_dense(name, x, expected, hint)
            if x.ndim != 4 or not x.is_floating_point():
                raise InputError(name, got=f"{x.dtype} {tuple(x.shape)}", expected=expected, hint=hint)
        least, largest, k_mean = (k_pages.new_zeros(k_pages.shape[0], *k_pages.shape[2:]) for _ in range(3))
        kept = PageSummaries(least, largest, k_mean, v_pages.new_zeros(v_pages.shape[0], *v_pages.shape[2:]))
        if columns is None:
            return kept
        pages, size, heads, dim = k_pages.shape
        if type(columns) is not int or columns not in (8, 4):
            raise InputError("columns", got=repr(columns), expected="None, 8 or 4", hint="bits of a code")
        for name, number, step in (("page_size", size, 8 // columns), ("head_dim", dim, 4)):
            if number % step:
                got = f"{number}, with columns={columns}"
                raise InputError(name, got=got, expected=f"a multiple of {step}", hint="codes fill bytes")
        codes = k_pages.new_zeros(pages, heads, dim, size * columns // 8, dtype=torch.uint8)
        return replace(kept, columns=codes)


@dataclass(frozen=True, eq=False)
class Paged:
    """A KV cache: k and v are pages (num_pages, page_size, num_heads_kv, dim) of a pool that requests share.

    Pages may have any size and strides; what unused slots hold does not matter. The last query of a request stands at
    its last token. Types and shapes are checked at every call; values on a GPU only with TILEWISE_DEBUG=1.

    Args:
        block_table: int32 (batch, max_pages): the pages of each request in the order of its tokens; entries after its
            last page are not read. Rows may lie apart. Or a pair of int32 tensors (indptr, indices), (batch + 1,) and
            (total,): request r has pages indices[indptr[r]:indptr[r + 1]]; indices may be longer than that. All
            tensors are on the device of q, and contiguous.
        seqlens_k: int32 (batch,): tokens of each request in its pages, new ones included; may be 0.
        cu_seqlens_q: int32 (batch + 1,), cumulative query lengths of a packed q (total_q, num_heads_q, head_dim);
            None for q (batch, seqlen_q, num_heads_q, head_dim).
        share_prefixes: if True, keys that neighbouring requests share (their rows of `block_table` begin alike) are
            read once for all of them on a GPU, by a launch of its own, where a count of bytes says that it pays.
            Results are equal within rounding, with the same bits in every run. For q that is not packed, 2 to 1,024
            requests, few queries, no mask or `causal`, and scores that use neither b nor i (see `tilewise.why`);
            otherwise ignored, and an error with `batch_invariant=True`.
        summaries: of the pages, for `select=tilewise.TopPages(...)` and `tilewise.SparQ(...)`.
        max_seqlen_k: a bound of `seqlens_k`; None for the capacity of the pages. With it, `quantize=` and a selection
            of tiles need not wait for a GPU to learn the number of rows.

    Raises:
        InputError: raised by the call that takes the layout, for tensors that do not fit.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 8, 16, 2, 16)  # 8 pages of 16 tokens
        >>> table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
        >>> layout = tw.Paged(table, seqlens_k=torch.tensor([20, 7], dtype=torch.int32))
        >>> o = tw.attention(q[:, :1], k_pages, v_pages, layout=layout)
    """

    block_table: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    seqlens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    share_prefixes: bool = field(default=False, kw_only=True)
    summaries: PageSummaries | None = field(default=None, kw_only=True)
    max_seqlen_k: int | None = field(default=None, kw_only=True)

    @property
    def bounds(self) -> LengthBounds:
        """What the caller declares of lengths."""
        return LengthBounds(None, self.max_seqlen_k)

    @property
    def pages(self) -> Pages:
        """The table and the lengths as implementations read them."""
        first, table = self.block_table if isinstance(self.block_table, tuple) else (None, self.block_table)
        return Pages(table, first, self.seqlens_k)


class Pages(NamedTuple):
    """The pages of requests: request r has table[r], or table[first[r]:first[r + 1]] of a flat table."""

    table: torch.Tensor
    first: torch.Tensor | None
    seqlens: torch.Tensor

    @property
    def longest(self) -> int:
        """Pages that one request can have."""
        return self.table.shape[-1]

    @property
    def row_stride(self) -> int:
        """From one request's row of the table to the next; 0 where the table is flat."""
        return 0 if self.first is not None else self.table.stride(0)


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
    expected = f"a contiguous int32 tensor {says} on {device}"
    check_dense(name, x, expected, "torch.tensor(..., dtype=torch.int32)")
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


_HINT = "running sums of the lengths: torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)"


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
    expected = "a contiguous int32 tensor (batch + 1,) on the device of q"
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
