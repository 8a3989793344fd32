"""What stands for tokens that are not read on a GPU: against its specification, of many tiles, repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tests.gpu.test_token_scores import LARGE, LONG
from tilewise.ops.token_rest.table import ADD_REST
from tilewise.testing import token_rest as checks
from tilewise.testing.page_selection import SPARQ, PagesCase

MANY = replace(LARGE, name="many", lengths=(30_000, 1, 1200), heads=(72, 2))  # more than a program has at once


@pytest.mark.parametrize("case", [*SPARQ, LARGE, LONG, MANY], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype, DEVICE), "triton")


def test_bits_repeat() -> None:
    call = checks.make_call(MANY, torch.bfloat16, DEVICE)
    first, again = ADD_REST(call), ADD_REST(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
