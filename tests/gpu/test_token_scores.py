"""Predicted scores of tokens on a GPU: against their specification, repeated."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.testing import token_scores as checks
from tilewise.testing.page_selection import SPARQ, PagesCase

LARGE = PagesCase("large", tw.SparQ(32, 100), lengths=(700, 1, 300), page_size=64, heads=(8, 2), dim=128, dim_v=128)
LONG = PagesCase(
    "long", tw.SparQ(32, 200), lengths=(1500, 300), queries=2, page_size=256, heads=(4, 4), dim=128, dim_v=128
)


@pytest.mark.parametrize("case", [*SPARQ, LARGE, LONG], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype, DEVICE), "triton")


def test_bits_repeat() -> None:
    call = checks.make_call(LARGE, torch.bfloat16, DEVICE)
    (first, *_), (again, *_) = SCORE_TOKENS(call), SCORE_TOKENS(call)
    for row, length in enumerate(call.lengths.tolist()):
        assert torch.equal(first[row, ..., :length], again[row, ..., :length])
