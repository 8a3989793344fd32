"""Tokens are those of plain decoding, whatever is proposed for them, and keys and values are those of their texts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.engine.small import CONFIG, CONFIGS, VOCAB, decoder, engine_of
from tests.engine.whole import check_empty, check_pages, check_whole
from tilewise.core.errors import InputError
from tilewise.engine import Completion, Engine, EngineConfig, SamplingParams, Speculation
from tilewise.engine.decoding.draft import Draft
from tilewise.engine.decoding.proposers.adversarial import AdversarialProposer
from tilewise.engine.decoding.proposers.merged import MergedProposer
from tilewise.engine.decoding.proposers.oracle import OracleProposer
from tilewise.engine.decoding.rules import Distance, TopK, Typical
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.request import Sample


def other_decoder() -> Decoder:
    """A draft model that is wrong at times: one layer of the same."""
    found = Decoder(ModelConfig.of(CONFIG | {"num_hidden_layers": 1}), dtype=torch.float32)
    own, whole = found.named(), decoder("full").named()
    for name, weight in own.items():
        weight.copy_(whole[name])
    return found


COUNT = 12
PROMPTS = [[5, 6, 7, 8] * 4, list(range(20, 29)), [9], [*range(40, 52), 5, 6, 7]]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=COUNT),
    "cool": SamplingParams(temperature=0.5, seed=1, max_tokens=COUNT),
    "drawn": SamplingParams(temperature=1.0, seed=2, n=2, max_tokens=COUNT),
    "hot": SamplingParams(temperature=1.5, seed=3, top_k=50, top_p=0.95, min_p=0.001, max_tokens=COUNT),
    "penalties": SamplingParams(
        temperature=0.7, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=COUNT
    ),
    "biases": SamplingParams(
        seed=5, logit_bias={5: 3.0}, bad_token_ids=[6, 7], min_tokens=6, stop_token_ids=[5], max_tokens=COUNT
    ),
    "allowed": SamplingParams(seed=6, allowed_token_ids=list(range(40)), max_tokens=COUNT),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=COUNT),
    "stops": SamplingParams(seed=7, temperature=1.5, stop=["A", "E", "I"], max_tokens=COUNT),
}
METHODS = {
    "ngram": Speculation("ngram", {"length": 4}, nodes=6, learned=False),
    "branches": Speculation("ngram", {"longest": 1, "branches": 4, "length": 3}, nodes=20, learned=False),
    "suffix": Speculation("suffix", {"factor": 3.0}, nodes=12, learned=False),
    "lookahead": Speculation("lookahead", {"window": 3, "ngram": 3}, nodes=24, learned=False),
    "all": Speculation("ngram+suffix+lookahead", {"lookahead": {"window": 2, "ngram": 3}}, nodes=30, learned=False),
    "draft": Speculation("draft", {"length": 4}, draft=decoder("full"), learned=False),
    "drafts": Speculation("draft+ngram", draft=other_decoder(), nodes=12, learned=False),
    "learned_draft": Speculation("draft", draft=other_decoder()),
    "learned": Speculation("ngram+suffix", nodes=30),
    "adversarial": Speculation("ngram", nodes=40, learned=False),
    "oracle": Speculation("ngram", nodes=5, learned=False),
    "mixed": Speculation("ngram", nodes=63, learned=False),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_pages": 80},
    "graphs": {"num_pages": 80, "graphs": True, "max_running": 6},
    "chunks": {"page_size": 4, "num_pages": 200, "max_batch_tokens": 24, "max_running": 4, "prefix_cache": False},
    "few_pages": {"page_size": 2, "num_pages": 70, "max_batch_tokens": 32},
    "late": {"page_size": 1, "num_pages": 800, "lag": 2},
    "int8": {"num_pages": 80, "kv_encoding": "int8"},
}


def answers(engine: Engine, params: list[SamplingParams], first: int = 0, step: int = 1) -> list[list[Completion]]:
    """Of each request; their prompts are those from `first` on, each `step`-th."""
    asked = [(PROMPTS[(first + n * step) % len(PROMPTS)], each) for n, each in enumerate(params)]
    names = [engine.add(prompt, each) for prompt, each in asked]
    found: dict[str, list[Completion]] = {}
    exact, steps = engine.config.kv_encoding is None, 0
    while engine.has_unfinished:
        found |= {output.request_id: output.outputs for output in engine.step()}
        check_whole(engine)
        steps += 1
        if exact and steps % 8 == 0:  # which takes a while
            for sample in engine.scheduler.running:
                check_pages(engine, sample)
    if exact:
        check_empty(engine)
    return [found[name] for name in names]


@functools.cache
def plain(name: str, kv_encoding: str | None) -> list[list[Completion]]:
    """Answers without proposals."""
    return answers(engine_of(name, num_pages=80, kv_encoding=kv_encoding), [seeded(each) for each in PARAMS.values()])


def proposing(name: str, method: str, known: dict[tuple[int, ...], list[int]], **options: Any) -> Engine:
    engine = engine_of(name, speculative=METHODS[method], **options)

    def made(sample: Sample) -> Any:
        text = known[(*sample.request.tokens, sample.seed)]
        if method == "oracle":
            return OracleProposer(text, 5)
        wrong = AdversarialProposer(VOCAB, seed=sample.seed, most=40)
        return wrong if method == "adversarial" else MergedProposer([OracleProposer(text, 3), wrong])

    if method in ("adversarial", "oracle", "mixed"):
        engine.speculators.make = made
    return engine


def texts(params: list[SamplingParams], found: list[list[Completion]]) -> dict[tuple[int, ...], list[int]]:
    """Prompt and answer of each sample, by its prompt and its seed."""
    return {
        (*PROMPTS[n % len(PROMPTS)], each.seed): PROMPTS[n % len(PROMPTS)] + each.token_ids
        for n in range(len(params)) for each in found[n]
    }  # fmt: skip


def seeded(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, seed=9) if params.seed is None else params


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", OPTIONS)
def test_answers_are_those_of_plain_decoding(name: str, method: str, options: str) -> None:
    """A third of the parameters, another one for neighbours."""
    params = [seeded(each) for each in PARAMS.values()]
    want = plain(name, OPTIONS[options].get("kv_encoding"))
    engine = proposing(name, method, texts(params, want), **OPTIONS[options])
    first = ([*METHODS].index(method) + [*OPTIONS].index(options)) % 3
    params, want = params[first::3], want[first::3]
    found = answers(engine, params, first, 3)
    for own, others in zip(found, want, strict=True):
        for one, other in zip(own, others, strict=True):
            assert dataclasses.replace(one, logprobs=None) == dataclasses.replace(other, logprobs=None)
            for mine, its in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert mine.token == its.token
                assert mine.logprob == pytest.approx(its.logprob, abs=1e-3)
    counts = engine.speculators.counts
    assert counts.emitted <= sum(len(each.token_ids) for own in found for each in own)
    assert counts.tokens_per_step >= 1.0


def test_a_proposer_that_knows_the_answer_saves_steps() -> None:
    params = [PARAMS["greedy"]]
    want = answers(engine_of(num_pages=80), params)
    text = PROMPTS[0] + want[0][0].token_ids
    engine = engine_of(speculative=METHODS["oracle"], num_pages=80)
    engine.speculators.make = lambda sample: OracleProposer(text, 5)
    assert answers(engine, params)[0][0].token_ids == want[0][0].token_ids
    counts = engine.speculators.counts
    # the first token comes with the prompt; of 11 others six come in a step, then five
    assert (counts.steps, counts.emitted) == (2, 11)
    assert counts.accepted == counts.proposed == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("kind", ["greedy", "hot", "penalties", "biases"])
def test_a_model_that_drafts_for_itself_is_right(kind: str) -> None:
    """At any temperature, since it draws with the same noise."""
    speculation = Speculation("draft", {"length": 3}, draft=decoder("full"), learned=False)
    engine = engine_of(speculative=speculation, num_pages=80)
    answers(engine, [PARAMS[kind]] * 3)
    counts = engine.speculators.counts
    assert counts.accepted == counts.proposed != []


def test_a_draft_model_needs_pages_of_its_own() -> None:
    """They hold a token less than the request has, and are given back with its own."""
    speculation = Speculation("draft", {"length": 3}, draft=other_decoder(), learned=False)
    engine = engine_of(speculative=speculation, num_pages=80)
    draft = engine.speculators.draft
    assert isinstance(draft, Draft)
    name = engine.add(PROMPTS[0], PARAMS["greedy"])
    while not engine._requests or engine._requests[name].samples[0].finish_reason is None:
        engine.step()
        for sample, one in draft._of.items():
            known = len(one.text)
            assert one.text[: len(sample.tokens) - 1] == sample.tokens[: min(known, len(sample.tokens) - 1)]
            assert known <= one.held.length
        if not engine.has_unfinished:
            break
    assert draft._of == {}
    assert draft._pages.allocator.num_used == 0
    assert draft._pages.violations() == []


def test_a_draft_must_fit() -> None:
    wrong = Decoder(ModelConfig.of(CONFIG | {"vocab_size": VOCAB - 1}), dtype=torch.float32)
    with pytest.raises(InputError, match="draft vocabulary: got 299; expected 300, as the model"):
        engine_of(speculative=Speculation("draft", draft=wrong), num_pages=80)
    with pytest.raises(InputError, match="draft: got no draft model"):
        Speculation("draft")
    with pytest.raises(InputError, match="draft: got a draft model for 'ngram'"):
        Speculation("ngram", draft=wrong)
    with pytest.raises(InputError, match="speculative: got 'draft'; expected a Speculation"):
        EngineConfig(speculative="draft")
    engine = engine_of(speculative="ngram", num_pages=80)
    with pytest.raises(InputError, match="speculative: got draft; expected a method that needs no draft model"):
        engine.add([5], SamplingParams(speculative="draft"))


@pytest.mark.parametrize("kind", ["greedy", "cool", "drawn"])
def test_a_lossy_rule_without_reach_is_plain_decoding(kind: str) -> None:
    """With infinite bounds nothing is accepted; of a greedy model the most likely token, plain decoding's."""
    params = [dataclasses.replace(seeded(PARAMS[kind]), n=1)] * 3
    want = [[each.token_ids for each in own] for own in answers(engine_of(num_pages=80), params)]
    bounds = Typical(float("inf"), float("inf"))
    rules: list[Any] = [bounds, TopK(1), Distance(0.0)] if kind == "greedy" else [bounds]
    for rule in rules:
        speculation = Speculation("ngram+suffix", rule=rule, learned=False)
        found = answers(engine_of(num_pages=80, speculative=speculation), params)
        assert [[each.token_ids for each in own] for own in found] == want
        assert all(each.lossy for own in found for each in own)


