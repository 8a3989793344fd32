"""Choices of tokens on the CPU: against their specification, and of equal scores."""

from __future__ import annotations

from dataclasses import replace

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
    call = replace(checks.make_call(BY_NAME["sparq_hnd"], torch.float32), local=0)
    call.total.fill_(1.0)
    checks.check(call, impl)
    tables = CHOOSE_TOKENS(call, impl)[0]
    first = int(call.table[0, 0])
    assert tables[0, 0].tolist() == [first * call.by_page + n * call.by_token for n in range(call.width)]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_tokens_whose_scores_are_no_numbers_are_read(impl: str) -> None:
    call = replace(checks.make_call(BY_NAME["sparq"], torch.float32), local=2)
    call.total[0, 1, 16:20] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    checks.check(call, impl)
    length, size = int(call.lengths[0]), call.page_size
    tables = CHOOSE_TOKENS(call, impl)[0][0, 1].tolist()
    for n in (16, 17, 18, 19, length - 2, length - 1):
        page = int(call.table[0, n // size])
        assert page * call.by_page + n % size * call.by_token + call.by_head in tables
