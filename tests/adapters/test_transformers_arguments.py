"""`attention_forward` of the transformers adapter, called directly: bad arguments, masks compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.adapters.dense import leaves
from tilewise.adapters import transformers as adapter
from tilewise.core.errors import InputError

LAYER = torch.nn.Module()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("attention_mask: got shape", {"attention_mask": torch.ones(1, 5, 5, dtype=torch.bool)}),
        ("attention_mask: got str", {"attention_mask": "x"}),
        ("attention_mask: got torch.int64", {"attention_mask": torch.ones(1, 1, 5, 5).long()}),
        ("position_bias: got shape", {"position_bias": torch.ones(5, 5)}),
        ("position_bias: got list", {"position_bias": [1]}),
        ("cu_seq_lens_q: got list", {"cu_seq_lens_q": [0, 5]}),
        ("softcap", {"softcap": "x"}),
        ("key: got list", {"key": [1]}),
    ],
)
def test_a_wrong_argument_is_named(name: str, given: dict[str, Any]) -> None:
    q, k, v = leaves((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    with pytest.raises(InputError, match=f"{name}.* Hint: "):
        adapter.attention_forward(LAYER, **{"query": q, "key": k, "value": v, **given})


@pytest.mark.parametrize("kind", ["padding", "bool", "float"])
def test_masks_compile_in_one_graph(kind: str) -> None:
    tensors = [x.detach() for x in leaves((2, 4, 20, 16), (2, 2, 33, 16), (2, 2, 33, 16))]
    shape = (2, 33) if kind == "padding" else (2, 1, 20, 33)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1)) > -0.5
    if kind == "float":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    compiled = torch.compile(adapter.attention_forward, fullgraph=True, backend="aot_eager")
    found, expected = (run(LAYER, *tensors, mask)[0] for run in (compiled, adapter.attention_forward))
    torch.testing.assert_close(found, expected)
