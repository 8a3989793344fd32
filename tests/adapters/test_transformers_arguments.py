"""`attention_forward` of the transformers adapter, called directly: bad arguments, masks compiled, no prepared mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.adapters.dense import assert_close, dense, leaves
from tilewise.adapters import transformers as adapter
from tilewise.core.errors import InputError

LAYER = torch.nn.Module()
OF_FIVE = torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("attention_mask: got shape", {"attention_mask": torch.ones(1, 5, 5, dtype=torch.bool)}),
        ("attention_mask: got str", {"attention_mask": "x"}),
        ("attention_mask: got torch.int64", {"attention_mask": torch.ones(1, 1, 5, 5).long()}),
        ("position_bias: got shape", {"position_bias": torch.ones(5, 5)}),
        ("position_bias: got list", {"position_bias": [1]}),
        ("cu_seq_lens_q: got list", {"cu_seq_lens_q": [0, 5]}),
        ("cu_seq_lens_q: got first 0, last 4", {"cu_seq_lens_q": torch.tensor([0, 2, 4])}),
        ("cu_seq_lens_q: got first 0, last 6", {"cu_seq_lens_q": torch.tensor([0, 6])}),
        ("cu_seq_lens_q: got first 1, last 5", {"cu_seq_lens_q": torch.tensor([1, 5])}),
        ("cu_seq_lens_q: got 2 after 3", {"cu_seq_lens_q": torch.tensor([0, 3, 2, 5])}),
        ("cu_seq_lens_k: got first 0, last 7", {"cu_seq_lens_q": OF_FIVE, "cu_seq_lens_k": torch.tensor([0, 2, 7])}),
        ("cu_seq_lens_k: got other lengths", {"cu_seq_lens_q": OF_FIVE, "cu_seq_lens_k": torch.tensor([0, 3, 5])}),
        ("cu_seq_lens_q: got torch.float32", {"cu_seq_lens_q": torch.tensor([0.0, 5.0])}),
        (r"cu_seq_lens_q: got torch.int64 \(0,\)", {"cu_seq_lens_q": torch.tensor([], dtype=torch.int64)}),
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


@pytest.mark.parametrize("queries", [1, 5, 9, 12])
@pytest.mark.parametrize(("window", "padded"), [(2, False), (2, True), (None, True)])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_prepared_mask_padding_and_windows_are_flash_attentions(
    queries: int, window: int | None, causal: bool, padded: bool
) -> None:
    """The last query stands at the last key: a step over a cache sees the newest keys, not the oldest."""
    layer = torch.nn.Module()
    q, k, v = (x.detach() for x in leaves((2, 2, queries, 8), (2, 2, 9, 8), (2, 2, 9, 8)))
    padding = torch.tensor([[1] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1]]) if padded else None
    o, _ = adapter.attention_forward(layer, q, k, v, padding, is_causal=causal, sliding_window=window)
    apart = torch.arange(queries)[:, None] + (9 - queries) - torch.arange(9)
    keep = (apart >= 0) if causal else torch.ones_like(apart, dtype=torch.bool)
    keep = keep & (apart.abs() < (window or 100))
    keep = keep & (torch.ones(2, 1, 1, 9) if padding is None else padding[:, None, None]).bool()
    assert_close(o.transpose(1, 2), *(dense(*(x.to(t) for x in (q, k, v)), keep)[0]
                                      for t in (torch.float64, torch.float32)))  # fmt: skip


def test_padding_over_no_keys() -> None:
    """Its last 0 columns count, whatever it has."""
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 0, 8)
    for columns in (0, 3):
        o, _ = adapter.attention_forward(LAYER, q, k, k, torch.ones(1, columns))
        assert not o.any()
