"""Queries' largest dimensions on the CPU: against their specification, of equal ones and of numbers that are none."""

from __future__ import annotations

import pytest
import torch

from tilewise.ops.query_parts.table import PART_QUERIES
from tilewise.testing import query_parts as checks
from tilewise.testing.page_selection import BY_NAME, SPARQ, PagesCase


@pytest.mark.parametrize("case", SPARQ, ids=repr)
def test_equals_the_specification(case: PagesCase) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        checks.check(checks.make_call(case, dtype), "cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_of_equal_ones_the_first_are_taken(impl: str) -> None:
    call = checks.make_call(BY_NAME["sparq"], torch.float32)
    call.q.fill_(-2.0)
    checks.check(call, impl)
    assert PART_QUERIES(call, impl)[0][0, 0].tolist() == list(range(8))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_numbers_that_are_none_are_taken(impl: str) -> None:
    call = checks.make_call(BY_NAME["sparq"], torch.float32)
    call.q[0, 1, 9], call.q[0, 0, 11] = torch.nan, torch.inf
    assert {9, 11} <= set(PART_QUERIES(call, impl)[0][0, 0].tolist())
