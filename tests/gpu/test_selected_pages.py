"""`attention(select=TopPages(...))` on a GPU: against an oracle that reads pages one by one, replayed."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.test_page_summaries import LARGE
from tilewise.testing import page_selection as cases
from tilewise.testing.graphs import captured
from tilewise.testing.page_selection import CASES, PagesCase


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_equals_reading_pages_one_by_one(case: PagesCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, None, DEVICE)


@pytest.mark.parametrize("far", ["drop", "summary"])
def test_replayed(far: str) -> None:
    case = LARGE[0]
    given = cases.make_inputs(case, torch.bfloat16, DEVICE)
    select = tw.TopPages(8, far=far)
    graph, o = captured(lambda: tw.attention(**given, select=select))
    given["q"].normal_()
    graph.replay()
    assert torch.equal(o, tw.attention(**given, select=select))
