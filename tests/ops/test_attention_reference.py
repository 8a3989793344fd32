"""The reference against dense attention written by hand, which shares neither tracing nor evaluation with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings

import tilewise as tw
from tilewise.testing import properties
from tilewise.testing.budgets import expectation
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, CPU_CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.matrix import name_of, runnable
from tilewise.testing.oracles import dense
from tilewise.testing.properties import Setting
from tilewise.testing.strategies import shapes

MATRIX = runnable(["reference"], CPU_CASES, [torch.float64, torch.float32])


@pytest.mark.parametrize(("setting", "case"), MATRIX, ids=name_of)
def test_equals_dense_attention_by_hand(setting: Setting, case: Case) -> None:
    properties.equals_reference(setting, case)
    properties.gradients_equal_reference(setting, case)


@hypothesis_settings(max_examples=30)
@given(case=shapes())
def test_any_shape_equals_dense_attention_by_hand(case: Case) -> None:
    properties.equals_reference(Setting("reference", torch.float64), case)
    properties.gradients_equal_reference(Setting("reference", torch.float64), case)


def test_the_oracle_is_scaled_dot_product_attention() -> None:
    """PyTorch's own function says the same as the oracle, in float64, for a causal square and for grouped heads."""
    for name in ("causal", "mqa", "plain", "head_dim_192"):
        case = CASES[name]
        x = make_inputs(case, torch.float64)
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        bottom_right = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool).tril(case.seqlen_k - case.seqlen_q)
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if case.mask is None else bottom_right, enable_gqa=True
        )
        torch.testing.assert_close(dense(x, x.q, x.k, x.v).o, o.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "most", "median"),
    [(torch.float64, 512, 64), (torch.float32, 512, 64), (torch.bfloat16, 16, 4), (torch.float16, 16, 4)],
    ids=str,
)
def test_the_budget_is_near_the_dtype(dtype: torch.dtype, most: float, median: float) -> None:
    """A budget that grew large would let everything pass: it stays within some eps of the values, mostly few."""
    units = []
    for case in CPU_CASES:
        want = expectation(case, dtype)
        for name in ("o", "dq", "dk", "dv"):
            largest = max(1.0, *want.values[name].abs().flatten().tolist())
            units.append(want.allowed[name] / torch.finfo(dtype).eps / largest)
    assert max(units) <= most
    assert sorted(units)[len(units) // 2] <= median


@pytest.mark.parametrize("size", [1e17, -1e18, 1e300])
def test_scores_that_lse_rounds_still_have_weights_of_sum_1(size: float) -> None:
    q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    o = tw.attention(q, k, v, score=lambda s, b, h, i, j: s * 0.0 + size, impl="reference")
    torch.testing.assert_close(o, v.mean(1, keepdim=True).expand_as(o))
    (dv,) = torch.autograd.grad(o.sum(), v)
    torch.testing.assert_close(dv, torch.ones_like(v))
