"""Steps padded to a number of requests or tokens that a graph is recorded for; on a CPU nothing is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.tiny import pair, prompts
from tilewise.core.errors import InputError
from tilewise.engine import Engine, EngineConfig, SamplingParams
from tilewise.engine.graphs import StepGraphs, _Step, request_sizes, token_sizes
from tilewise.engine.slot_params import Kind

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    "drawn": SamplingParams(seed=1, max_tokens=6, ignore_eos=True),
    "cut": SamplingParams(seed=2, top_k=30, top_p=0.9, min_p=0.01, max_tokens=6, ignore_eos=True),
    "penalties": SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.2, max_tokens=6, ignore_eos=True),
    "bias": SamplingParams(seed=4, logit_bias={5: 3.0}, bad_token_ids=[7], max_tokens=6, ignore_eos=True),
    "allowed": SamplingParams(seed=5, allowed_token_ids=list(range(40)), max_tokens=6, ignore_eos=True),
    "logprobs": SamplingParams(seed=6, logprobs=2, max_tokens=6, ignore_eos=True),
    "late end": SamplingParams(seed=7, min_tokens=4, max_tokens=6),
}


def engine_of(name: str, **options: Any) -> Engine:
    return Engine(pair(name)[1], config=EngineConfig(**{"max_model_len": 64, "num_pages": 128} | options))


def tokens_of(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    ids = [engine.add(prompt, each) for prompt, each in zip(prompts(*[5] * len(params)), params, strict=True)]
    found: dict[str, list[int]] = {}
    while engine.has_unfinished:
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        assert engine.pages.violations() == []
    return [found[name] for name in ids]


def test_sizes_go_up_to_the_most() -> None:
    assert request_sizes(1) == [1]
    assert request_sizes(3) == [1, 2, 3]
    assert request_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert request_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert token_sizes(5) == [5]
    assert token_sizes(16) == [16]
    assert token_sizes(300) == [16, 32, 64, 128, 256, 300]
    assert token_sizes(1300) == [16, 32, 64, 128, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1300]


@pytest.mark.parametrize("name", ["llama", "qwen2_windows"])
@pytest.mark.parametrize("kinds", [[each] for each in PARAMS] + [["greedy", "drawn", "cut"], list(PARAMS)], ids=str)
def test_tokens_are_those_without(name: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    params = [PARAMS[kind] for kind in kinds]
    params = params * -(-3 // len(params))
    plain = tokens_of(engine_of(name), params)
    seen: list[tuple[int, int, Kind | None]] = []
    decode = StepGraphs.decode

    def watched(self: StepGraphs, slots: torch.Tensor, starts: torch.Tensor, count: int, kind: Any) -> torch.Tensor:
        seen.append((len(slots), count, kind))
        return decode(self, slots, starts, count, kind)

    monkeypatch.setattr(StepGraphs, "decode", watched)
    assert tokens_of(engine_of(name, graphs=True), params) == plain
    assert [count for _, count, _ in seen] == [len(params)] * 5  # the first token comes with the prompt
    assert all(size == next(n for n in (1, 2, 4, 8) if n >= count) for size, count, _ in seen)
    usual = set(kinds) <= {"greedy", "drawn", "cut"}
    assert [kind is not None for _, _, kind in seen] == [usual] * 5 if "late end" not in kinds else True


def test_a_kind_is_what_the_samples_use() -> None:
    engine = engine_of("llama", graphs=True)
    for each in ("greedy", "cut"):
        engine.add([5, 6, 7], PARAMS[each])
    engine.step()
    greedy, cut = engine.scheduler.running
    kind = engine.runner._params.kind
    assert kind([greedy], [1]) == Kind(greedy=True)
    assert kind([greedy, cut], [1, 1]) == Kind(greedy=False, top_k=True, top_p=True, min_p=True)


def test_padding_writes_nothing() -> None:
    engine = engine_of("llama", graphs=True, max_running=8)
    for prompt in prompts(5, 9, 12):
        engine.add(prompt, PARAMS["greedy"])
    engine.step()
    graphs, pool = engine.runner.graphs, engine.pages.pool
    assert graphs is not None
    pages: list[Any] = [x for layer in range(pool.num_layers) for x in pool.pages(layer)]
    before = [x.clone() for x in pages]
    tokens = engine.runner._tokens[:-1].clone()
    padding = torch.full((4,), 8, dtype=torch.int32)
    for kind in (Kind(greedy=True), Kind(greedy=False), None):
        graphs.decode(padding, torch.zeros(4, dtype=torch.int32), 4, kind)
    rows = graphs.rows(16)
    cu = torch.tensor([0, *[16] * rows], dtype=torch.int32)
    graphs.hidden(16, padding.new_full((rows,), 8), padding.new_zeros(rows), cu)
    assert all(torch.equal(one, other) for one, other in zip(before, pages, strict=True))
    assert torch.equal(engine.runner._tokens[:-1], tokens)


def test_where_memory_ends_larger_steps_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", graphs=True, max_running=16)
    graphs = engine.runner.graphs
    assert graphs is not None

    def record(step: _Step, pool: Any) -> None:
        tokens = getattr(step._compute, "_places", None)
        if len(step._compute.inputs[0]) > 4 if tokens is None else len(tokens) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(_Step, "record", record)
    graphs.record()
    assert (graphs.requests, graphs.padded(5, decoding=True)) == ([1, 2, 4], None)
    assert (graphs.tokens, graphs.padded(17, decoding=False)) == ([16], None)
    assert graphs.failed == "no memory for 8 requests (CUDA out of memory.)"
    params = [PARAMS["greedy"]] * 6  # more than any graph has
    assert tokens_of(engine, params) == tokens_of(engine_of("llama"), params)


def test_graphs_are_a_flag() -> None:
    with pytest.raises(InputError, match="graphs: got 'no'"):
        EngineConfig(graphs="no")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="graphs: got 1"):
        EngineConfig(graphs=1)  # type: ignore[arg-type]


def test_graphs_are_for_gpus_unless_said_otherwise() -> None:
    assert [EngineConfig().graphs_on(torch.device(name)) for name in ("cpu", "cuda")] == [False, True]
    assert [EngineConfig(graphs=flag).graphs_on(torch.device("cuda")) for flag in (True, False)] == [True, False]
