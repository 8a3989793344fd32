"""Where the rows of q, k and v lie: `Dense` (batch, seqlen, heads, dim), `Packed` (total, heads, dim) or `Paged`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch

from tilewise.core.errors import InputError
from tilewise.core.tensors import as_int32, check_dense


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

    Lengths may be 0. In masks and scores b is the sequence, and positions count from its first key. Types and shapes
    are checked at every call; values on a CPU, and on a GPU only with TILEWISE_DEBUG=1, since reading them waits for
    the GPU.

    Args:
        cu_seqlens_q: int32 or int64 (batch + 1,), cumulative query lengths, from 0 to total_q, on the device of q;
            int32 must be contiguous, int64 is converted at each call.
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

    Pages may have any size and strides; what unused slots hold does not matter. In masks and scores b is the request,
    and positions count its tokens; its last query has the position of its last token. Types and shapes are checked at
    every call; values on a GPU only with TILEWISE_DEBUG=1.

    Args:
        block_table: int32 or int64 (batch, max_pages): the pages of each request in the order of its tokens; entries
            after its last page are not read. Rows may have any stride. Or a pair of tensors (indptr, indices),
            (batch + 1,) and (total,): request r has pages indices[indptr[r]:indptr[r + 1]]; indices may be longer than
            that. All tensors are on the device of q; int32 must be contiguous, int64 is converted at each call.
        seqlens_k: int32 or int64 (batch,): tokens of each request in its pages, new ones included; may be 0.
        cu_seqlens_q: int32 or int64 (batch + 1,), cumulative query lengths of a packed q (total_q, num_heads_q,
            head_dim); None for q (batch, seqlen_q, num_heads_q, head_dim).
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
        if isinstance(self.block_table, tuple) and len(self.block_table) != 2:
            raise InputError(
                "layout block_table",
                got=f"a tuple of {len(self.block_table)}",
                expected="a matrix (batch, max_pages), or the pair (indptr, indices)",
                hint="see `tilewise.Paged`",
            )
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


def index_tensors(layout: Packed | Paged) -> tuple[torch.Tensor | None, ...]:
    """The tensors of lengths and pages that a layout holds."""
    if isinstance(layout, Packed):
        return layout.cu_seqlens_q, layout.cu_seqlens_k
    table = layout.block_table
    return (*(table if isinstance(table, tuple) else (table,)), layout.seqlens_k, layout.cu_seqlens_q)


def copied(layout: Packed) -> Packed:
    """The layout with index tensors of its own; the lengths of queries and keys stay one tensor where they are one."""
    q, k = layout.cu_seqlens_q.clone(), layout.cu_seqlens_k
    own = q if k is layout.cu_seqlens_q else None if k is None else k.clone()
    return replace(layout, cu_seqlens_q=q, cu_seqlens_k=own)


L = TypeVar("L", bound="Packed | Paged")


def in_int32(layout: L) -> L:
    """The layout with its int64 tensors in int32, as implementations read them; itself where there are none."""
    given = index_tensors(layout)
    if torch.int64 not in [getattr(x, "dtype", None) for x in given]:
        return layout
    if isinstance(layout, Packed):
        q, k = as_int32(layout.cu_seqlens_q), layout.cu_seqlens_k
        return replace(layout, cu_seqlens_q=q, cu_seqlens_k=q if k is layout.cu_seqlens_q else as_int32(k))
    *table, seqlens_k, cu_seqlens_q = (as_int32(x) for x in given)
    block_table = tuple(table) if isinstance(layout.block_table, tuple) else table[0]
    return replace(layout, block_table=block_table, seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q)
