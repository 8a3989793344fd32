"""Requests, steps, aborts, preemptions, evictions and faults in any order: bookkeeping holds after each of them, and
each answer is the one that its request gets alone.

There are 1,000 events, and 100,000 with `HYPOTHESIS_PROFILE=thorough`, in about half an hour.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.failing import ERRORS, FAULTS, failing
from tests.engine.small import CONFIGS, LENGTH, engine_of
from tests.engine.whole import check_empty, check_pages, check_prefixes, check_whole
from tilewise.engine import Completion, Engine, RequestOutput, SamplingParams, Speculation
from tilewise.engine.request import State

THOROUGH = settings.default.max_examples > 100
pytestmark = pytest.mark.timeout(4 * 3600 if THOROUGH else 1800)  # seconds
BEGINNINGS = [[(7 * n + 3 * n * n) % 300 for n in range(40)], [(5 * n + 2 * n * n) % 300 for n in range(40)]]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "logprobs": 2},
    "filtered": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {5: 4.0}},
    "tokens that stop": {"temperature": 1.5, "stop_token_ids": tuple(range(0, 300, 4))},
    "text that stops": {"temperature": 1.5, "stop": tuple("ABCDEFGHIJKLMNOP"), "min_tokens": 2},
    "not too short": {"temperature": 0.0, "stop_token_ids": tuple(range(100)), "min_tokens": 3},
    "of the prompt": {"temperature": 0.0, "prompt_logprobs": 1},
}
SPECULATIONS = (
    Speculation("ngram", {"longest": 2, "branches": 3, "length": 3}, nodes=8, learned=False),
    Speculation("suffix+lookahead", {"lookahead": {"window": 2, "ngram": 3}}, nodes=16, learned=False),
    Speculation("ngram+suffix"),
)
SIZES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from((1, 2, 4)),
        "max_batch_tokens": st.sampled_from((5, 16, 64)),
        "max_running": st.sampled_from((2, 8)),
        "prefix_cache": st.sampled_from((True, True, False)),
        "lag": st.sampled_from((0, 1, 1, 2)),
        "graphs": st.booleans(),
        "speculative": st.sampled_from((None, None, *SPECULATIONS)),
    }
)


@functools.cache
def plain(model: str) -> Engine:
    """An engine for one request at a time."""
    return engine_of(model, num_pages=64, prefix_cache=False)


def params_of(kind: str, n: int, most: int, seed: int) -> SamplingParams:
    return SamplingParams(**KINDS[kind], n=n, max_tokens=most, seed=seed)


@functools.cache
def alone(model: str, prompt: tuple[int, ...], *params: Any) -> RequestOutput:
    engine = plain(model)
    engine.add(list(prompt), params_of(*params))
    found: list[RequestOutput] = []
    while engine.has_unfinished:
        found = engine.step()
    return found[0]


def seen(each: Completion) -> tuple[Any, ...]:
    """What has to be the same."""
    return each.token_ids, each.text, each.finish_reason, each.stop_reason, each.seed


class Requests(RuleBasedStateMachine):
    """Everything that happens to an engine with few pages."""

    engine: Engine

    @initialize(model=st.sampled_from(sorted(CONFIGS)), sizes=SIZES, spare=st.integers(0, 6))
    def make(self, model: str, sizes: dict[str, Any], spare: int) -> None:
        groups = 1 if model == "full" else 2
        pages = groups * -(-LENGTH // sizes["page_size"]) + spare
        self.model, self.engine = model, engine_of(model, num_pages=pages, **sizes)
        self.asked: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {}
        self.told: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()

    @rule(
        beginning=st.sampled_from((*range(len(BEGINNINGS)), "an answer")),
        length=st.integers(0, 30),
        end=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        kind=st.sampled_from(sorted(KINDS)),
        n=st.sampled_from((1, 1, 2, 3)),
        most=st.integers(3, 12),
        seed=st.integers(0, 3),
        priority=st.integers(0, 2),
    )
    def add(
        self, beginning: Any, length: int, end: list[int], kind: str, n: int, most: int, seed: int, priority: int
    ) -> None:
        start = self._told_of(length) if beginning == "an answer" else BEGINNINGS[beginning][:length]
        prompt = start[: LENGTH - 8] + end
        name = f"{len(self.asked)}"
        self.asked[name] = (tuple(prompt), (kind, n, most, seed))
        self.engine.add(prompt, params_of(*self.asked[name][1]), request_id=name, priority=priority)

    def _told_of(self, number: int) -> list[int]:
        """A prompt with its answer, which may have ended: as the next turn of a chat begins."""
        if not self.told:
            return BEGINNINGS[0]
        output = list(self.told.values())[number % len(self.told)]
        return output.prompt_token_ids + output.outputs[0].token_ids

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._note(self.engine.step())
            check_whole(self.engine)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        name = data.draw(st.sampled_from(list(self.asked)))
        if name not in self.told or not self.told[name].finished:
            self.aborted.add(name)
        self.engine.abort(name)
        samples = self.engine._requests[name].samples if name in self.engine._requests else []
        assert all(sample.state is State.FINISHED for sample in samples)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.sets(st.integers(0, 7), min_size=1))
    def preempt(self, which: set[int]) -> None:
        self.engine._drain()
        for number, sample in enumerate([*self.engine.scheduler.running]):
            if number in which:
                self.engine.scheduler.preempt(sample)

    @rule(share=st.sampled_from((0.25, 0.5, 1.0)))
    def evict(self, share: float) -> None:
        """Somebody else takes pages, those that wait to be found again too, and leaves NaN in them."""
        pages, pool = self.engine.pages, self.engine.pages.pool
        count = int(pages.allocator.num_available * share)
        taken = pages.allocator.create()
        pages.allocator.append(taken, count * pages.page_size)
        for place in range(pool.num_layers):
            for memory in pool.pages(place):
                assert isinstance(memory, torch.Tensor)
                memory[taken.pages] = torch.nan
        pages.allocator.free(taken)

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(where=st.sampled_from(sorted(FAULTS)), error=st.sampled_from(ERRORS), times=st.integers(1, 2))
    def fault(self, where: str, error: type[BaseException], times: int) -> None:
        for _ in range(times):
            with failing(self.engine, where, error) as fault:
                try:
                    self._note(self.engine.step())
                except error:
                    assert fault.raised
            check_whole(self.engine)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.integers(0, 7))
    def read(self, which: int) -> None:
        running = [*self.engine.scheduler.running]
        check_pages(self.engine, running[which % len(running)])
        check_prefixes(self.engine)

    @invariant()
    def everything_agrees(self) -> None:
        check_whole(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished:
                break
            self.step(1)
        self.step(1)  # takes what a step gave that was under way when the last request ended
        check_empty(self.engine)
        assert set(self.told) == set(self.asked)
        for name, (prompt, params) in self.asked.items():
            self._compare(self.told[name], alone(self.model, prompt, *params), name in self.aborted)

    def _note(self, outputs: list[RequestOutput]) -> None:
        self.told |= {output.request_id: output for output in outputs}

    def _compare(self, found: RequestOutput, want: RequestOutput, aborted: bool) -> None:
        assert found.finished
        for one, other in zip(found.outputs, want.outputs, strict=True):
            if aborted and one.finish_reason == "abort":
                assert one.token_ids == other.token_ids[: len(one.token_ids)]
            else:
                assert seen(one) == seen(other)
                assert [each.token for each in one.logprobs or []] == [each.token for each in other.logprobs or []]
        if found.prompt_logprobs is not None and not aborted:
            assert want.prompt_logprobs is not None
            assert [each.token for each in found.prompt_logprobs] == found.prompt_token_ids[1:]
            values = [[each.logprob for each in logprobs] for logprobs in (found.prompt_logprobs, want.prompt_logprobs)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=1000 if THOROUGH else 20, stateful_step_count=100 if THOROUGH else 50)
