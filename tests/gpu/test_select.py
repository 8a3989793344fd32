"""Tiles taken from rows of scores on a GPU: the specification's, repeated, and in rows as long as they may be."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.core.errors import UnsupportedError
from tilewise.ops.select.problem import LONGEST
from tilewise.ops.select.table import TAKE
from tilewise.testing import select as cases
from tilewise.testing.select import CASES, RowsCase

LONG = [RowsCase(kind, (amount,), False, (1, 1, 2, 1500), 1) for kind, amount in (("mass", 0.5), ("count", 99.0))]


@pytest.mark.parametrize("case", [*CASES, *LONG], ids=repr)
def test_equals_the_specification(case: RowsCase) -> None:
    cases.check(case, "triton", DEVICE)


@pytest.mark.parametrize("kind", ["mass", "count", "share", "weight"])
def test_the_longest_rows(kind: str) -> None:
    case = RowsCase(kind, (7.0,) if kind == "count" else (0.25,), False, (1, 1, 3, LONGEST), 1)
    call = cases.make_call(case, DEVICE)
    (found,) = TAKE(call, "triton")
    (want,) = TAKE(cases.make_call(case), "cpu")
    assert int((found.cpu() != want).sum(-1).max()) <= 1  # sums of float32 may fall short of enough by one tile


def test_longer_rows_are_refused() -> None:
    case = RowsCase("count", (7.0,), False, (1, 1, 1, LONGEST + 1), 1)
    with pytest.raises(UnsupportedError, match="rows of at most"):
        TAKE(cases.make_call(case, DEVICE), "triton")


def test_nothing_waits_for_the_gpu() -> None:
    """From queries and keys to the attention over what they take, nothing is read on the host."""
    q, k, v = (torch.randn(1, 2048, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    select = tw.Select(tw.Sparge(0.5, 0.1), tw.window(256), far="summary")
    tw.attention(q, k, v, mask=tw.causal, select=select)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        tw.attention(q, k, v, mask=tw.causal, select=select)
    finally:
        torch.cuda.set_sync_debug_mode("default")
