"""Which samples a step computes, and how many tokens of each: one budget, decoding first, chunks of prompts with what
is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewise.engine.config import EngineConfig
from tilewise.engine.pages import Pages
from tilewise.engine.request import Sample, State


@dataclass(frozen=True)
class Work:
    """Tokens `start` .. `start` + `count` - 1 of a sample; with the last of those that it has, the next is sampled."""

    sample: Sample
    slot: int
    start: int
    count: int
    samples: bool
    turn: int


class Scheduler:
    """Samples that wait and samples that run.

    Args:
        config: budget and limits.
        pages: what samples take memory from.
        drain: waits for steps under way and takes what they gave; called before a sample loses its pages, for then all
            of its tokens must be known.
    """

    def __init__(self, config: EngineConfig, pages: Pages, drain: Callable[[], None]) -> None:
        self._config, self._pages, self._drain = config, pages, drain
        self.running: dict[Sample, None] = {}  # in the order in which they were admitted
        self._waiting: list[tuple[tuple[int, int, int], Sample]] = []
        self._slots = list(range(config.max_running))  # a heap
        self._fresh: set[Sample] = set()  # in the step that is planned: nobody can read what they write
        self.preemptions = 0
        self.num_waiting = 0  # samples without pages

    def add(self, sample: Sample) -> None:
        """Let a sample wait its turn: by priority, then by arrival."""
        request = sample.request
        self.num_waiting += 1
        heapq.heappush(self._waiting, ((request.priority, request.number, sample.index), sample))

    def end(self, sample: Sample) -> None:
        """Take back what a sample has, in whatever state it is."""
        if sample.state is State.RUNNING:
            self._unseat(sample)
        self.num_waiting -= sample.state is State.WAITING
        sample.state = State.FINISHED
        sample.turn += 1

    def plan(self) -> list[Work]:
        """The next step; empty where nobody can go on. Sequences have room for it when this returns."""
        budget = self._config.max_batch_tokens
        self._fresh.clear()
        work: list[Work] = []
        for sample in sorted(self.running, key=lambda each: each.pending > 1):  # those that decode come first
            if sample.state is not State.RUNNING or not budget or not self._may_go_on(sample):
                continue
            count = min(sample.pending, budget)
            if self._make_room(sample, count):
                work.append(self._taken(sample, count))
                budget -= count
        work = [each for each in work if each.turn == each.sample.turn]  # who ended when others lost pages is out
        return work + self._admitted(budget)

    def _admitted(self, budget: int) -> list[Work]:
        """First parts of samples that wait, as far as budget, slots and pages go."""
        work: list[Work] = []
        deferred = []
        while budget and self._slots and self._waiting:
            entry = heapq.heappop(self._waiting)
            sample = entry[1]
            if sample.state is not State.WAITING:
                continue  # it was aborted
            if self._awaits_another(sample):
                deferred.append(entry)
                continue
            started = self._admit(sample, budget)
            if started is None:
                deferred.append(entry)
                break
            work.append(started)
            budget -= started.count
        for entry in deferred:
            heapq.heappush(self._waiting, entry)
        return work

    def _awaits_another(self, sample: Sample) -> bool:
        """Whether a running sample is just computing what this one could share: it waits until that is there."""
        first = sample.request.samples[0]
        if first is not sample and not sample.turn and first.state is not State.FINISHED:
            if first.state is State.WAITING:
                return True
            if first.computed < sample.prompt_length or first in self._fresh:
                return True
        if sample.request.params.prompt_logprobs is not None:
            return False
        size = self._pages.page_size
        computing = [each for each in self.running if each.computed < each.prompt_length or each in self._fresh]
        if not self._config.prefix_cache or not computing:
            return False
        known = self._pages.matched(sample.tokens)
        return any(_common(sample.tokens, each.tokens) // size * size > known for each in computing)

    def _may_go_on(self, sample: Sample) -> bool:
        """Whether there is a token to compute: not where the last of all that it may have is on its way."""
        return sample.pending > 0 and sample.launched < sample.most

    def _taken(self, sample: Sample, count: int) -> Work:
        start = sample.computed
        self._pages.grow(sample.slot, count)
        self._fresh.add(sample)
        sample.computed += count
        samples = sample.computed == sample.launched
        sample.launched += samples
        return Work(sample, sample.slot, start, count, samples, sample.turn)

    def _make_room(self, sample: Sample, count: int) -> bool:
        """Whether there are pages for so many more tokens of a sample, after others lost theirs if need be."""
        while sample.sequence is not None and not self._pages.fits([(sample.sequence, count)]):
            self._drain()
            if sample.sequence is None or self._pages.fits([(sample.sequence, count)]):
                break
            others = [each for each in self.running if each not in self._fresh]
            last = max(others, key=lambda each: (each.request.priority, each.request.number, each.index))
            self.preempt(last)
        return sample.sequence is not None

    def preempt(self, sample: Sample) -> None:
        """Take a running sample's pages; it waits, and computes them anew. All steps that had it must have ended."""
        self._unseat(sample)
        sample.state = State.WAITING
        sample.turn += 1
        sample.computed, sample.launched = 0, len(sample.tokens)
        self.preemptions += 1
        self.add(sample)

    def _admit(self, sample: Sample, budget: int) -> Work | None:
        """Give the first who waits pages and a slot for a part of its prompt; None where that must wait."""
        request = sample.request
        first = request.samples[0]
        sequence = None
        if first is not sample and not sample.turn and first.sequence is not None:
            sequence = self._pages.fork(first.sequence, sample.prompt_length - 1)
        if sequence is None:
            sequence = self._pages.start(sample.tokens, shared=request.params.prompt_logprobs is None)
        count = min(len(sample.tokens) - sequence.length, budget)
        running = [(each.sequence, 1) for each in self.running if each.sequence is not None]
        if not self._pages.fits([*running, (sequence, count)]):
            self._pages.free(sequence)
            return None
        self.num_waiting -= 1
        sample.sequence, sample.slot = sequence, heapq.heappop(self._slots)
        sample.state = State.RUNNING
        sample.computed, sample.launched = sequence.length, len(sample.tokens)
        if not sample.turn and not sample.index:
            request.cached_tokens = sequence.length
        self._pages.seat(sample.slot, sequence)
        self.running[sample] = None
        return self._taken(sample, count)

    def _unseat(self, sample: Sample) -> None:
        self._pages.leave(sample.slot)
        heapq.heappush(self._slots, sample.slot)
        sample.sequence, sample.slot = None, -1
        del self.running[sample]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same, but the last of `one`, which is always computed."""
    low, high = 0, min(len(one) - 1, len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
