"""Summaries of the pages of a KV cache: the least, largest and mean keys of each, and the mean of its values."""

from __future__ import annotations

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.tensors import check_all_dense, check_dense, refuse_batched, refuse_transforms
from tilewise.layout_checks import check_pages
from tilewise.layouts import Paged, PageSummaries, in_int32, index_tensors
from tilewise.ops.kv_write import kv_write
from tilewise.ops.kv_write.problem import DTYPES
from tilewise.ops.page_summaries.problem import Call
from tilewise.ops.page_summaries.table import SUMMARIZE


def summarize_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    summaries: PageSummaries,
    layout: Paged,
    tokens: int | None = None,
    *,
    impl: str | None = None,
) -> None:
    """Update the summaries of pages, in place, after new tokens were written into them. `Batch.write` calls it.

    Each page that a new token lies in is read again, as far as its request fills it. So no error adds up over steps,
    and a page that was cut or copied is right once it is written.

    Args:
        k_pages, v_pages: (num_pages, page_size, num_heads_kv, dim), as in `kv_write`, float16, bfloat16 or float32.
        summaries: of these pages; `tilewise.PageSummaries.of(k_pages, v_pages)` for empty ones.
        layout: of the step: `cu_seqlens_q` says how many of a request's tokens are new, or where it is None, each
            request has one; `block_table` is a matrix.
        tokens: the last of `cu_seqlens_q`, which is not read on a GPU's host; None where `cu_seqlens_q` is None.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl` cannot run this call.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 8, 16, 2, 16)
        >>> summaries = tw.PageSummaries.of(k_pages, v_pages)
        >>> seqlens, table = torch.tensor([16], dtype=torch.int32), torch.tensor([[3]], dtype=torch.int32)
        >>> tw.summarize_pages(k_pages, v_pages, summaries, tw.Paged(table, seqlens))
        >>> torch.equal(summaries.least[3], k_pages[3].amin(0))
        True
    """
    check_summaries(k_pages, v_pages, summaries)
    if not isinstance(layout, Paged):
        got, hint = type(layout).__name__, "pass the layout of the step that wrote the keys"
        raise InputError("layout", got=got, expected="tilewise.Paged(block_table, seqlens_k)", hint=hint)
    layout = in_int32(layout)
    table, first, seqlens = layout.pages
    if first is not None:
        raise InputError(
            "layout block_table", got="a pair", expected="a matrix (batch, max_pages)", hint="one row for each request"
        )
    check_dense("layout block_table", table, "a matrix (batch, max_pages)", "torch.tensor(...)")
    refuse_batched("layout", index_tensors(layout))
    if table.ndim != 2:
        raise InputError(
            "layout block_table",
            got=f"shape {tuple(table.shape)}",
            expected="a matrix (batch, max_pages)",
            hint="one row for each request",
        )
    batch = table.shape[0]
    starts = layout.cu_seqlens_q
    if starts is None:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=table.device)
        tokens = batch
    elif not isinstance(tokens, int) or tokens < 0:
        hint = "the rows of k and v that were written"
        raise InputError("tokens", got=shown(tokens), expected="the last of layout cu_seqlens_q", hint=hint)
    check_pages(layout.pages, starts, k_pages.new_empty(tokens), k_pages)
    with torch.no_grad():
        call = Call(k_pages, v_pages, table, seqlens, starts, tokens, bits_of(k_pages, summaries))
        page, least, largest, k_mean, v_mean, *columns = SUMMARIZE(call, impl)
        kv_write(least, largest, summaries.least[:, None], summaries.largest[:, None], page, impl=impl)
        kv_write(k_mean, v_mean, summaries.k_mean[:, None], summaries.v_mean[:, None], page, impl=impl)
        if summaries.columns is not None:  # bytes by twos, the first half of them as keys
            made, kept = (_halves(x) for x in (columns[0], summaries.columns))
            kv_write(made[:, 0], made[:, 1], kept[:, :1], kept[:, 1:], page, impl=impl)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """A view of bytes (n, ...) as float16 (n, 2, 1, numbers)."""
    halves = x.flatten(1).view(torch.float16)
    return halves.view(x.shape[0], 2, 1, halves.shape[1] // 2)


def bits_of(k_pages: torch.Tensor, summaries: PageSummaries) -> int:
    """Of a code of columns; 0 where there are none."""
    return 0 if summaries.columns is None else summaries.columns.shape[-1] * 8 // k_pages.shape[1]


def check_summaries(k_pages: torch.Tensor, v_pages: torch.Tensor, summaries: PageSummaries) -> None:
    """Raise InputError unless summaries are those of these pages."""
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if isinstance(x, torch.Tensor):
            check_all_dense({name: x})
            refuse_transforms(name, (x,))
        if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.dtype not in DTYPES:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            expected = "float16, bfloat16 or float32 (num_pages, page_size, num_heads_kv, dim)"
            raise InputError(name, got=got, expected=expected, hint="codes have no summaries")
    if not isinstance(summaries, PageSummaries):
        raise InputError(
            "summaries",
            got=type(summaries).__name__,
            expected="tilewise.PageSummaries",
            hint="PageSummaries.of(k_pages, v_pages)",
        )
    check_all_dense({f"summaries {name}": x for name, x in summaries.tensors.items()})
    for name, pages in (("least", k_pages), ("largest", k_pages), ("k_mean", k_pages), ("v_mean", v_pages)):
        x, shape = getattr(summaries, name), (pages.shape[0], *pages.shape[2:])
        if tuple(x.shape) != shape or x.dtype != pages.dtype or x.device != pages.device or not x.is_contiguous():
            raise InputError(
                f"summaries {name}",
                got=f"{x.dtype} {tuple(x.shape)} on {x.device}",
                expected=f"contiguous {pages.dtype} {shape} on {pages.device}",
                hint="PageSummaries.of(k_pages, v_pages)",
            )
    columns, (count, size, heads, dim) = summaries.columns, k_pages.shape
    shapes = [(count, heads, dim, size), *([] if size % 2 else [(count, heads, dim, size // 2)])]
    if columns is not None and (
        columns.shape not in shapes
        or columns.dtype != torch.uint8
        or columns.device != k_pages.device
        or not columns.is_contiguous()
        or dim % 4
    ):
        raise InputError(
            "summaries columns",
            got=f"{columns.dtype} {tuple(columns.shape)} on {columns.device}",
            expected=f"contiguous torch.uint8 {' or '.join(map(str, shapes))} on {k_pages.device}, dim a multiple of 4",
            hint="PageSummaries.of(k_pages, v_pages, columns=8)",
        )
