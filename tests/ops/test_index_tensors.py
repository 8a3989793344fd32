"""Lengths, pages and offsets in int64, as `cumsum` and indexing give them: the results of int32, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.adapters.flash_attn import flash_attn_varlen_func
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.layouts import in_int32, index_tensors

CU_Q, CU_K = torch.tensor([0, 5, 5, 24], dtype=torch.int32), torch.tensor([0, 9, 12, 40], dtype=torch.int32)
TABLE, LENGTHS = torch.tensor([[4, 0, 2], [3, 1, 0]], dtype=torch.int32), torch.tensor([21, 9], dtype=torch.int32)
ENDS, ROWS_OF = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([4, 0, 2, 3, 1], dtype=torch.int32)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = _randn(24, 4, 16), _randn(40, 2, 16), _randn(40, 2, 16)
PAGES = _randn(5, 8, 2, 16), _randn(5, 8, 2, 16)
STEP = _randn(2, 1, 4, 16)


def _varlen(x: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return flash_attn_varlen_func(Q, K, V, x(CU_Q), x(CU_K), 19, 28, causal=True)


def _summaries(x: Callable[[torch.Tensor], torch.Tensor]) -> tw.PageSummaries:
    kept = tw.PageSummaries.of(*PAGES, columns=8)
    layout = tw.Paged(x(TABLE), x(LENGTHS), x(torch.tensor([0, 21, 30], dtype=torch.int32)))
    tw.summarize_pages(*PAGES, kept, layout, 30)
    return kept


def _over_pages(x: Callable[[torch.Tensor], torch.Tensor], **arguments: Any) -> torch.Tensor:
    layout = tw.Paged(x(TABLE), x(LENGTHS), summaries=_summaries(x))
    return tw.attention(STEP, *PAGES, layout=layout, **arguments)


# name of a call -> what it gives, for tensors that a function makes of int32 ones
CALLS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "packed": lambda x: tw.attention(Q, K, V, mask=tw.causal, layout=tw.Packed(x(CU_Q), x(CU_K))),
    "queries alone": lambda x: tw.attention(Q, K, V, mask=tw.causal, layout=tw.Packed(x(CU_Q), CU_K)),
    "keys alone": lambda x: tw.attention(Q, K, V, mask=tw.causal, layout=tw.Packed(CU_Q, x(CU_K))),
    "one for both": lambda x: tw.attention(K, K, V, layout=tw.Packed(x(CU_K), max_seqlen_q=28)),
    "reference": lambda x: tw.attention(Q, K, V, layout=tw.Packed(x(CU_Q), x(CU_K)), impl="reference"),
    "low-bit": lambda x: tw.attention(Q, K, V, layout=tw.Packed(x(CU_Q), x(CU_K)), quantize=tw.Sage2()),
    "codes": lambda x: tw.attention(
        Q, K, V, layout=tw.Packed(x(CU_Q), x(CU_K)),
        quantize=tw.quantize_qkv(Q, K, V, scheme=tw.Sage2(), layout=tw.Packed(x(CU_Q), x(CU_K))),
    ),
    "tiles": lambda x: tw.attention(Q, K, V, layout=tw.Packed(x(CU_Q), x(CU_K)), select=tw.TopK(1)),
    "selected": lambda x: tw.attention(
        Q, K, V, layout=tw.Packed(x(CU_Q), x(CU_K)),
        select=tw.select_tiles(Q, K, tw.TopK(1), layout=tw.Packed(x(CU_Q), x(CU_K))),
    ),
    "pages": lambda x: tw.attention(STEP, *PAGES, layout=tw.Paged(x(TABLE), x(LENGTHS))),
    "flat pages": lambda x: tw.attention(STEP, *PAGES, layout=tw.Paged((x(ENDS), x(ROWS_OF)), x(LENGTHS))),
    "packed queries over pages": lambda x: tw.attention(
        Q[:7], *PAGES, layout=tw.Paged(x(TABLE), x(LENGTHS), x(torch.tensor([0, 3, 7], dtype=torch.int32)))
    ),
    "low-bit over pages": lambda x: _over_pages(x, quantize=tw.Sage2()),
    "pages by bounds": lambda x: _over_pages(x, select=tw.TopPages(2)),
    "tokens": lambda x: _over_pages(x, select=tw.SparQ(8, 8, local=2)),
    "merged states": lambda x: tw.merge_states(Q[:5], _randn(4, 5), indptr=x(ENDS))[0],
    "FlashAttention's varlen": _varlen,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("strided", [False, True])
def test_int64_gives_the_bits_of_int32(name: str, strided: bool) -> None:
    def wide(x: torch.Tensor) -> torch.Tensor:
        x = x.long()
        return torch.stack((x, x - 1), -1)[..., 0] if strided else x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(CALLS[name](wide), CALLS[name](lambda x: x))


def test_gradients_are_those_of_int32_whatever_is_written_in_between() -> None:
    found = []
    for cu in (CU_Q, CU_Q.long()):
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        o = tw.attention(*leaves, mask=tw.causal, layout=tw.Packed(cu, CU_K))
        if cu.dtype == torch.int64:
            cu.zero_()
        found.append(torch.autograd.grad(o.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_each_call_reads_them_anew() -> None:
    cu = CU_Q.long()
    first = tw.attention(Q, K, V, layout=tw.Packed(cu, CU_K))
    cu[1:3] = 7
    assert not torch.equal(first, tw.attention(Q, K, V, layout=tw.Packed(cu, CU_K)))
    assert torch.equal(
        tw.attention(Q, K, V, layout=tw.Packed(cu, CU_K)), tw.attention(Q, K, V, layout=tw.Packed(cu.int(), CU_K))
    )


def test_a_compiled_region_takes_them() -> None:
    def call(cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
        return tw.attention(Q, K, V, mask=tw.causal, layout=tw.Packed(cu_q, cu_k))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(CU_Q.long(), CU_K.long()), call(CU_Q, CU_K))


def test_layouts_in_int32_stay_the_same_object() -> None:
    for layout in (
        tw.Packed(CU_Q, CU_K),
        tw.Packed(CU_Q),
        tw.Paged(TABLE, LENGTHS),
        tw.Paged((ENDS, ROWS_OF), LENGTHS),
    ):
        assert in_int32(layout) is layout
    both = tw.Packed(CU_Q.long(), max_seqlen_q=19)
    assert in_int32(replace(both, cu_seqlens_k=both.cu_seqlens_q)).bounds.same
    flat = in_int32(tw.Paged((ENDS.long(), ROWS_OF), LENGTHS.long(), share_prefixes=True))
    assert isinstance(flat.block_table, tuple)
    assert flat.share_prefixes
    assert {x.dtype for x in index_tensors(flat) if x is not None} == {torch.int32}


def test_what_needs_more_than_32_bits_is_out_of_range() -> None:
    with pytest.raises(InputError, match="layout cu_seqlens_q: got first 0, last 2147483647; expected from 0 to 24"):
        tw.attention(Q, K, V, layout=tw.Packed(CU_Q.long() + torch.tensor([0, 0, 0, 2**32]), CU_K))
    with pytest.raises(InputError, match="page 2147483647 in request 0"):
        tw.attention(STEP, *PAGES, layout=tw.Paged(TABLE.long() + 2**32, LENGTHS))


def test_what_lies_behind_the_last_page_is_not_read() -> None:
    table = TABLE.long()
    table[1, 2] = 2**40
    assert torch.equal(
        tw.attention(STEP, *PAGES, layout=tw.Paged(table, LENGTHS)),
        tw.attention(STEP, *PAGES, layout=tw.Paged(TABLE, LENGTHS)),
    )


def test_a_plan_which_keeps_them_wants_int32() -> None:
    for layout in (tw.Packed(CU_Q.long(), CU_K), tw.Packed(CU_Q, CU_K.long())):
        with pytest.raises(InputError, match="layout: got index tensors in int64; expected int32 for a plan"):
            tw.plan(Q, K, V, layout=layout)
    with pytest.raises(InputError, match=r"convert them once, \.to\(torch\.int32\)"):
        tw.plan(STEP, *PAGES, layout=tw.Paged(TABLE, LENGTHS.long()))


def test_vmap_over_them_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="layout: got a tensor that vmap has batched"):
        torch.func.vmap(lambda cu: tw.attention(Q, K, V, layout=tw.Packed(cu, CU_K)))(CU_Q.long().expand(2, -1))
