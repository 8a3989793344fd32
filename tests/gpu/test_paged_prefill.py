"""The Hopper kernels over pages: many queries, pages of sizes that come in boxes and of others, which are gathered,
lengths around the ends of pages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.paging import UP_TO_256, lengths_around_pages
from tilewise.ops.attention import gluon_attention, triton_attention
from tilewise.ops.triton_launch import Plans
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import causal, window
from tilewise.testing.properties import Setting


@pytest.fixture(autouse=True, params=[0, 2**30], ids=["boxes", "rows"])
def _how_keys_come(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In boxes wherever pages are such, or row by row."""
    monkeypatch.setattr(gluon_attention, "_FEW_KEYS", request.param)
    monkeypatch.setattr(triton_attention, "_PLANS", Plans())


@pytest.mark.parametrize(("page_size", "dtype"), [
    (16, torch.float16), (32, torch.bfloat16), (384, torch.bfloat16), (1, torch.bfloat16), (7, torch.float16),
    (48, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("case", UP_TO_256, ids=repr)
def test_large_cases(case: Case, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting("hopper", dtype, DEVICE), case, page_size, flat=page_size == 384)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("mask", [None, causal, window(100)], ids=["full", "causal", "window"])
def test_lengths_around_pages(mask: Any, head_dim: int) -> None:
    lengths_around_pages("hopper", mask, head_dim, (16, 64, 256, 1, 12))


def test_pages_that_boxes_do_not_reach() -> None:
    """Pages of 16 that are no eights of tokens apart, K and V each with an order of its own."""
    make = torch.Generator(DEVICE).manual_seed(0)
    pool = torch.randn(61, 3, 16 * 2 + 1, 128, generator=make, device=DEVICE).to(torch.bfloat16)
    k, v = pool[:, 0, 1:].unflatten(1, (16, 2)), pool[:, 2, :32].unflatten(1, (16, 2))
    table = torch.randperm(60, device=DEVICE, generator=make).to(torch.int32).view(2, 30)
    lengths = torch.tensor([480, 333], device=DEVICE, dtype=torch.int32)
    q = torch.randn(500, 8, 128, generator=make, device=DEVICE).to(torch.bfloat16)
    layout = tw.Paged(table, lengths, torch.tensor([0, 400, 500], device=DEVICE, dtype=torch.int32))
    gathered = tw.attention_with_lse(q, k, v, mask=tw.causal, layout=layout, impl="hopper")
    in_boxes = tw.attention_with_lse(q, k.contiguous(), v.contiguous(), mask=tw.causal, layout=layout, impl="hopper")
    assert all(torch.equal(x, y) for x, y in zip(gathered, in_boxes, strict=True))
