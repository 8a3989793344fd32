"""Predicted scores of tokens on the CPU: against their specification, and of numbers that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise.ops.token_scores import table
from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.testing import token_scores as checks
from tilewise.testing.page_selection import BY_NAME, SPARQ, PagesCase


@pytest.mark.parametrize("case", SPARQ, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype), "cpu")


def test_a_page_that_holds_nan() -> None:
    call = checks.make_call(BY_NAME["sparq"], torch.float32)
    dims = call.dims[0, 1].long()
    call.least[int(call.table[0, 2]), 1, dims[0]] = torch.nan
    checks.check(call, "cpu")
    assert bool(SCORE_TOKENS(call, "cpu")[1][0, 1, 16:24].isnan().all())


def test_what_the_kernel_for_hopper_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is preferred to the Triton kernel, and says what it does not take."""
    rows = {row.name: row for row in table.ROWS}
    assert list(rows).index("hopper") < list(rows).index("triton")
    case = PagesCase("long", tw.SparQ(16, 20), lengths=(300,), queries=2, page_size=256, heads=(2, 2), dim=64)
    call = checks.make_call(case, torch.bfloat16)
    assert rows["hopper"].first_unmet(call) == "needs a Hopper GPU (sm_90); got cpu"
    monkeypatch.setattr(table, "_no_hopper", lambda call: None)
    assert rows["hopper"].first_unmet(call) is None
    others = {
        "4-bit codes; got 8": replace(case, queries=1),
        "pages of 256 tokens; got 128": replace(case, page_size=128),
        "one query head per KV head; got 2": replace(case, heads=(4, 2)),
        "a rank of at most 32; got 33": replace(case, select=tw.SparQ(33, 20)),
    }
    for unmet, other in others.items():
        assert rows["hopper"].first_unmet(checks.make_call(other, torch.bfloat16)) == f"needs {unmet}"
