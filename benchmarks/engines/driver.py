"""Runs a workload: sends requests when they come, and notes when their tokens are there."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.engines.workloads import Request, Workload

LONGEST_WAIT_S = 1.0


@dataclass(frozen=True)
class Run:
    """A workload that was answered.

    Attributes:
        seconds: from the first request to the last token.
        first: seconds from a request to its first token, each.
        between: seconds from a token to the next one of the same request, each.
    """

    seconds: float
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Answered:
    """Tokens of a request that are new: moments at which they were there, and all of them when it has ended."""

    key: int
    times: Sequence[float]
    answer: Sequence[int] | None


class Contender(Protocol):
    """Who answers requests, some at a time."""

    def add(self, key: int, request: Request) -> None:
        """Take a request."""

    def step(self, wait: float) -> Sequence[Answered]:
        """What is new: a step of its own computed, or what others have done meanwhile, waited for so many seconds."""


def drive(contender: Contender, workload: Workload) -> Run:
    """Send a workload's requests at their times, and the turns that follow from answers at once.

    Raises:
        RuntimeError: an answer has another length than was asked for.
    """
    coming = deque(sorted(workload.requests, key=lambda request: request.arrival))
    keys = itertools.count()
    live: dict[int, Request] = {}
    came: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    start = time.perf_counter()

    def send(request: Request, at: float) -> None:
        key = next(keys)
        live[key], came[key], times[key] = request, at, []
        contender.add(key, request)

    while coming or live:
        now = time.perf_counter() - start
        while coming and coming[0].arrival <= now:
            send(coming[0], start + coming.popleft().arrival)
        wait = min(coming[0].arrival - now, LONGEST_WAIT_S) if coming else LONGEST_WAIT_S
        if not live:
            time.sleep(max(wait, 0.0))
            continue
        for found in contender.step(max(wait, 0.0)):
            times[found.key] += found.times
            if found.answer is not None:
                request = live.pop(found.key)
                check(request, found.answer, times[found.key])
                following = request.following(found.answer)
                if following is not None:
                    send(following, time.perf_counter())
    return run_of(time.perf_counter() - start, came, times)


def check(request: Request, answer: Sequence[int], times: Sequence[float]) -> None:
    """Raise RuntimeError unless all tokens that were asked for are there."""
    if not len(answer) == len(times) == request.count:
        raise RuntimeError(f"{len(answer)} tokens, {len(times)} times, {request.count} asked for")


def run_of(seconds: float, came: dict[int, float], times: dict[int, list[float]]) -> Run:
    """From moments of requests and of their tokens."""
    first = [at[0] - came[key] for key, at in times.items()]
    between = [later - one for at in times.values() for one, later in itertools.pairwise(at)]
    return Run(seconds, first, between)
