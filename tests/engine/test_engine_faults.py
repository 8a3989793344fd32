"""What an engine does when a part of it raises: the caller gets the exception, and the engine goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.disturbed import ASKED, SIZES, answers, ask, finish, undisturbed
from tests.engine.failing import ERRORS, FAULTS, failing
from tests.engine.small import engine_of
from tests.engine.whole import check_empty, check_pages, check_prefixes, check_whole, samples_of
from tilewise.engine import Engine, RequestOutput, SamplingParams
from tilewise.engine.request import State

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("where", FAULTS)
def test_a_step_that_raises_does_not_count(where: str) -> None:
    """One engine after the other, each at a later step."""
    raised = 0
    for number, error in zip((0, 2, 5, 7, 10), itertools.cycle(ERRORS)):
        engine, told = engine_of(**SIZES, lag=number % 2), {}
        ask(engine)
        for _ in range(number):
            told |= {output.request_id: output for output in engine.step()}
        with failing(engine, where, error) as fault:
            try:
                told |= {output.request_id: output for output in engine.step()}
            except error:
                assert fault.raised
                raised += 1
        check_whole(engine)
        finish(engine, told, engine.step)
        assert answers(told) == undisturbed()
    assert raised


@pytest.mark.parametrize("number", range(8))
def test_a_text_is_made_anew_where_a_token_of_it_raised(number: int) -> None:
    """With characters that are not complete, and the beginning of a stop string, held back at that token."""
    name = "stopped by text"
    engine, told = engine_of(), {}
    engine.add(*ASKED[name], request_id=name)
    for _ in range(number):
        told |= {output.request_id: output for output in engine.step()}
    with failing(engine, "text", RuntimeError), pytest.raises(RuntimeError, match="at text"):
        engine.step()
    check_whole(engine)
    finish(engine, told, engine.step)
    assert answers(told)[name] == undisturbed()[name]


def stepping(engine: Engine, where: str, *, every: int) -> Callable[[], list[RequestOutput]]:
    """`engine.step`, of whose calls each one in `every` raises, and gives nothing."""
    numbers = itertools.count(1)

    def step() -> list[RequestOutput]:
        if next(numbers) % every:
            return engine.step()
        with failing(engine, where, RuntimeError):
            try:
                return engine.step()
            except RuntimeError:
                return []

    return step


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("where", ["last layer", "take", "second text"])
def test_answers_come_although_every_sixth_step_raises(where: str, lag: int) -> None:
    engine, told = engine_of(**SIZES, lag=lag), {}
    ask(engine)
    finish(engine, told, stepping(engine, where, every=6))
    assert answers(told) == undisturbed()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("where", ["last layer", "take", "second text", "second grow"])
@pytest.mark.parametrize("model", ["full", "windows"])
def test_answers_come_although_every_second_step_raises(model: str, where: str, lag: int) -> None:
    """Without shared pages, and with prompts of several steps: what was computed before stays."""
    engine, told = engine_of(model, **SIZES | {"max_batch_tokens": 5}, prefix_cache=False, lag=lag), {}
    ask(engine)
    finish(engine, told, stepping(engine, where, every=2))
    assert answers(told) == undisturbed(model)


def test_what_was_computed_before_is_found_again() -> None:
    engine, told = engine_of(page_size=4, num_pages=64), {}
    prompt = list(range(40))
    engine.add(prompt, GREEDY, request_id="one")
    engine.step()
    counts = []
    with failing(engine, "first layer", RuntimeError), pytest.raises(RuntimeError, match="at first layer"):
        engine.step()
    launch = engine.runner.launch
    engine.runner.launch = lambda work, growth: (counts.append(work[0].count), launch(work, growth))[1]  # type: ignore[method-assign]
    finish(engine, told, engine.step)
    assert counts[0] == 1  # of 41 tokens 40 were computed
    assert len(told["one"].outputs[0].token_ids) == 8


def test_a_page_that_was_to_be_copied_is_computed_anew() -> None:
    """The last token of a full page is computed again, since the next one was lost: in a copy of the page, because
    others may begin with it.
    """
    engine, told, prompt = engine_of(page_size=4, num_pages=64), {}, list(range(8))
    engine.add(prompt, GREEDY, request_id="one")
    with failing(engine, "take", RuntimeError), pytest.raises(RuntimeError, match="at take"):
        engine.step()
    (sample,) = samples_of(engine)
    assert sample.computed == 7
    with failing(engine, "send", RuntimeError), pytest.raises(RuntimeError, match="at send"):
        engine.step()
    assert sample.computed == 4
    check_pages(engine, sample)
    check_prefixes(engine)
    finish(engine, told, engine.step)
    assert told["one"].outputs[0].token_ids == _greedy(prompt, 8)


@pytest.mark.parametrize("number", range(1, 5))
def test_answers_that_share_a_page_compute_it_anew_where_it_was_not_copied(number: int) -> None:
    """The answers share a page of their prompt until each writes into one of its own."""
    engine, told = engine_of(page_size=4, num_pages=64, prefix_cache=False), {}
    engine.add([3, 1, 4, 1, 5, 9], SamplingParams(temperature=0.0, max_tokens=8, n=3), request_id="all")
    for _ in range(number):
        engine.step()
    with failing(engine, "send", RuntimeError), pytest.raises(RuntimeError, match="at send"):
        engine.step()
    for sample in samples_of(engine):
        if sample.state is State.RUNNING:
            check_pages(engine, sample)
    finish(engine, told, engine.step)
    assert [each.token_ids for each in told["all"].outputs] == [_greedy([3, 1, 4, 1, 5, 9], 8)] * 3


def test_an_answer_does_not_begin_with_a_page_that_is_just_copied() -> None:
    """The first one goes on in a copy of its page; the second one, which shares that, waits for it."""
    engine, told = engine_of(page_size=4, num_pages=64, max_running=2), {}
    engine.add([7, 7, 7], SamplingParams(temperature=0.0, max_tokens=3))
    engine.add([3, 1, 4, 1, 5, 9], SamplingParams(temperature=0.0, max_tokens=8, n=2), request_id="both")
    for _ in range(2):
        engine.step()
    with failing(engine, "second text", RuntimeError), pytest.raises(RuntimeError, match="at second text"):
        engine.step()
    first = next(sample for sample in samples_of(engine) if sample.request.request_id == "both")
    assert first.computed == 7
    assert engine.pages.needed(first.sequence, 1) == 1  # type: ignore[arg-type]
    for _ in range(2):
        engine.step()
        for sample in engine.scheduler.running:
            check_pages(engine, sample)
    assert len(engine.scheduler.running) == 2
    finish(engine, told, engine.step)
    assert [each.token_ids for each in told["both"].outputs] == [_greedy([3, 1, 4, 1, 5, 9], 8)] * 2


def test_nobody_finds_pages_of_a_step_that_fails_on_the_device() -> None:
    """It was launched, and others may begin with its pages from then on: until its failure is known."""
    engine, told, prompt = engine_of(page_size=4, num_pages=64, lag=1), {}, list(range(20))
    engine.add(prompt, GREEDY, request_id="one")
    engine.step()
    assert engine.pages.matched(prompt) == 16
    for memory in engine.pages.pool.pages(0):
        assert isinstance(memory, torch.Tensor)
        memory.fill_(torch.nan)
    with failing(engine, "wait", RuntimeError), pytest.raises(RuntimeError, match="at wait"):
        engine.step()
    assert engine.pages.matched(prompt) == 0
    check_whole(engine)
    engine.add(prompt, GREEDY, request_id="other")
    finish(engine, told, engine.step)
    for name in ("one", "other"):
        assert told[name].outputs[0].token_ids == _greedy(prompt, 8)


def test_an_answer_that_ends_while_a_step_is_planned_leaves_no_page_that_nobody_wrote() -> None:
    """Its next token was planned, and the host then learns that it has ended: the one that needs a page drains. That
    token's keys and values are never computed, although it is the last of a page.
    """
    first, ends, needs = [7, 8, 9], list(range(8)), [1, 2, 3, 4, 5]
    (stop,) = _greedy(ends, 4)[3:]
    assert stop not in _greedy(ends, 3)
    engine, told = engine_of(max_model_len=20, page_size=4, num_pages=7, lag=1), {}
    engine.add(first, SamplingParams(temperature=0.0, max_tokens=4))
    engine.add(ends, SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=[stop]), request_id="ends")
    engine.add(needs, SamplingParams(temperature=0.0, max_tokens=10))
    while "ends" not in told or not told["ends"].finished:
        told |= {output.request_id: output for output in engine.step()}
    assert engine.pages.matched([*ends, *told["ends"].outputs[0].token_ids, 0]) == 8
    check_prefixes(engine)
    finish(engine, told, engine.step)


def test_a_request_whose_logits_are_no_numbers_leaves_pages_that_others_use() -> None:
    engine, told = engine_of(page_size=4, prefix_cache=False), {}
    engine.add(list(range(24)), GREEDY, request_id="bad")
    engine.add([3, 4, 5], GREEDY, request_id="good")
    engine.step()
    (bad,) = [sample for sample in samples_of(engine) if sample.request.request_id == "bad"]
    assert bad.sequence is not None
    for memory in engine.pages.pool.pages(0):
        assert isinstance(memory, torch.Tensor)
        memory[bad.sequence.parts[0].pages] = torch.nan
    finish(engine, told, engine.step)
    assert told["bad"].outputs[0].finish_reason == "error"
    assert "no numbers" in (told["bad"].outputs[0].error or "")
    assert told["good"].outputs[0].token_ids == _greedy([3, 4, 5], 8)
    long = list(range(30, 60))
    engine.add(long, GREEDY, request_id="later")
    finish(engine, told, engine.step)
    assert told["later"].outputs[0].token_ids == _greedy(long, 8)


@pytest.mark.parametrize("lag", [0, 1])
def test_pages_for_one_sequence_alone_answer_all(lag: int) -> None:
    """Each of them grows to the last page that there is, and all others lose theirs."""
    engine, told = engine_of(max_model_len=28, page_size=4, num_pages=7, lag=lag), {}
    asked = {f"{n}": ([n, n + 1, n + 2], SamplingParams(temperature=0.0, max_tokens=25, n=1 + n % 2)) for n in range(4)}
    for name, (prompt, params) in asked.items():
        engine.add(prompt, params, request_id=name, priority=int(name) % 3)
    finish(engine, told, engine.step)
    assert engine.scheduler.preemptions > 4
    for name, (prompt, _) in asked.items():
        assert all(each.token_ids == _greedy(prompt, 25) for each in told[name].outputs)


def test_who_asks_for_log_probabilities_of_a_prompt_lets_others_begin_with_it() -> None:
    """Its pages are not shared, so that nobody waits for them."""
    engine = engine_of(page_size=4, num_pages=64)
    prompt = list(range(12))
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=0))
    engine.step()
    engine.add(prompt, GREEDY, request_id="other")
    engine.step()
    (other,) = [sample for sample in samples_of(engine) if sample.request.request_id == "other"]
    assert other.state is State.RUNNING


def test_streams_get_the_exception_and_leave_nothing() -> None:
    engine = engine_of()

    async def run(where: str | None) -> list[Any]:
        async def whole(prompt: list[int]) -> list[int]:
            seen: list[int] = []
            async for output in engine.stream(prompt, GREEDY):
                seen = output.outputs[0].token_ids
            return seen

        both = asyncio.gather(whole([1, 2, 3]), whole([4, 5]), return_exceptions=True)
        if where is None:
            return await both
        with failing(engine, where, RuntimeError):
            return await both

    assert [type(found) for found in asyncio.run(run("last layer"))] == [RuntimeError] * 2
    engine.step()
    check_empty(engine)
    assert asyncio.run(run(None)) == [_greedy([1, 2, 3], 8), _greedy([4, 5], 8)]


def test_the_kinds_of_requests_are_all_there() -> None:
    assert set(undisturbed()) == set(ASKED)


def _greedy(prompt: list[int], count: int) -> list[int]:
    engine: Engine = engine_of(num_pages=64)
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=count))
    found: list[RequestOutput] = []
    while engine.has_unfinished:
        found = engine.step()
    return found[0].outputs[0].token_ids
