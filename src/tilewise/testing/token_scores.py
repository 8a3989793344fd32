"""Predicted scores of tokens against their specification, on any device, and what the compile tier compiles of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.token_scores.problem import FORCED, Call
from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.testing.page_selection import PagesCase, make_inputs
from tilewise.testing.page_summaries import pages


def make_call(case: PagesCase, dtype: torch.dtype, device: str = "cpu") -> Call:
    """The call of a case, whose rows see all of their requests; dimensions in no order."""
    given = make_inputs(case, dtype, device)
    layout, select, heads = given["layout"], case.select, case.heads[1]
    assert isinstance(select, tw.SparQ)
    generator = torch.Generator().manual_seed(1)
    rows = given["q"].reshape(-1, heads, case.heads[0] // heads, case.dim)[..., : select.rank].float()
    dims = torch.rand(rows.shape[0], heads, case.dim, generator=generator).argsort(-1)[..., : select.rank]
    request = torch.arange(len(case.lengths), dtype=torch.int32, device=device).repeat_interleave(case.queries)
    summaries = layout.summaries
    return Call(
        rows, dims.to(device, torch.int32), summaries.columns, summaries.least, summaries.largest, layout.block_table,
        None if case.queries == 1 else request, layout.seqlens_k[request.long()], case.page_size, select.newest,
    )  # fmt: skip


def check(call: Call, impl: str) -> None:
    """Scores and their sums are those of the specification, within what float32 sums in another order are off by."""
    scores, total, lse = SCORE_TOKENS(call, impl)
    want, want_total, want_lse = SCORE_TOKENS(call, "reference")
    assert torch.equal(total == FORCED, want_total == FORCED)
    ends = max(float(x.float().nan_to_num().abs().max()) for x in (call.least, call.largest))
    largest = float(call.q.abs().max()) * 2.0 * ends  # of a product, whose key is a sum
    rank = call.q.shape[3]
    # a sum of as many exponentials as a page has tokens, whose arguments are rounded, and its logarithm
    more = (call.page_size + 8) * 2.0**-23 * (1.0 + float(want_lse.nan_to_num(posinf=0.0, neginf=0.0).abs().max()))
    for got, exact, terms, rounded in (
        (scores, want, rank, 0.0), (total, want_total, call.q.shape[2] * rank, 0.0), (lse, want_lse, rank, more),
    ):  # fmt: skip
        assert torch.equal(got.isinf(), exact.isinf())
        assert torch.equal(got.isnan(), exact.isnan())
        off = torch.where((got == exact) | got.isnan(), 0.0, got - exact).abs()
        assert not off.numel() or float(off.max()) <= (terms + 4) * terms * 2.0**-24 * largest + rounded


def _variant(bits: int, group: int) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        dim, size = pages(width)
        ends, numbers = torch.zeros(10, 2, dim, dtype=dtype), torch.zeros(3, dtype=torch.int32)
        codes = torch.zeros(10, 2, dim, size * (8 if size % 2 else bits) // 8, dtype=torch.uint8)
        q, dims = torch.zeros(3, 2, group, 32), torch.zeros(3, 2, 32, dtype=torch.int32)
        table = torch.zeros(3, 40, dtype=torch.int32)
        return SCORE_TOKENS, Call(q, dims, codes, ends, ends.clone(), table, None, numbers, size, 8)

    return make


VARIANTS = {"8 bits": _variant(8, 4), "4 bits": _variant(4, 1)}
