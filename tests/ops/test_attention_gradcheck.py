"""Derivatives against finite differences in float64: q, k, v, sink, captured tensors, through o and through lse."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.matrix import name_of, runnable
from tilewise.testing.properties import Setting

SMALL = {"batch": 1, "seqlen_q": 3, "seqlen_k": 4, "heads_q": 2, "head_dim": 2, "head_dim_v": 3}
NAMES = ("causal", "alibi_causal", "softcap_causal", "relative_bias", "bias", "temperature", "many_operations", "scale",
         "sink_alibi", "lse_gradient", "lse_gradient_everything", "capped_alibi", "dropout")  # fmt: skip
PACKED = ("packed_cross_causal", "packed_window_sink")
CASE_LIST = [CASES[name].with_(**SMALL) for name in NAMES]
CASE_LIST += [CASES["mqa"].with_(**SMALL), CASES["bias_batch"].with_(**SMALL | {"batch": 2})]
CASE_LIST += [CASES[name].with_(head_dim=2, head_dim_v=3, packed=((2, 3), (0, 2), (3, 1))) for name in PACKED]
IMPLS = {"cpu_tiled": CASE_LIST, "cpu_sdpa": CASE_LIST, "reference": [CASES["causal"].with_(**SMALL), CASE_LIST[9]]}
MATRIX = [pair for impl, cases in IMPLS.items() for pair in runnable([impl], cases, [torch.float64])]


@pytest.mark.parametrize(("setting", "case"), MATRIX, ids=name_of)
def test_gradcheck(setting: Setting, case: Case) -> None:
    inputs = make_inputs(case, torch.float64)

    def outputs(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, lse = tw.attention_with_lse(inputs.q, inputs.k, inputs.v, impl=setting.impl, **inputs.arguments())
        return o, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(outputs, list(inputs.leaves().values()), atol=1e-6)