def test_a_lossy_rule_keeps_more_and_says_so() -> None:
    params = [dataclasses.replace(PARAMS["drawn"], n=1), dataclasses.replace(PARAMS["drawn"], n=1, speculative=False)]
    plain_ = answers(engine_of(num_pages=80), params)
    engine = engine_of(num_pages=80, speculative=Speculation("ngram", rule=TopK(VOCAB), learned=False))
    engine.speculators.make = lambda sample: OracleProposer([*sample.request.tokens, *range(5, 5 + COUNT)], 5)
    lossy, other = answers(engine, params)
    assert lossy[0].lossy
    assert not other[0].lossy
    assert lossy[0].token_ids[1:6] == [6, 7, 8, 9, 10]  # every token that was proposed stays
    assert other[0].token_ids == plain_[1][0].token_ids
    assert engine.speculators.counts.accepted == engine.speculators.counts.proposed
    for wrong in ({"top_k": 5}, {"logprobs": 1}, {"repetition_penalty": 1.1}):
        with pytest.raises(InputError, match="expected temperature alone under a lossy rule"):
            engine.add([5], SamplingParams(**wrong))
    with pytest.raises(InputError, match="rule: got 'typical'; expected Typical, TopK or Distance"):
        Speculation("ngram", rule="typical")  # type: ignore[arg-type]


