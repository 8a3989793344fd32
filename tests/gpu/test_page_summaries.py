"""Summaries of pages on a GPU: against PyTorch, replayed."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import page_summaries as checks
from tilewise.testing.graphs import captured
from tilewise.testing.page_selection import CASES, SPARQ, PagesCase, make_inputs

LARGE = [
    PagesCase("large", tw.TopPages(8), lengths=(4099, 1, 1000), page_size=16, heads=(8, 8), dim=128, dim_v=128),
    PagesCase("large_wide", tw.TopPages(8), lengths=(700, 0, 64), page_size=64, heads=(4, 1), dim=256, dim_v=512),
]


@pytest.mark.parametrize("case", [*CASES, *SPARQ, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_pytorch(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(case, dtype, "triton", DEVICE)


def test_replayed() -> None:
    """A step of decoding in a CUDA graph: lengths and pages are read when it runs."""
    given = make_inputs(LARGE[0], torch.bfloat16, DEVICE)
    k, v, layout = given["k"], given["v"], given["layout"]
    found = tw.PageSummaries.of(k, v)
    seqlens = layout.seqlens_k.clone()
    graph, _ = captured(lambda: tw.summarize_pages(k, v, found, tw.Paged(layout.block_table, seqlens)))
    for length in (16, 17, 4099, 1000):
        seqlens.fill_(1).clamp_(max=length)
        seqlens[0] = length
        graph.replay()
        page = int(layout.block_table[0, (length - 1) // 16])
        held = k[page, : (length - 1) % 16 + 1]
        assert torch.equal(found.least[page], held.amin(0))
        assert torch.equal(found.largest[page], held.amax(0))
