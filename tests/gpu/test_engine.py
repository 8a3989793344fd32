"""The engine on a GPU: the same bits whatever shares the batch where that is asked for, else the same tokens but for
those between which rounding decides.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tilewise.engine import Engine, EngineConfig, SamplingParams, Speculation
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder

VOCAB, COUNT = 4096, 24
SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 2}
MODELS = {"qwen3": {}, "qwen3_windows": WINDOWS}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"graphs": False},
    "chunks": {"page_size": 16, "max_batch_tokens": 48},
    "late": {"page_size": 1, "max_model_len": 512, "num_pages": 4096, "max_batch_tokens": 128, "lag": 2},
    "at_once": {"lag": 0, "prefix_cache": False},
    "few_pages": {"page_size": 16, "max_model_len": 512, "num_pages": 44, "max_batch_tokens": 64},
    "few_slots": {"max_running": 2},
    "graphs": {"graphs": True, "max_running": 12},
    "ngram": {"speculative": Speculation("ngram+suffix", learned=False), "graphs": False},
    "ngram_graphs": {"speculative": Speculation("ngram", {"longest": 1}, nodes=7, learned=False), "max_running": 12},
    "late_graphs": {"graphs": True, "max_running": 12, "lag": 2, "max_batch_tokens": 64},
}
OTHER_OPTIONS = OPTIONS | {
    "lookahead": {"speculative": Speculation("lookahead+ngram", nodes=60, learned=False)},
}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=3),
    SamplingParams(temperature=0.9, seed=3, max_tokens=COUNT, n=2, logprobs=3),
    SamplingParams(temperature=0.7, seed=5, top_k=40, top_p=0.9, max_tokens=COUNT, logprobs=3),
    SamplingParams(temperature=1.5, seed=6, min_p=0.05, repetition_penalty=1.2, max_tokens=COUNT, logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=3),
    SamplingParams(temperature=1.0, seed=7, max_tokens=COUNT, logprobs=3),
)


@functools.cache
def decoder(name: str, dtype: torch.dtype) -> Decoder:
    """A random one, whose answers vary."""
    found = Decoder(ModelConfig.of(SIZES | MODELS[name]), dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for weight in found.named().values():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.normal_(0.0, 2.0 / weight.shape[1] ** 0.5, generator=generator)
    return found


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (7, 130, 1, 61, 300, 200)]
    found[5][:96] = found[1][:96]  # shared
    return found


def answered(engine: Engine, order: list[int]) -> dict[int, list[Any]]:
    """What each request is answered: tokens with log-probabilities, of each of its answers."""
    ids = {engine.add(prompts()[n], PARAMS[n]): n for n in order}
    found: dict[int, list[Any]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                found[ids[output.request_id]] = [each.logprobs for each in output.outputs]
    assert engine.pages.violations() == []
    assert engine.pages.allocator.num_used == 0
    return found


@functools.cache
def alone(name: str, deterministic: bool, dtype: torch.dtype) -> dict[int, list[Any]]:
    engine = Engine(decoder(name, dtype), config=EngineConfig(num_pages=2048, deterministic=deterministic))
    return {n: answered(engine, [n])[n] for n in range(len(PARAMS))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_deterministic_answers_have_the_bits_of_the_request_alone(name: str, options: str) -> None:
    want = alone(name, True, torch.bfloat16)
    given = {"num_pages": 2048, "deterministic": True} | OPTIONS[options]
    engine = Engine(decoder(name, torch.bfloat16), config=EngineConfig(**given))
    for order in ([0, 1, 2, 3, 4, 5], [4, 5, 2, 0, 3, 1]):
        found = answered(engine, order)
        assert all(found[n] == want[n] for n in range(len(PARAMS))), [n for n in want if found[n] != want[n]]
    assert name != "qwen3" or (engine.scheduler.preemptions > 0) == (options == "few_pages")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", ["plain", "chunks", "few_slots", "graphs", "ngram", "lookahead"])
def test_other_greedy_tokens_come_where_two_are_near(options: str, dtype: torch.dtype) -> None:
    """The first token that differs from the deterministic answer's is one of two whose logits rounding can exchange."""
    model = decoder("qwen3", dtype)
    want = alone("qwen3", True, dtype)
    largest = [0.0]
    engine = Engine(model, config=EngineConfig(**{"num_pages": 2048} | OTHER_OPTIONS[options]))
    given = engine.runner.decoder.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        found = given(hidden)
        largest[0] = max(largest[0], float(found.abs().max()))
        return found

    engine.runner.decoder = _With(model, logits=watched)  # type: ignore[assignment]
    found = answered(engine, [0, 1, 2, 3, 4, 5])
    unit = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-16
    for n in (0, 4):
        for one, other in zip(want[n][0], found[n][0], strict=True):
            if one.token != other.token:
                first, second = list(one.top.values())[:2]
                assert first - second < unit * largest[0]
                break


@pytest.mark.parametrize("kinds", ["greedy", "drawn", "cut", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_graphs_are_those_without(name: str, kinds: str) -> None:
    """Sampling is part of the graph where nobody asks for more than temperature, top-k, top-p and min-p."""
    some = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=COUNT),
        "drawn": SamplingParams(temperature=0.9, seed=3, max_tokens=COUNT, n=2),
        "cut": SamplingParams(temperature=0.7, seed=5, top_k=40, top_p=0.9, min_p=0.01, max_tokens=COUNT),
    }
    params = list(some.values()) if kinds == "all" else [some[kinds]] * 3
    found = []
    for graphs in (False, True):
        config = EngineConfig(num_pages=2048, deterministic=True, graphs=graphs, max_running=12)
        engine = Engine(decoder(name, torch.bfloat16), config=config)
        ids = [engine.add(prompt, each) for prompt, each in zip(prompts(), params, strict=False)]
        ended: dict[str, list[list[int]]] = {}
        while engine.has_unfinished:
            ended |= {out.request_id: [x.token_ids for x in out.outputs] for out in engine.step() if out.finished}
        found.append([ended[one] for one in ids])
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.failed is None
    assert engine.runner.graphs.requests == [1, 2, 4, 8, 12]
    assert engine.runner.graphs.tokens[-1] == 8192
    assert found[0] == found[1]


class _With:
    """A decoder, but for what is given."""

    def __init__(self, decoder: Decoder, **own: Any) -> None:
        self.__dict__.update(own)
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def test_pages_follow_from_the_memory_that_is_left() -> None:
    few, many = (
        Engine(decoder("qwen3", torch.bfloat16), config=EngineConfig(memory=memory)).pages.tokens
        for memory in (0.5, 0.7)  # other processes of these tests have some of it
    )
    assert 0 < few < many
    torch.cuda.empty_cache()


def test_a_step_does_not_wait() -> None:
    """Between `add` and what a step gives, the host waits for nothing."""
    engine = Engine(decoder("qwen3", torch.bfloat16), config=EngineConfig(num_pages=2048, lag=3))
    answered(engine, [0, 1, 2, 3])  # kernels are compiled
    for n in (0, 1, 2, 3):
        engine.add(prompts()[n], PARAMS[n])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_unfinished:
        engine.step()
