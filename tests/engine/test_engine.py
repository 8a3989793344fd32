"""Tokens of the engine are those of transformers, whatever shares the batch, the pages and the steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.tiny import greedy, pair, prompts
from tilewise.core.errors import InputError
from tilewise.engine import Engine, EngineConfig, RequestOutput, SamplingParams

COUNT = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"page_size": 4, "max_batch_tokens": 16, "lag": 1},
    "late": {"page_size": 1, "max_batch_tokens": 24, "lag": 2},
    "few_pages": {"page_size": 4, "max_model_len": 64, "num_pages": 18, "max_batch_tokens": 16, "lag": 1},
    "few_pages_unshared": {"page_size": 4, "max_model_len": 64, "num_pages": 18, "prefix_cache": False},
    "few_slots": {"max_running": 2, "lag": 1},
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
    return Engine(pair(name)[1], config=EngineConfig(**{"max_model_len": 128} | options))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers(name: str, options: str) -> None:
    model = pair(name)[0]
    asked = prompts(5, 40, 1, 23, 40)
    asked[4][:20] = asked[1][:20]
    engine = engine_of(name, **OPTIONS[options])
    ids = [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT)) for prompt in asked]
    for output, prompt in zip(answers(engine, ids), asked, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt, COUNT)
        assert output.outputs[0].finish_reason == "length"
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
    (output,) = answers(engine, [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT, n=5))])
    want = greedy(pair("llama")[0], prompt, COUNT)
    assert [each.token_ids for each in output.outputs] == [want] * 5
    assert len({each.seed for each in output.outputs}) == 5


def test_end_tokens_end_an_answer() -> None:
    (prompt,) = prompts(30)
    want = greedy(pair("llama")[0], prompt, COUNT)
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


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "got no token"),
    "long": ([1] * 128, "fewer than max_model_len, 128"),
    "outside": ([1, 199], "got token 199; expected 0 to 198"),
    "text": ("text", "has no tokenizer"),
    "number": (7, "got int"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_engine_lives(name: str) -> None:
    prompt, words = BAD_PROMPTS[name]
    engine = engine_of("llama")
    with pytest.raises(InputError, match=words):
        engine.add(prompt)
    assert not engine.has_unfinished
    (output,) = answers(engine, [engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))])
    assert len(output.outputs[0].token_ids) == 2


def test_too_few_pages_for_one_sequence_are_refused() -> None:
    with pytest.raises(InputError, match="pages for 64 tokens; expected max_model_len, 128"):
        engine_of("llama", page_size=16, num_pages=4)
