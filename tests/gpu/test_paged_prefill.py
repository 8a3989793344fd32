"""The Hopper kernels over pages: many queries, pages of any size that they take, lengths around the ends of pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tests.gpu.paging import UP_TO_256, lengths_around_pages
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import causal, window
from tilewise.testing.properties import Setting


@pytest.mark.parametrize(("page_size", "dtype"), [(16, torch.float16), (32, torch.bfloat16), (384, torch.bfloat16)])
@pytest.mark.parametrize("case", UP_TO_256, ids=repr)
def test_large_cases(case: Case, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting("hopper", dtype, DEVICE), case, page_size, flat=page_size == 384)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("mask", [None, causal, window(100)], ids=["full", "causal", "window"])
def test_lengths_around_pages(mask: Any, head_dim: int) -> None:
    lengths_around_pages("hopper", mask, head_dim)
