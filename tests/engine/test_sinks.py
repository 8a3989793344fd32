"""Attention sinks in the engine: a decoder that has them, over layers of all keys and of a window."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tilewise as tw
from tests.engine.small import CONFIGS, VOCAB, decoder
from tests.engine.test_engine import answers
from tilewise.core.errors import InputError
from tilewise.engine import Engine, EngineConfig, SamplingParams
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder, Norms
from tilewise.engine.models.weights import load_weights

COUNT = 8
PROMPTS = [[(7 * n + start) % VOCAB for n in range(length)] for start, length in ((0, 5), (3, 28), (9, 1), (3, 30))]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_pages": 64},
    "chunks": {"page_size": 4, "max_batch_tokens": 16, "lag": 1, "num_pages": 64},
    "few_pages": {"page_size": 4, "num_pages": 18, "max_batch_tokens": 8, "prefix_cache": False},
    "int8": {"num_pages": 64, "kv_encoding": "int8"},
}


@functools.cache
def with_sinks() -> Decoder:
    """The small decoder with windows, and sinks about as large as its scores."""
    found = Decoder(replace(ModelConfig.of(CONFIGS["windows"]), sinks=True), dtype=torch.float32)
    plain, generator = decoder("windows").named(), torch.Generator().manual_seed(1)
    for name, place in found.named().items():
        if name.endswith("self_attn.sinks"):
            place.uniform_(0.0, 3.0, generator=generator)
        else:
            place.copy_(plain[name])
    return found


@torch.no_grad()
def at_once(prompt: list[int]) -> tuple[list[int], list[float]]:
    """(greedy tokens, their log-probabilities), with a column of sinks beside the scores."""
    model, tokens, values = with_sinks(), list(prompt), []
    for _ in range(COUNT):
        hidden = model.hidden(torch.tensor(tokens), functools.partial(_attend, model, len(tokens)))
        value, token = model.logits(hidden[-1:])[0].log_softmax(-1).max(-1)
        tokens.append(int(token))
        values.append(float(value))
    return tokens[len(prompt) :], values


def _attend(model: Decoder, length: int, layer: int, qkv: torch.Tensor, _: Norms) -> torch.Tensor:
    config, sink = model.config, model.layers[layer].sink
    assert sink is not None
    q, k, v = torch.split(qkv, [config.num_heads, config.num_heads_kv, config.num_heads_kv], 1)
    q, k = (tw.rope(x, rope=tw.Rope(*model.rope_tables(length), torch.arange(length))) for x in (q, k))
    k, v = (x.repeat_interleave(config.num_heads // config.num_heads_kv, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k).double() * config.head_dim**-0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (config.windows[layer] or length))
    scores = torch.cat([scores.masked_fill(hidden, -torch.inf), sink.double()[:, None, None].expand(-1, length, 1)], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :-1], v.double()).float()


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_those_of_softmax_with_a_sink(options: str) -> None:
    engine = Engine(with_sinks(), config=EngineConfig(max_model_len=48, **OPTIONS[options]))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=0)
    for prompt, output in zip(PROMPTS, answers(engine, [engine.add(each, params) for each in PROMPTS]), strict=True):
        tokens, values = at_once(prompt)
        found = [each.logprob for each in output.outputs[0].logprobs or []]
        if options != "int8":
            assert output.outputs[0].token_ids == tokens
            assert found == pytest.approx(values, abs=1e-4)
        else:  # half a step of 127 for each number
            assert found[0] == pytest.approx(values[0], abs=0.1)


def test_sinks_are_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    wanted = with_sinks().named()
    assert [name for name in wanted if "sinks" in name] == [f"model.layers.{n}.self_attn.sinks" for n in range(2)]
    save_file({name: weight.contiguous() for name, weight in wanted.items()}, tmp_path / "model.safetensors")
    found = Decoder(with_sinks().config, dtype=torch.float32)
    load_weights(found, tmp_path)
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.named().items())
    with pytest.raises(InputError, match=r"self_attn\.sinks: .*expected no tensor of this name"):
        load_weights(Decoder(ModelConfig.of(CONFIGS["windows"]), dtype=torch.float32), tmp_path)
