"""Predicted scores of tokens on the CPU: against their specification, and of numbers that are none."""

from __future__ import annotations

import pytest
import torch

from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.testing import token_scores as checks
from tilewise.testing.page_selection import BY_NAME, SPARQ, PagesCase


@pytest.mark.parametrize("case", SPARQ, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype), "cpu")


def test_a_page_that_holds_nan() -> None:
    call = checks.make_call(BY_NAME["sparq"], torch.float32)
    dims = call.dims[0, 1].long()
    call.least[int(call.table[0, 2]), 1, dims[0]] = torch.nan
    checks.check(call, "cpu")
    assert bool(SCORE_TOKENS(call, "cpu")[1][0, 1, 16:24].isnan().all())
