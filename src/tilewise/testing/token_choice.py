"""Choices of tokens against their specification, on any device, and what the compile tier compiles of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.token_choice.problem import Call
from tilewise.ops.token_choice.table import CHOOSE_TOKENS
from tilewise.ops.token_scores.problem import sample_of, total_of
from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.testing import token_scores
from tilewise.testing.page_selection import PagesCase
from tilewise.testing.page_summaries import pages


def make_call(case: PagesCase, dtype: torch.dtype, device: str = "cpu") -> Call:
    """The call of a case, by scores of the specification."""
    scored, select = token_scores.make_call(case, dtype, device), case.select
    assert isinstance(select, tw.SparQ)
    scores, total, lse, sample = SCORE_TOKENS(scored, "reference")
    total = total_of(scores, total)
    v_mean = None
    if select.compensate:
        generator = torch.Generator().manual_seed(3)
        v_mean = torch.randn(*scored.least.shape[:2], case.dim_v, generator=generator).to(device, dtype)
    width = min(select.keys, total.shape[-1])
    counted = None
    if case.causal:  # each second row of whole pages only
        rows = torch.arange(len(scored.lengths), device=device)
        counted = torch.where(rows % 2 == 0, scored.lengths, scored.lengths // case.page_size * case.page_size)
    return Call(
        scores, total, lse, sample, scored.table, scored.request, scored.lengths, v_mean, case.page_size, width,
        select.newest, 5, 3, 2,
        None if counted is None else counted.to(torch.int32),
    )  # fmt: skip


def check(call: Call, impl: str) -> None:
    """The tables of the specification; what is for the rest within what sums in float32 are off by."""
    names = ("tables", "tokens", "read", "seen", "values")
    found = dict(zip(names, CHOOSE_TOKENS(call, impl), strict=True))
    wanted = dict(zip(names, CHOOSE_TOKENS(call, "reference"), strict=True))
    assert torch.equal(found["tables"], wanted["tables"])
    assert torch.equal(found["tokens"], wanted["tokens"])
    off = 2.0**-20 * (8.0 + float(call.lse.nan_to_num(neginf=0.0, posinf=0.0).abs().max()))
    for name in ("read", "seen"):
        torch.testing.assert_close(found[name], wanted[name], rtol=0.0, atol=off, equal_nan=True)
    if call.v_mean is not None:
        off = 2.0**-20 * call.page_size * call.some * float(call.v_mean.float().abs().max())
        torch.testing.assert_close(found["values"], wanted["values"], rtol=0.0, atol=off)


def _variant(
    group: int, stands: bool, drafts: bool = False
) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        dim, size = pages(width)
        count = 2048  # pages: of 64 tokens a row of 131072
        table, numbers = torch.zeros(3, count, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        scores, runs = torch.zeros(3, 2, group, count * size), torch.zeros(3, 2, group, count * (1 + (size % 2 == 0)))
        v_mean = torch.zeros(10, 2, dim, dtype=dtype) if stands else None
        request = None if stands else numbers.clone()
        total = scores[:, :, 0].contiguous()
        return CHOOSE_TOKENS, Call(
            scores, total, runs, sample_of(total), table, request, numbers, v_mean, size, 8, 2, 1, 1, 1,
            numbers.clone() if drafts else None,
        )  # fmt: skip

    return make


VARIANTS = {"compensated": _variant(4, True), "alone": _variant(1, False), "drafts": _variant(1, True, True)}
