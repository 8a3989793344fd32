"""Choices of pages on a GPU: against their specification, of equal scores, repeated."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tests.gpu.test_page_summaries import LARGE
from tilewise.ops.page_choice import problem
from tilewise.ops.page_choice.table import CHOOSE_PAGES
from tilewise.testing import page_choice as checks
from tilewise.testing.page_selection import BY_NAME, CASES, PagesCase


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compared", [0, problem.COMPARED])
def test_equals_the_specification(
    case: PagesCase, dtype: torch.dtype, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    checks.check(checks.make_call(case, dtype, DEVICE), "triton")


@pytest.mark.parametrize("width", [1, 2, 40, 250, 310])
@pytest.mark.parametrize("compared", [0, problem.COMPARED])
def test_ties(width: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    checks.check_ties(width, "triton", "cpu", DEVICE)


@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("compared", [0, problem.COMPARED])
def test_equal_scores(value: float, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    call = checks.make_call(BY_NAME["bounds"], torch.float32, DEVICE)
    call.least.fill_(value)
    call.largest.fill_(value)
    checks.check(call, "triton")


def test_bits_repeat() -> None:
    call = checks.make_call(LARGE[0], torch.bfloat16, DEVICE)
    first, again = CHOOSE_PAGES(call), CHOOSE_PAGES(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
