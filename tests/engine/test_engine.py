"""Tokens of the engine are those of transformers, whatever shares the batch, the pages and the steps."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from tests.engine.tiny import greedy, pair, prompts
from tilewise.core.errors import InputError
from tilewise.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from tilewise.engine.groups import groups_of

COUNT = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"page_size": 4, "max_batch_tokens": 16, "lag": 1},
    "late": {"page_size": 1, "max_batch_tokens": 24, "lag": 2, "graphs": True},
    "few_pages": {
        "graphs": True,
        "page_size": 4,
        "max_model_len": 64,
        "num_pages": 18,
        "max_batch_tokens": 16,
        "lag": 1,
    },
    "few_pages_unshared": {"page_size": 4, "max_model_len": 64, "num_pages": 18, "prefix_cache": False},
    "few_slots": {"max_running": 2, "lag": 1, "graphs": True},
}


def answers(engine: Engine, ids: list[str]) -> list[RequestOutput]:
    """What each request ends with; the bookkeeping is right after every step, and nothing is left."""
    found: dict[str, RequestOutput] = {}
    for _ in range(2000):
        for output in engine.step():
            found[output.request_id] = output
        assert engine.pages.violations() == []
        if not engine.has_unfinished:
            break
    engine.step()
    assert engine.pages.allocator.num_used == 0
    return [found[name] for name in ids]


def engine_of(name: str, **options: Any) -> Engine:
    pages = 1024 // options.get("page_size", 16)  # few, since their bookkeeping is looked at after every step
    return Engine(pair(name)[1], config=EngineConfig(**{"max_model_len": 128, "num_pages": pages} | options))


def few_pages(name: str, options: str) -> dict[str, int]:
    """So few that requests lose theirs to others: what one takes at most, which windows make less, and two."""
    if not options.startswith("few_pages"):
        return {}
    step = OPTIONS[options].get("max_batch_tokens", EngineConfig.max_batch_tokens)
    groups = groups_of(pair(name)[1].config.windows)
    return {"num_pages": sum(group.pages(64, step, 4) for group in groups) + 2}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_windows", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers(name: str, options: str) -> None:
    asked = prompts(5, 28, 1, 13, 28)
    asked[4][:16] = asked[1][:16]
    engine = engine_of(name, **OPTIONS[options] | few_pages(name, options))
    ids = [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT)) for prompt in asked]
    for output, prompt in zip(answers(engine, ids), asked, strict=True):
        assert output.outputs[0].token_ids == greedy(name, prompt, COUNT)
        assert output.outputs[0].finish_reason == "length"
    if engine.pages.groups[0].window is None and len(engine.pages.groups) == 1:  # windows need few pages
        assert (engine.scheduler.preemptions > 0) == options.startswith("few_pages")


def test_a_prefix_is_computed_once_and_its_pages_are_shared() -> None:
    engine = engine_of("llama", page_size=8, max_batch_tokens=64)
    prefix, *rests = prompts(80, *[5] * 16)
    ids = [engine.add(prefix + rest, SamplingParams(temperature=0.0, max_tokens=4)) for rest in rests]
    computed = []
    launch = engine.runner.launch
    engine.runner.launch = lambda work, growth: (computed.extend(each.count for each in work), launch(work, growth))[1]  # type: ignore[method-assign]
    found = answers(engine, ids)
    assert [output.cached_tokens for output in found] == [0, *[80] * 15]
    assert sum(computed) == 80 + 16 * (5 + 3)


def test_answers_of_one_request_share_its_prompt() -> None:
    engine = engine_of("llama", page_size=8, prefix_cache=False)
    (prompt,) = prompts(50)
    counts: list[list[int]] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda work, growth: (counts.append([x.count for x in work]), launch(work, growth))[1]  # type: ignore[method-assign]
    (output,) = answers(engine, [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT, n=5))])
    assert counts == [[50], *[[1] * 5] * (COUNT - 1), [1] * 4]  # the others compute the prompt's last token
    want = greedy("llama", prompt, COUNT)
    assert [each.token_ids for each in output.outputs] == [want] * 5
    assert len({each.seed for each in output.outputs}) == 5


def test_end_tokens_end_an_answer() -> None:
    (prompt,) = prompts(30)
    want = greedy("llama", prompt, COUNT)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, stop_token_ids=[want[5]])
    engine = engine_of("llama", lag=1)
    (output,) = answers(engine, [engine.add(prompt, params)])
    first = want.index(want[5])
    assert output.outputs[0].token_ids == want[: first + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", want[5])


def test_an_abort_gives_back_everything() -> None:
    engine = engine_of("llama", page_size=4, max_batch_tokens=16, lag=1)
    running, prefilling, waiting = (
        engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT)) for prompt in prompts(4, 40, 9)
    )
    for name in (waiting, prefilling, running):
        engine.step()
        engine.abort(name)
    (last,) = [output for output in engine.step() if output.request_id == running]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert engine.pages.allocator.num_used == 0
    assert not engine.has_unfinished
    engine.abort("unknown")


SAMPLED = (
    SamplingParams(temperature=0.9, seed=3, max_tokens=COUNT, n=2, logprobs=3),
    SamplingParams(temperature=1.0, seed=4, top_p=0.8, max_tokens=COUNT),
    SamplingParams(temperature=0.7, seed=5, top_k=9, max_tokens=COUNT, repetition_penalty=1.3),
    SamplingParams(temperature=1.5, seed=6, min_p=0.05, max_tokens=COUNT, presence_penalty=0.5, frequency_penalty=0.2,
                   logit_bias={3: 5.0}, bad_token_ids=[4]),
    SamplingParams(temperature=0.0, max_tokens=COUNT, prompt_logprobs=2, allowed_token_ids=list(range(50))),
)  # fmt: skip


def sampled(order: list[int], **options: Any) -> list[list[list[int]]]:
    asked = prompts(5, 28, 1, 13, 28)
    engine = engine_of("llama", **options)
    ids = {n: engine.add(asked[n], SAMPLED[n]) for n in order}
    found = answers(engine, [ids[n] for n in range(len(SAMPLED)) if n in ids])
    return [[each.token_ids for each in output.outputs] for output in found]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    return [sampled([n])[0] for n in range(len(SAMPLED))]


@pytest.mark.parametrize("options", OPTIONS)
def test_sampled_tokens_depend_on_their_request_alone(options: str, alone: list[list[list[int]]]) -> None:
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        assert sampled(order, **OPTIONS[options]) == alone


def test_n_answers_are_those_of_derived_seeds() -> None:
    (prompt,) = prompts(20)
    engine = engine_of("llama")
    (output,) = answers(engine, [engine.add(prompt, SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=8))])
    for each in output.outputs:
        params = SamplingParams(temperature=1.0, seed=each.seed, max_tokens=8)
        (other,) = answers(engine, [engine.add(prompt, params)])
        assert other.outputs[0].token_ids == each.token_ids


@pytest.mark.parametrize("preempted", [False, True])
def test_log_probabilities_are_those_of_the_model(preempted: bool) -> None:
    (prompt,) = prompts(40)
    engine = engine_of("llama", page_size=4, max_batch_tokens=16, lag=1)
    if preempted:  # once in the middle of the prompt, whose parts are others then, and once in the answer
        engine.advance = _preempting(engine, engine.advance)  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=4, prompt_logprobs=3)
    (output,) = answers(engine, [engine.add(prompt, params)])
    tokens = prompt + output.outputs[0].token_ids
    with torch.no_grad():
        want = pair("llama")[0](torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    found = output.prompt_logprobs + output.outputs[0].logprobs
    assert len(found) == len(tokens) - 1
    for at, each in enumerate(found):
        assert each.token == tokens[at + 1]
        assert each.logprob == pytest.approx(float(want[at, each.token]), abs=1e-4)
        top = want[at].topk(3 if at < len(prompt) - 1 else 4)
        assert [*each.top] == top.indices.tolist()
        assert [*each.top.values()] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_short_answers_do_not_end() -> None:
    (prompt,) = prompts(30)
    first = greedy("llama", prompt, 1)[0]
    engine = engine_of("llama")
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=4, stop_token_ids=[first])
    (output,) = answers(engine, [engine.add(prompt, params)])
    assert first not in output.outputs[0].token_ids[:3]
    assert len(output.outputs[0].token_ids) >= 4


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    good, bad = prompts(9, 9)
    engine = engine_of("llama", lag=1)
    logits = engine.decoder.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        return found.index_fill(0, torch.tensor([found.shape[0] - 1]), torch.nan) if found.shape[0] == 2 else found

    engine.runner.decoder = _With(engine.decoder, logits=broken)  # type: ignore[assignment]
    ids = [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT)) for prompt in (good, bad)]
    first, second = answers(engine, ids)
    assert first.outputs[0].token_ids == greedy("llama", good, COUNT)
    assert second.outputs[0].finish_reason == "error"
    assert "no numbers" in (second.outputs[0].error or "")


def _preempting(engine: Engine, advance: Any) -> Any:
    """`advance` that takes all pages away after its second and sixth call; parts of prompts are longer then."""
    calls = []

    def advancing() -> Any:
        found = advance()
        calls.append(1)
        if len(calls) in (2, 6):
            engine._drain()
            for sample in [*engine.scheduler.running]:
                engine.scheduler.preempt(sample)
            engine.scheduler._config = dataclasses.replace(engine.config, max_batch_tokens=24)
        return found

    return advancing


class _With:
    """An object with some attributes replaced."""

    def __init__(self, of: Any, **replaced: Any) -> None:
        self._of = of
        self.__dict__ |= replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def test_streams_share_steps_and_leaving_one_aborts_it() -> None:
    engine = engine_of("llama")
    short, long = prompts(7, 30)

    async def run() -> list[list[int]]:
        async def whole(prompt: list[int]) -> list[int]:
            seen: list[int] = []
            async for output in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT)):
                assert output.outputs[0].token_ids[: len(seen)] == seen
                seen = output.outputs[0].token_ids
            return seen

        async def part() -> None:
            stream = engine.stream(short, SamplingParams(temperature=0.0, max_tokens=90))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        found, _, other = await asyncio.gather(whole(short), part(), whole(long))
        return [found, other]

    assert asyncio.run(run()) == [greedy("llama", prompt, COUNT) for prompt in (short, long)]
    engine.step()
    assert not engine.has_unfinished
    assert engine.pages.allocator.num_used == 0


def test_no_more_requests_wait_than_may() -> None:
    engine = engine_of("llama", max_waiting=3, max_running=1)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    ids = [engine.add([1, 2, 3], params), engine.add([4, 5], dataclasses.replace(params, n=2))]
    with pytest.raises(InputError, match="requests that wait"):
        engine.add([6], params)
    engine.step()
    ids.append(engine.add([6], params))
    engine.abort(ids[1])
    assert engine.scheduler.num_waiting == 1
    assert [output.finished for output in answers(engine, [ids[0], ids[2]])] == [True, True]
    assert engine.scheduler.num_waiting == 0


def test_too_few_pages_for_one_sequence_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"got 4 pages of 16 tokens; expected 8 pages.*set max_model_len to 64 or less"
    ):
        engine_of("llama", page_size=16, num_pages=4)
    with pytest.raises(InputError, match=r"expected 12 pages, for max_model_len=128 tokens.*to 64 or less"):
        engine_of("qwen2_windows", page_size=16, num_pages=8, max_batch_tokens=32)
