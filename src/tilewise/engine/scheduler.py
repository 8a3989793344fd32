"""Which samples a step computes, and how many tokens of each: one budget, decoding first, chunks of prompts with what
is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewise.engine.config import EngineConfig
from tilewise.engine.decoding.rules import Rule
from tilewise.engine.decoding.speculators import Speculators
from tilewise.engine.decoding.tree import TokenTree
from tilewise.engine.pages import Pages
from tilewise.engine.request import Sample, State

_PASSED_OVER = 16  # samples that a step lets wait for what others compute; it looks at none behind them


@dataclass(frozen=True)
class Work:
    """Tokens `start` .. `start` + `count` - 1 of a sample; with the last of those that it has, the next is sampled.

    With a `tree` they are its nodes, and a token is chosen after each.
    """

    sample: Sample
    slot: int
    start: int
    count: int
    samples: bool
    turn: int
    tree: TokenTree | None = None
    rule: Rule | None = None


class Scheduler:
    """Samples that wait and samples that run.

    There is one order, by priority and then by arrival: who comes first starts first, and who comes last loses its
    pages first. So a sample waits for those before it and for those that ran when it came, and for nobody else.

    Args:
        config: budget and limits.
        pages: what samples take memory from.
        drain: waits for steps under way and takes what they gave; called before a sample loses its pages, for then all
            of its tokens must be known.
        speculators: propose tokens of samples that decode.
    """

    def __init__(self, config: EngineConfig, pages: Pages, drain: Callable[[], None], speculators: Speculators) -> None:
        self._config, self._pages, self._drain, self._speculators = config, pages, drain, speculators
        self.running: dict[Sample, None] = {}
        self._waiting: list[tuple[tuple[int, int, int], Sample]] = []
        self._slots = list(range(config.max_running))  # a heap
        self.preemptions = 0
        self.num_waiting = 0  # samples without pages

    def add(self, sample: Sample) -> None:
        """Let a sample wait its turn: by priority, then by arrival."""
        self.num_waiting += 1
        heapq.heappush(self._waiting, (sample.order, sample))

    def restart(self, samples: Sequence[Sample], *, keep: bool) -> None:
        """After an exception, which may have come while a step was planned: `samples` go on from what was launched.

        Args:
            samples: all that there are.
            keep: whether pages hold what was launched; else all that have not ended wait, and compute theirs anew.
        """
        for sample in [*self.running]:
            if not keep or not self._rewind(sample):
                self.preempt(sample)
        self._pages.free_unseated()
        self._waiting.clear()
        self.num_waiting = 0
        for sample in samples:
            if sample.state is State.WAITING:
                self.add(sample)

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
        work: list[Work] = []
        order = sorted(self.running, key=lambda each: (each.pending > 1, each.order))  # decoding comes first
        trees = self._trees(order)
        for sample in order:
            if sample.state is not State.RUNNING or not budget or not self._may_go_on(sample):
                continue
            tree = trees.get(sample)
            if tree is not None and not self._has_room(sample, tree, budget):
                tree = None
            count = min(sample.pending, budget) if tree is None else len(tree.tokens)
            grown = self._pages.grow_in_place(sample.slot, count)
            if grown or self._make_room(sample, count):
                work.append(self._taken(sample, count, grown=grown, tree=tree))
                budget -= count
        work = [each for each in work if each.turn == each.sample.turn]  # who ended or lost its pages is out
        return work + self._admitted(budget, work)

    def settle(self, work: Work, accepted: int) -> None:
        """After a step with a tree: its sample keeps what was computed of the root and of so many nodes."""
        sample = work.sample
        sample.computed = sample.written = work.start + accepted + 1
        sample.launched = sample.computed + 1
        self._pages.shrink(sample.slot, sample.computed)

    def _trees(self, order: Sequence[Sample]) -> dict[Sample, TokenTree]:
        """What is proposed for samples that decode and whose tokens are all known."""
        decoding = [each for each in order if each.pending == 1 and self._may_go_on(each)]
        wanting = [each for each in decoding if each.launched == len(each.tokens) and self._speculators.wants(each)]
        if not wanting:
            return {}
        return self._speculators.propose(wanting, len(decoding), self._config.max_batch_tokens - len(decoding))

    def _has_room(self, sample: Sample, tree: TokenTree, budget: int) -> bool:
        """Whether a tree fits into budget and pages; nobody loses pages for one."""
        nodes = len(tree.tokens)
        return nodes <= budget and sample.sequence is not None and self._pages.fits(sample.sequence, nodes)

    def _admitted(self, budget: int, planned: Sequence[Work]) -> list[Work]:
        """First parts of samples that wait, as far as budget, slots and pages go beside those who run."""
        work: list[Work] = []
        deferred: list[tuple[tuple[int, int, int], Sample]] = []
        if not (budget and self._slots and self._waiting):
            return work
        filling = _Filling(self._pages.page_size)
        for each in planned:
            filling.add(each)
        reserve = sum(self._pages.needed(each.sequence, 1) for each in self.running if each.sequence is not None)
        while budget and self._slots and self._waiting and len(deferred) < _PASSED_OVER:
            entry = heapq.heappop(self._waiting)
            sample = entry[1]
            if sample.state is not State.WAITING:
                continue  # it was aborted
            if self._awaits_another(sample, filling):
                deferred.append(entry)
                continue
            started = self._admit(sample, budget, reserve)
            if started is None or sample.sequence is None:
                deferred.append(entry)
                break
            work.append(started)
            filling.add(started)
            reserve += self._pages.needed(sample.sequence, 1)
            budget -= started.count
        for entry in deferred:
            heapq.heappush(self._waiting, entry)
        return work

    def _awaits_another(self, sample: Sample, filling: _Filling) -> bool:
        """Whether a running sample is just computing what this one could share: it waits until that is there."""
        first = sample.request.samples[0]
        if first is not sample and not sample.turn and first.state is not State.FINISHED:
            if first.state is State.WAITING:
                return True
            if first.written < sample.prompt_length or self._pages.copies(first.slot):
                return True
        if sample.request.params.prompt_logprobs is not None or not self._config.prefix_cache:
            return False
        return filling.fills(sample.tokens, self._pages.matched(sample.tokens))

    def _may_go_on(self, sample: Sample) -> bool:
        """Whether there is a token to compute: not where the last of all that it may have is on its way."""
        return sample.pending > 0 and sample.launched < sample.most

    def _taken(self, sample: Sample, count: int, *, grown: bool = False, tree: TokenTree | None = None) -> Work:
        start = sample.computed
        if not grown:
            self._pages.grow(sample.slot, count)
        sample.computed += count
        samples = tree is not None or sample.computed == sample.launched
        sample.launched += samples
        rule = None if tree is None else self._speculators.rule(sample)
        sample.lossy |= rule is not None
        return Work(sample, sample.slot, start, count, samples, sample.turn, tree, rule)

    def _make_room(self, sample: Sample, count: int) -> bool:
        """Whether there are pages for so many more tokens of a sample, after others lost theirs if need be."""
        while sample.sequence is not None and not self._pages.fits(sample.sequence, count):
            self._drain()
            if sample.sequence is None or self._pages.fits(sample.sequence, count):
                break
            self.preempt(max(self.running, key=lambda each: each.order))
        return sample.sequence is not None

    def preempt(self, sample: Sample) -> None:
        """Take a running sample's pages; it waits, and computes them anew. All steps that had it must have ended."""
        self._unseat(sample)
        sample.state = State.WAITING
        sample.turn += 1
        sample.computed, sample.launched = 0, len(sample.tokens)
        self.preemptions += 1
        self.add(sample)

    def _rewind(self, sample: Sample) -> bool:
        """Let a running sample go on from the tokens that are certain; False where it lacks pages for that."""
        length = self._pages.rewind(sample.slot, sample.certain)
        if length is None:
            return False
        sample.turn += 1
        sample.computed = sample.written = length
        sample.launched = len(sample.tokens)
        return True

    def _admit(self, sample: Sample, budget: int, reserve: int) -> Work | None:
        """Give the first who waits pages and a slot for a part of its prompt; None where that must wait, since a
        `reserve` of pages is left to those who run.
        """
        request = sample.request
        first = request.samples[0]
        sequence = None
        if first is not sample and not sample.turn and first.sequence is not None:
            sequence = self._pages.fork(first.sequence, sample.prompt_length - 1)
        if sequence is None:
            sequence = self._pages.start(sample.tokens, shared=request.params.prompt_logprobs is None)
        count = min(len(sample.tokens) - sequence.length, budget)
        if not self._pages.fits(sequence, count, reserve):
            self._pages.free(sequence)
            return None
        self.num_waiting -= 1
        sample.sequence, sample.slot = sequence, heapq.heappop(self._slots)
        sample.state = State.RUNNING
        sample.computed = sample.written = sequence.length
        sample.launched = len(sample.tokens)
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


class _Filling:
    """Pages that a step is about to fill: whoever begins with the same tokens waits until they can be shared."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._work: dict[tuple[int, tuple[int, ...]], list[Sequence[int]]] = {}  # by place and tokens of the first page

    def add(self, work: Work) -> None:
        """Note a sample's part of the step, if others may share its pages."""
        if work.sample.request.params.prompt_logprobs is not None:
            return
        start, tokens = work.start // self._size * self._size, work.sample.tokens
        page = tuple(tokens[start : start + self._size])
        if len(page) == self._size:
            self._work.setdefault((start, page), []).append(tokens)

    def fills(self, tokens: Sequence[int], known: int) -> bool:
        """Whether it fills their page that follows the `known` ones. The last token is computed in any case."""
        stop = known + self._size
        found = self._work.get((known, tuple(tokens[known:stop])), ())
        return stop < len(tokens) and any(other[:known] == tokens[:known] for other in found)
