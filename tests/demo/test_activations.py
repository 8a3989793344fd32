"""Queries, keys and values of the demo's model are those that its attention is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewise.core.errors import InputError
from tilewise.demo.activations import Trained, activations, recording
from tilewise.demo.model import Llama, ModelConfig
from tilewise.demo.operators import TORCH_OPERATORS
from tilewise.demo.options import Options

CONFIG = ModelConfig(vocab_size=50, dim=32, num_layers=3, num_heads_q=4, num_heads_kv=2, hidden=48, seqlen=16)


def test_what_attention_is_given_is_recorded_and_nothing_else_changes() -> None:
    given: list[tuple[Tensor, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given.append((q.detach(), k.detach(), v.detach()))
        return TORCH_OPERATORS.attend(q, k, v)

    torch.manual_seed(0)
    model = Llama(CONFIG, replace(TORCH_OPERATORS, attend=attend))
    tokens = torch.randint(50, (2, 16))
    before = model(tokens)
    with recording(model) as layers:
        during = model(tokens)
    assert torch.equal(before, during)
    assert len(layers) == CONFIG.num_layers
    for layer, seen in zip(layers, given[CONFIG.num_layers :], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(layer, seen, strict=True))
        assert [tuple(x.shape) for x in layer] == [(2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8)]
    model(tokens)
    assert len(layers) == CONFIG.num_layers, "a model that is no longer recorded still is"
    with pytest.raises(RuntimeError), recording(model) as others:
        raise RuntimeError
    model(tokens)
    assert not others


def test_activations_are_of_the_model_that_learned() -> None:
    options = Options(size="tiny", steps=1, batch=2, seqlen=32, device="cpu")
    first, again, later = (activations(replace(options, steps=steps)) for steps in (1, 1, 3))
    assert [tuple(x.shape) for x in first[0]] == [(2, 32, 2, 16), (2, 32, 1, 16), (2, 32, 1, 16)]
    assert len(first) == 2
    for one, other, third in zip(first, again, later, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True)), "the same for a seed"
        assert not any(torch.equal(x, y) for x, y in zip(one, third, strict=True))
        assert not any(x.requires_grad for x in one)


def test_longer_sequences_than_it_learns_from() -> None:
    model = Trained.by(Options(size="tiny", steps=1, batch=2, seqlen=32, device="cpu"), longest=48)
    (long, *_), (short, *_) = model.activations(1, 48), model.activations(3, 32)
    assert [tuple(x.shape) for x in long] == [(1, 48, 2, 16), (1, 48, 1, 16), (1, 48, 1, 16)]
    assert [tuple(x.shape) for x in short] == [(3, 32, 2, 16), (3, 32, 1, 16), (3, 32, 1, 16)]
    with pytest.raises(InputError):
        Trained.by(Options(size="tiny", steps=1, batch=2, seqlen=32, device="cpu")).activations(1, 48)
