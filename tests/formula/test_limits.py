"""How large scores can become, by plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.formula import as_score
from tilewise.formula.limits import largest_size, stays_near_zero
from tilewise.ops.attention import triton_attention
from tilewise.ops.attention.problem import Call, make_call

SLOPES = torch.tensor([0.5, 0.25])
SCORES: dict[str, tuple[Any, float]] = {
    "softcap": (tw.softcap(30.0), 30.0),
    "tanh": (tw.tanh_score(), 1.0),
    "sigmoid": (tw.sigmoid_score(), 1.0),
    "capped linear": (tw.alibi(SLOPES) >> tw.softcap(50.0), 50.0),
    "linear after": (tw.softcap(20.0) >> tw.alibi(SLOPES), math.inf),
    "sums": (lambda s, b, h, i, j: 3.0 - 2.0 * torch.tanh(s) + torch.sigmoid(s) / 4.0, 5.25),
    "negative": (lambda s, b, h, i, j: -(torch.tanh(s) - 2.0) * -4.0, 12.0),
    "of a product": (lambda s, b, h, i, j: torch.tanh(s) * torch.sigmoid(s) * 8.0, 8.0),
    "by a variable": (lambda s, b, h, i, j: torch.tanh(s) / torch.sigmoid(s), math.inf),
    "none": (lambda s, b, h, i, j: s * 0.0, math.inf),
}


@pytest.mark.parametrize("name", SCORES)
def test_no_score_is_beyond_the_limit(name: str) -> None:
    score, limit = SCORES[name]
    bound = make_call(*torch.zeros(3, 1, 4, 2, 8), score=score).score
    assert bound is not None
    assert largest_size(bound.text, bound.numbers) == limit
    s = torch.cat([torch.logspace(-3, 6, 50, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    positions = {name: torch.zeros(1, dtype=torch.int64) for name in "bhij"}
    values = as_score(score).evaluate(s=torch.cat([s, -s]), **positions, dtype=torch.float64)
    assert float(values.abs().max()) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_matter_to_a_kernel_decide_who_makes_its_plan(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap is an argument of the Hopper forward, but whether it needs a maximum is not: plans are kept by maker."""
    from tilewise.ops.attention import gluon_attention

    made: list[tuple[Any, bool]] = []

    def forward(call: Call, make_plan: Any, *_: Any, **__: Any) -> None:
        made.append((make_plan, make_plan(call).constants[0].limited.value))

    monkeypatch.setattr(triton_attention, "forward", forward)
    for score in (None, tw.softcap(30.0), tw.softcap(50.0), tw.softcap(60.0)):
        call = make_call(*torch.zeros(3, 1, 4, 2, 16, dtype=dtype), score=score)
        gluon_attention.forward(call)
        assert made[-1][1] == (stays_near_zero(call.score) and dtype == torch.bfloat16)
    (none, _), (low, _), (mid, _), (high, _) = made
    assert none is high
    assert low is mid
    assert (low is high) == (dtype == torch.float16)