def test_requests_choose_for_themselves() -> None:
    engine = engine_of(speculative="ngram", num_pages=80)
    names = [
        engine.add(PROMPTS[0], dataclasses.replace(PARAMS["greedy"], speculative=how))
        for how in (None, False, "suffix")
    ]
    engine.step()
    wanted = [engine.speculators.wants(engine._requests[name].samples[0]) for name in names]
    assert wanted == [True, False, True]
    while engine.has_unfinished:
        engine.step()
    check_empty(engine)


def test_bad_input() -> None:
    for bad in ("nothing", "ngram+ngram", "ngram+", 3, True):
        with pytest.raises(InputError, match="speculative: got"):
            EngineConfig(speculative=bad)  # type: ignore[arg-type]
    for wrong in ("nothing", True, 3):
        with pytest.raises(InputError, match="speculative: got"):
            SamplingParams(speculative=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="options of ngram: got 'window'; expected references, longest"):
        Speculation("ngram", {"window": 3})
    with pytest.raises(InputError, match="options: got 'longest'; expected ngram, suffix"):
        Speculation("ngram+suffix", {"longest": 3})
    with pytest.raises(InputError, match="longest: got"):
        Speculation("ngram", {"longest": 0})
    with pytest.raises(InputError, match="nodes: got 64; expected at most 63"):
        Speculation("ngram", nodes=64)
    with pytest.raises(InputError, match="nodes"):
        Speculation("ngram", nodes=0)
