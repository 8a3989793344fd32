"""Who starts, and who loses its pages: by priority, then by arrival, in any schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.host import host_engine
from tests.engine.whole import samples_of
from tilewise.engine import Engine, SamplingParams
from tilewise.engine.request import Sample, State
from tilewise.engine.scheduler import _PASSED_OVER

LENGTH = 24
REQUEST = st.tuples(st.integers(1, 16), st.integers(1, 8))  # tokens of a prompt, and of an answer


def ask(engine: Engine, sizes: tuple[int, int], priority: int = 0) -> str:
    """A request of these sizes."""
    params = SamplingParams(temperature=0.0, max_tokens=sizes[1], ignore_eos=True)
    return engine.add([1] * sizes[0], params, priority=priority)


def in_state(engine: Engine, state: State) -> set[Sample]:
    return {sample for sample in samples_of(engine) if sample.state is state}


def few_pages(spare: int, budget: int, lag: int) -> Engine:
    """Pages of two tokens, for one long request and a few more."""
    pages = LENGTH // 2 + spare
    return host_engine(
        max_model_len=LENGTH, page_size=2, num_pages=pages, max_running=4, max_batch_tokens=budget, lag=lag
    )


@settings(max_examples=60)
@given(
    coming=st.lists(st.lists(st.tuples(REQUEST, st.integers(0, 2)), max_size=3), min_size=4, max_size=16),
    spare=st.integers(0, 6),
    budget=st.sampled_from((3, 8, 64)),
    lag=st.integers(0, 1),
)
def test_the_first_start_first_and_the_last_lose_their_pages_first(
    coming: list[list[tuple[tuple[int, int], int]]], spare: int, budget: int, lag: int
) -> None:
    engine = few_pages(spare, budget, lag)
    preempt = engine.scheduler.preempt

    def preempting(sample: Sample) -> None:
        assert sample.order == max(each.order for each in engine.scheduler.running)
        preempt(sample)

    engine.scheduler.preempt = preempting  # type: ignore[method-assign]
    for requests in [*coming, *[[]] * 1000]:
        for sizes, priority in requests:
            ask(engine, sizes, priority)
        before = in_state(engine, State.RUNNING)
        engine.step()
        started = in_state(engine, State.RUNNING) - before
        waiting = in_state(engine, State.WAITING)
        assert not started or not waiting or max(x.order for x in started) < min(x.order for x in waiting)
        assert engine.pages.violations() == []
    assert not engine.has_unfinished


@settings(max_examples=30)
@given(
    before=st.lists(REQUEST, max_size=6),
    stream=st.lists(REQUEST, min_size=1, max_size=4),
    spare=st.integers(0, 6),
    budget=st.sampled_from((3, 8, 64)),
    lag=st.integers(0, 1),
)
def test_no_stream_of_later_requests_starves_one(
    before: list[tuple[int, int]], stream: list[tuple[int, int]], spare: int, budget: int, lag: int
) -> None:
    """Two more come in every step, as urgent or less: it ends after as many steps as those before it need one by one,
    those that ran when it came, and itself.
    """
    engine = few_pages(spare, budget, lag)
    for sizes in before:
        ask(engine, sizes)
    for _ in range(3):
        engine.step()
    name = ask(engine, (16, 8))
    alone = [-(-prompt // budget) + answer + lag for prompt, answer in [*before, (16, 8)]]
    for number in range(sum(alone) + 1):
        for priority in (0, 1):
            ask(engine, stream[number % len(stream)], priority)
        if any(output.request_id == name and output.finished for output in engine.step()):
            return
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("n", [1, 100])
def test_a_step_looks_at_few_of_those_that_wait(n: int) -> None:
    """Of many that all wait for the first one's prompt, which takes several steps beside others."""
    engine = host_engine(page_size=4, num_pages=4000, max_running=300, max_batch_tokens=24, prefix_cache=True)
    engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=60))
    engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=2, n=n)
    for _ in range(2000 // n):
        engine.add([*range(50)], params)
    scheduler, looked = engine.scheduler, [0]
    awaits = scheduler._awaits_another

    def looking(sample: Sample, filling: Any) -> bool:
        looked[0] += 1
        return awaits(sample, filling)

    scheduler._awaits_another = looking  # type: ignore[method-assign]
    deferred = 0
    while engine.has_unfinished:
        before, looked[0] = scheduler.num_waiting, 0
        engine.step()
        started = before - scheduler.num_waiting
        assert looked[0] - started <= _PASSED_OVER
        deferred = max(deferred, looked[0] - started)
    assert deferred == _PASSED_OVER
