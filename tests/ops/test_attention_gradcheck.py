"""Derivatives against finite differences in float64: q, k, v, sink, captured tensors, through o and through lse."""

from __future__ import annotations

import pytest
import torch

from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.properties import Setting, can_run

SMALL = {"batch": 2, "seqlen_q": 4, "seqlen_k": 5, "head_dim": 3, "head_dim_v": 2}
NAMES = ("causal", "alibi_causal", "softcap_causal", "relative_bias", "bias", "bias_batch", "temperature",
"many_operations",
         "sink_causal", "sink_alibi", "lse_gradient", "lse_gradient_everything", "capped_alibi", "gqa_4", "dropout",
         "scale")  # fmt: skip
PACKED = ("packed_cross_causal", "packed_window_sink")
CASE_LIST = [CASES[name].with_(**SMALL) for name in NAMES]
CASE_LIST += [CASES[name].with_(head_dim=3, head_dim_v=2, packed=((2, 3), (0, 2), (3, 1))) for name in PACKED]


@pytest.mark.parametrize("impl", ["cpu_sdpa", "cpu_tiled", "reference"])
@pytest.mark.parametrize("case", CASE_LIST, ids=repr)
def test_gradcheck(impl: str, case: Case) -> None:
    if not can_run(Setting(impl, torch.float64), case):
        assert impl == "cpu_sdpa"
        return
    inputs = make_inputs(case, torch.float64)
    leaves = list(inputs.leaves().values())

    def outputs(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import tilewise as tw

        o, lse = tw.attention_with_lse(inputs.q, inputs.k, inputs.v, impl=impl, **inputs.arguments())
        finite = lse.isfinite()
        return o, lse[finite]

    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=False, atol=1e-6)
