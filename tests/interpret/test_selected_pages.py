"""The Triton kernels of summaries and choices of pages, and attention over them; broken twins are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.interpret.test_twins import fails_when_broken
from tilewise.core.errors import UnsupportedError
from tilewise.ops import triton_launch
from tilewise.ops.page_choice import problem, triton_page_choice
from tilewise.ops.page_choice.problem import LONGEST
from tilewise.ops.page_choice.table import CHOOSE_PAGES
from tilewise.ops.page_summaries import triton_page_summaries
from tilewise.testing import page_choice, page_selection, page_summaries
from tilewise.testing.page_selection import BY_NAME, CASES, SPARQ, PagesCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN


COMPARED = (0, problem.COMPARED)  # pairs of pages up to which they are compared with one another


@pytest.mark.parametrize("case", [*CASES, *SPARQ], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_summaries(case: PagesCase, dtype: torch.dtype) -> None:
    page_summaries.check(case, dtype, "triton")


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("compared", COMPARED)
def test_choices(case: PagesCase, dtype: torch.dtype, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    page_choice.check(page_choice.make_call(case, dtype), "triton")


@pytest.mark.parametrize("width", [1, 2, 40, 250, 310])
@pytest.mark.parametrize("compared", COMPARED)
def test_ties(width: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    page_choice.check_ties(width, "triton", "cpu")


@pytest.mark.parametrize("value", [1.0, torch.nan])
@pytest.mark.parametrize("compared", COMPARED)
def test_equal_scores(value: float, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPARED", compared)
    call = page_choice.make_call(BY_NAME["bounds"], torch.float32)
    call.least.fill_(value)
    call.largest.fill_(value)
    page_choice.check(call, "triton")


def test_numbers_that_are_none() -> None:
    call = page_choice.make_call(BY_NAME["bounds"], torch.float32)
    call.largest[int(call.table[0, 3]), 1] = torch.nan
    call.largest[int(call.table[3, 2]), 0] = torch.inf
    page_choice.check(call, "triton")


def test_tables_too_long() -> None:
    call = page_choice.make_call(BY_NAME["bounds"], torch.float32)
    call = replace(call, table=torch.zeros(5, LONGEST + 1, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="tables of at most"):
        CHOOSE_PAGES(call, "triton")


@pytest.mark.parametrize("name", ["bounds", "hnd", "drafts_packed", "capped"])
def test_attention_over_them(name: str) -> None:
    page_selection.check(BY_NAME[name], torch.float32, "triton_paged")


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for _ in range(2):
        for case in CASES[:6]:
            page_choice.check(page_choice.make_call(case, torch.float32), "triton")
            page_summaries.check(case, torch.float32, "triton")


TWINS = [
    (triton_page_summaries, "summarize", "tl.minimum(PAGE, length - n * PAGE)", "PAGE", "bounds"),
    (triton_page_summaries, "summarize", "+ slot - (start // PAGE + 2 * r)", "+ slot - (start // PAGE + r)", "bounds"),
    (triton_page_summaries, "summarize", "<< (part * BITS)", "<< 0", "uncut"),
    (triton_page_summaries, "summarize", "most / (largest - least)", "255 / (largest - least)", "uncut"),
    (triton_page_choice, "score_pages", "n >= count - local", "n >= count", "bounds"),
    (triton_page_choice, "score_pages", "q > 0.0", "q < 0.0", "bounds"),
    (triton_page_choice, "score_pages", "(g + 1) * q_head", "g * q_head", "bounds"),
    (triton_page_choice, "score_pages", "r = tl.load(REQUEST + row)", "r = 0 * tl.load(REQUEST + row)", "drafts"),
    (triton_page_choice, "take_pages", "(before < read)", "(before < read - 1)", "bounds"),
    (triton_page_choice, "take_pages", "| (n == count - 1)", "", "bounds"),
    (triton_page_choice, "take_pages", "page * by_page + h * by_head", "page * by_page", "bounds"),
    (triton_page_choice, "take_pages", "read * PAGE - (count * PAGE - length)", "read * PAGE", "bounds"),
    (triton_page_choice, "take_pages", "tl.zeros([BLOCK], tl.int32), mask", "tl.full([BLOCK], 7, tl.int32), mask",
     "all"),
    (triton_page_choice, "rank_pages", "(bits >> 31) | 1, 0)", "0, 0)", "ties"),
    (triton_page_choice, "rank_pages", "(bits >> 31) | 1, 0)", "1, 0)", "ties"),
    (triton_page_choice, "rank_pages", "line < first - begin", "line < first", "ties"),
    (triton_page_choice, "rank_pages", "lane[None, None, :] < own", "lane[None, None, :] > own", "ties"),
    (triton_page_choice, "rank_pages", "coming = tl.load(others + line, mask=line < older - begin - LINES * 32, ",
     "tl.load(others + line, mask=line < 0, ", "ties"),
    (triton_page_choice, "rank_pages", "(place < read - 1)", "(place < read)", "ties"),
    (triton_page_choice, "rank_pages", "tl.where(n == older, read - 1, place)",
     "tl.where(n == older, 0, place)", "ties"),
    (triton_page_choice, "rank_pages", "page * by_page + h * by_head", "page * by_page", "bounds"),
    (triton_page_choice, "rank_pages", "read * PAGE - (count * PAGE - length)", "read * PAGE", "bounds"),
    (triton_page_choice, "rank_pages", "tl.zeros([STEP], tl.int32), mask", "tl.full([STEP], 7, tl.int32), mask",
     "ties"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    module: ModuleType, kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        if module is triton_page_summaries:
            page_summaries.check(BY_NAME[name], torch.float32, "triton")
        else:
            monkeypatch.setattr(problem, "COMPARED", COMPARED[kernel != "take_pages"])
            call = page_choice.make_ties(250) if name == "ties" else page_choice.make_call(BY_NAME[name], torch.float32)
            page_choice.check(call, "triton")

    fails_when_broken(check, module, (kernel,), old, new, tmp_path, monkeypatch)
