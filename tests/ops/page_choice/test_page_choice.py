"""Choices of pages on the CPU: against their specification, of equal scores and of numbers that are none."""

from __future__ import annotations

import pytest
import torch

from tilewise.ops.page_choice import problem
from tilewise.ops.page_choice.table import CHOOSE_PAGES
from tilewise.testing import page_choice as checks
from tilewise.testing.page_selection import BY_NAME, CASES, PagesCase


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("compared", [0, problem.COMPARED])
def test_equals_the_specification(case: PagesCase, impl: str, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    for dtype in (torch.float32, torch.bfloat16):
        checks.check(checks.make_call(case, dtype), impl)


@pytest.mark.parametrize("width", [1, 2, 40, 250, 310])
@pytest.mark.parametrize("compared", [0, problem.COMPARED])
def test_ties(width: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    checks.check_ties(width, "cpu", "reference")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_equal_scores(impl: str) -> None:
    """Of pages alike the first ones are read, beside the newest."""
    call = checks.make_call(BY_NAME["bounds"], torch.float32)
    call.least.fill_(1.0)
    call.largest.fill_(1.0)
    checks.check(call, impl)
    kept = CHOOSE_PAGES(call, impl)[2]
    assert kept[0, 0].nonzero().flatten().tolist() == [0, 1, 4]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_pages_whose_scores_are_no_numbers_are_read(impl: str) -> None:
    call = checks.make_call(BY_NAME["bounds"], torch.float32)
    call.largest[int(call.table[0, 3]), 1] = torch.nan
    call.largest[int(call.table[3, 2]), 0] = torch.inf
    checks.check(call, impl)
    kept = CHOOSE_PAGES(call, impl)[2]
    assert kept[0, 1].nonzero().flatten().tolist() == [0, 3, 4]
    assert kept[3, 0].nonzero().flatten().tolist() == [0, 2, 7]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_the_newest_is_read_beside_any_number_of_them(impl: str) -> None:
    call = checks.make_call(BY_NAME["bounds"], torch.float32)
    call.largest.fill_(torch.nan)
    checks.check(call, impl)
    kept = CHOOSE_PAGES(call, impl)[2]
    assert kept[3, 0].nonzero().flatten().tolist() == [0, 1, 7]
