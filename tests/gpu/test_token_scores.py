"""Predicted scores of tokens on a GPU: against their specification, repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.ops.token_scores.problem import Call
from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.testing import token_scores as checks
from tilewise.testing.page_selection import SPARQ, PagesCase

LARGE = PagesCase("large", tw.SparQ(32, 100), lengths=(700, 1, 300), page_size=64, heads=(8, 2), dim=128, dim_v=128)
LONG = PagesCase(
    "long", tw.SparQ(32, 200), lengths=(1500, 300), queries=2, page_size=256, heads=(4, 4), dim=128, dim_v=128
)
LONG_PAGES = [
    LONG,
    replace(LONG, name="rank_16", select=tw.SparQ(16, 200), lengths=(2047, 1, 256, 0), heads=(3, 3)),
    replace(
        LONG, name="rank_13", select=tw.SparQ(13, 200), lengths=(129, 1024, 1025), heads=(2, 2), dim=64, dim_v=64,
        order="HND",
    ),
    replace(LONG, name="rank_1", select=tw.SparQ(1, 200), queries=4, lengths=(700, 255), heads=(1, 1)),
    replace(LONG, name="rank_17", select=tw.SparQ(17, 200), packed=True, lengths=(1600, 31), heads=(2, 2), dim=80),
]  # fmt: skip


@pytest.mark.parametrize("case", [*SPARQ, LARGE, LONG], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype, DEVICE), "triton")


def test_bits_repeat() -> None:
    call = checks.make_call(LARGE, torch.bfloat16, DEVICE)
    (first, *_), (again, *_) = SCORE_TOKENS(call), SCORE_TOKENS(call)
    for row, length in enumerate(call.lengths.tolist()):
        assert torch.equal(first[row, ..., :length], again[row, ..., :length])


# the kernel for Hopper -----------------------------------------------------------------------------------------------


def of_one_row(pages: int, rank: int) -> Call:
    """One query for each of 32 heads, whose request has all pages but part of the last."""
    heads, dim = 32, 128
    generator = torch.Generator(DEVICE).manual_seed(rank)
    given: dict[str, Any] = {"generator": generator, "device": DEVICE}
    dims = torch.rand(1, heads, dim, **given).argsort(-1)[..., :rank].int().contiguous()
    columns = torch.randint(0, 256, (pages, heads, dim, 128), dtype=torch.uint8, **given)
    least = torch.randn(pages, heads, dim, **given) - 2.0
    largest = least + 4.0 * torch.rand(pages, heads, dim, **given)
    table = torch.randperm(pages, **given).int()[None]
    q = torch.randn(1, heads, 1, rank, **given) * 0.3
    lengths = torch.tensor([pages * 256 - 77], dtype=torch.int32, device=DEVICE)
    return Call(q, dims, columns, least.bfloat16(), largest.bfloat16(), table, None, lengths, 256)


@pytest.mark.parametrize("case", LONG_PAGES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_long_pages_on_hopper(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype, DEVICE), "hopper")


@pytest.mark.parametrize("case", LONG_PAGES[:3], ids=repr)
def test_a_page_that_holds_nan_on_hopper(case: PagesCase) -> None:
    """It shows where its dimension is looked at, and nowhere else."""
    call = checks.make_call(case, torch.float32, DEVICE)
    page = int(call.table[0, 0])
    call.least[page, 1, int(call.dims[0, 1, 0])] = torch.nan
    assert call.request is not None
    chosen = call.dims[call.request == 0, 0].flatten().tolist()
    call.least[page, 0, [d for d in range(case.dim) if d not in chosen]] = torch.nan
    checks.check(call, "hopper")
    scores = SCORE_TOKENS(call, "hopper")[0]
    assert bool(scores[0, 1, 0, :129].isnan().all())
    assert not scores[0, 0, 0, :129].isnan().any()


def test_tables_may_say_anything_beyond_a_length() -> None:
    call = checks.make_call(LONG, torch.bfloat16, DEVICE)
    beyond = torch.arange(call.table.shape[1], device=DEVICE) * 256 >= call.lengths[::2, None]
    assert bool(beyond.any())
    call.table[beyond] = -(2**30)
    checks.check(call, "hopper", "triton")


@pytest.mark.parametrize("rank", [16, 32])
def test_a_long_request_on_hopper(rank: int) -> None:
    """131,072 tokens, by the row that such calls get, beside the Triton kernel; bits repeat."""
    call = of_one_row(512, rank)
    checks.check(call, "hopper", "triton")
    first, again, unasked = SCORE_TOKENS(call, "hopper"), SCORE_TOKENS(call, "hopper"), SCORE_TOKENS(call)
    for results in zip(first, again, unasked, strict=True):
        count = results[0].shape[-1] * 511 // 512  # of whole pages
        assert all(torch.equal(results[0][..., :count], x[..., :count]) for x in results[1:])


def test_columns_that_start_elsewhere() -> None:
    """Loads of 16 bytes cannot take them."""
    call = checks.make_call(LONG, torch.bfloat16, DEVICE)
    memory = torch.zeros(call.columns.numel() + 4, dtype=torch.uint8, device=DEVICE)
    columns = memory[4:].view(call.columns.shape).copy_(call.columns)
    checks.check(replace(call, columns=columns), "hopper")
