"""Predicted scores of tokens against their specification, on any device, and what the compile tier compiles of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.token_scores.problem import OF_SAMPLE, Call
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
        None if case.queries == 1 else request, layout.seqlens_k[request.long()], case.page_size,
    )  # fmt: skip


def check(call: Call, impl: str, other: str = "reference") -> None:
    """Scores and their sums are those of the specification, or of another implementation, of what a row sees. Where
    codes are not converted, what float32 rounds is up to 2**7 times a key's range, 2**15 steps of 8 bits and 2**11 of
    4; where weights are halves, 2**-12 times that range is: up to 2**-11 of a weight, which a code counts 7.5 times of
    15. Tensor cores cut off less than a sixteenth of that.
    """
    names = ("scores", "total", "lse", "sample")
    found = dict(zip(names, SCORE_TOKENS(call, impl), strict=True))
    wanted = dict(zip(names, SCORE_TOKENS(call, other), strict=True))
    ends = max(float(x.float().nan_to_num().abs().max()) for x in (call.least, call.largest))
    largest = float(call.q.abs().max()) * 2.0 * ends  # of a product, whose key is a sum
    rank, group = call.q.shape[3], call.q.shape[2]
    for name, got in found.items():
        exact, terms = wanted[name], rank * (group if name in ("total", "sample") else 1)
        if not got.numel():
            assert got.shape == exact.shape
            continue
        place = torch.arange(got.shape[-1], device=got.device)
        if name == "sample":
            last = place * OF_SAMPLE + OF_SAMPLE - 1
        else:
            of_run = got.shape[-1] // call.table.shape[1]  # runs, or tokens, of a page
            last = place // of_run * call.page_size + place % of_run * (call.page_size // of_run)
        seen = last < call.lengths.view(-1, *[1] * (got.ndim - 1))
        got, exact = (torch.where(seen, x, 0.0) for x in (got, exact))
        assert torch.equal(got.isinf(), exact.isinf())
        assert torch.equal(got.isnan(), exact.isnan())
        off = torch.where((got == exact) | got.isnan(), 0.0, got - exact).abs()
        bound = (terms + 4) * terms * 2.0**-24 * largest
        if "triton" in (impl, other):
            bound += 2.0 * (terms + 4) * 2.0 ** (7 - 24) * terms * largest
        if "hopper" in (impl, other):
            bound += (1.0 + 1.0 / 16) * 2.0**-12 * terms * largest
        if name == "lse":  # a sum of as many exponentials as a run has tokens, and its logarithm
            size = float(exact.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
            bound += (call.page_size + 8) * 2.0**-23 * (1.0 + size)
        assert float(off.max()) <= bound


def _variant(
    bits: int, group: int, size: int | None = None, rank: int = 32
) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        dim, page_size = pages(width)
        page_size = size or page_size
        ends, numbers = torch.zeros(10, 2, dim, dtype=dtype), torch.zeros(3, dtype=torch.int32)
        codes = torch.zeros(10, 2, dim, page_size * (8 if page_size % 2 else bits) // 8, dtype=torch.uint8)
        q, dims = torch.zeros(3, 2, group, rank), torch.zeros(3, 2, rank, dtype=torch.int32)
        table = torch.zeros(3, 40, dtype=torch.int32)
        return SCORE_TOKENS, Call(q, dims, codes, ends, ends.clone(), table, None, numbers, page_size)

    return make


VARIANTS = {
    "8 bits": _variant(8, 4),
    "4 bits": _variant(4, 1),
    "long pages": _variant(4, 1, 256),
    "long pages, few dimensions": _variant(4, 1, 256, 16),
    "many queries": _variant(8, 6),
}
