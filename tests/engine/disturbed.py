"""Requests of every kind, answered while something disturbs the engine, and what they have to give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.engine.small import engine_of
from tests.engine.whole import check_empty, check_whole
from tilewise.engine import Engine, RequestOutput, SamplingParams

PREFIX = [(11 * n + n * n) % 300 for n in range(17)]
ASKED: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": ([*PREFIX, 5], SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1)),
    "sampled": ([*PREFIX, 7, 8], SamplingParams(temperature=1.0, max_tokens=7, seed=1, n=2, logprobs=2)),
    "stopped by text": (
        PREFIX[:9],
        SamplingParams(temperature=1.5, max_tokens=9, seed=6, min_tokens=3, stop=["in", "k>I"]),
    ),
    "stopped by a token": (
        [*PREFIX, 5, 6],
        SamplingParams(temperature=1.5, max_tokens=9, seed=3, stop_token_ids=[*range(0, 300, 4)], include_stop=True),
    ),
}
SIZES: dict[str, Any] = {"page_size": 4, "max_batch_tokens": 16}


def ask(engine: Engine) -> None:
    """Add all of them."""
    for name, (prompt, params) in ASKED.items():
        engine.add(prompt, params, request_id=name)


def finish(engine: Engine, told: dict[str, RequestOutput], step: Callable[[], list[RequestOutput]]) -> None:
    """Take steps until all have ended; the engine is whole after each, and empty at the end."""
    for _ in range(200):
        if not engine.has_unfinished:
            break
        told |= {output.request_id: output for output in step()}
        check_whole(engine)
    engine.step()
    check_empty(engine)


def answers(told: dict[str, RequestOutput]) -> dict[str, Any]:
    """What of the outputs has to be the same, numbers apart."""
    return {
        name: (
            [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in told[name].outputs],
            [[each.token for each in one.logprobs or ()] for one in told[name].outputs],
            [each.token for each in told[name].prompt_logprobs or ()],
            [each.error for each in told[name].outputs],
        )
        for name in sorted(told)
    }


@functools.cache
def undisturbed(model: str = "full") -> dict[str, Any]:
    """The answers, each request alone."""
    told: dict[str, RequestOutput] = {}
    for name, (prompt, params) in ASKED.items():
        engine = engine_of(model, num_pages=64)
        engine.add(prompt, params, request_id=name)
        finish(engine, told, engine.step)
    reasons = [each.finish_reason for output in told.values() for each in output.outputs]
    assert model != "full" or sorted(reasons) == ["length", "length", "length", "stop", "stop"]
    return answers(told)
