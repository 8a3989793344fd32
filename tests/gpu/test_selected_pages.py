"""`attention(select=TopPages(...))` on a GPU: against an oracle that reads what it says, replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.test_page_summaries import LARGE
from tests.gpu.test_token_scores import LARGE as TOKENS
from tests.gpu.test_token_scores import LONG
from tilewise.testing import page_selection as cases
from tilewise.testing.graphs import captured
from tilewise.testing.page_selection import CASES, SPARQ, PagesCase

# whose scores at the least that is read are further apart than those of any kernel are off, so that all read the same
APART = replace(LONG, select=tw.SparQ(32, 246), heads=(2, 2))


@pytest.mark.parametrize("case", [*CASES, *SPARQ, *LARGE, TOKENS, APART], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_equals_reading_what_is_chosen(case: PagesCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, None, DEVICE)


@pytest.mark.parametrize("select", [tw.TopPages(8), tw.TopPages(8, far="summary"), tw.SparQ(32, 100)], ids=repr)
def test_replayed(select: tw.TopPages | tw.SparQ) -> None:
    given = cases.make_inputs(LARGE[0], torch.bfloat16, DEVICE)
    graph, o = captured(lambda: tw.attention(**given, select=select))
    given["q"].normal_()
    graph.replay()
    assert torch.equal(o, tw.attention(**given, select=select))
