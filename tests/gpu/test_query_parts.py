"""Queries' largest dimensions on a GPU: against their specification, repeated."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tests.gpu.test_token_scores import LARGE, LONG
from tilewise.ops.query_parts.table import PART_QUERIES
from tilewise.testing import query_parts as checks
from tilewise.testing.page_selection import SPARQ, PagesCase


@pytest.mark.parametrize("case", [*SPARQ, LARGE, LONG], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype, DEVICE), "triton")


def test_bits_repeat() -> None:
    call = checks.make_call(LARGE, torch.bfloat16, DEVICE)
    first, again = PART_QUERIES(call), PART_QUERIES(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
