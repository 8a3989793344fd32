"""Choices of tokens on the CPU: against their specification, and of equal scores."""

from __future__ import annotations

import pytest
import torch

from tilewise.ops.token_choice.table import CHOOSE_TOKENS
from tilewise.testing import token_choice as checks
from tilewise.testing.page_selection import BY_NAME, SPARQ, PagesCase


@pytest.mark.parametrize("case", SPARQ, ids=repr)
def test_equals_the_specification(case: PagesCase) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        checks.check(checks.make_call(case, dtype), "cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_equal_scores(impl: str) -> None:
    """Of tokens alike the first ones are read."""
    call = checks.make_call(BY_NAME["sparq_hnd"], torch.float32)
    call.total.fill_(1.0)
    checks.check(call, impl)
    tables = CHOOSE_TOKENS(call, impl)[0]
    first = int(call.table[0, 0])
    assert tables[0, 0].tolist() == [first * call.by_page + n * call.by_token for n in range(call.width)]
