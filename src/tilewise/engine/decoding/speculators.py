"""Proposers of the samples that run: what each proposes for a step, how often it was right, and what a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tilewise.core.errors import InputError
from tilewise.engine.decoding.budget import Calibration, StepTimes, allocate
from tilewise.engine.decoding.methods import Speculation
from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.proposers.draft import DraftProposer
from tilewise.engine.decoding.proposers.merged import MergedProposer
from tilewise.engine.decoding.proposers.suffix import SharedSuffixes
from tilewise.engine.decoding.rules import Rule
from tilewise.engine.decoding.tree import TokenTree
from tilewise.engine.params import SamplingParams
from tilewise.engine.request import Sample


@dataclass
class _One:
    """A sample's proposer."""

    proposer: Proposer
    speculation: Speculation
    draft: DraftProposer | None = None  # its part that a draft model speaks for
    calibration: Calibration = field(default_factory=Calibration)
    seen: int = 0  # tokens that it was shown


@dataclass
class Counts:
    """What proposing gave so far.

    Attributes:
        steps: of a sample, each a forward of the model with at least its pending token, where proposing was on.
        emitted: tokens that these gave.
        proposed, accepted: nodes by depth, from 1; of proposed ones those whose parent was accepted.
    """

    steps: int = 0
    emitted: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens for each forward of the model; 1 is plain decoding."""
        return self.emitted / self.steps if self.steps else 1.0

    def __str__(self) -> str:
        """Tokens a step, and how many proposed tokens were accepted at each depth whose parent was."""
        shares = [
            f"{100 * right / tried:.0f}%" for right, tried in zip(self.accepted, self.proposed, strict=True) if tried
        ]
        depths = f", accepted by depth {' '.join(shares[:8])}" if shares else ""
        return f"{self.tokens_per_step:.2f} tokens a step of {self.steps:,}{depths}"

    def record(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Count a step of one sample: its tree, and the nodes that were accepted."""
        self.steps += 1
        self.emitted += len(path) + 1
        reached = {0, *path}
        deepest = max(tree.depths)
        for column in (self.proposed, self.accepted):
            column += [0] * (deepest - len(column))
        for depth in {tree.depths[n] for n, up in enumerate(tree.parents) if up in reached and tree.eligible[n]} - {0}:
            self.proposed[depth - 1] += 1
            self.accepted[depth - 1] += len(path) >= depth


class Models(Protocol):
    """A draft model, as `draft.Draft` is one."""

    def propose(self, asked: Sequence[tuple[Sample, int]]) -> dict[Sample, list[int]]:
        """So many tokens for each of these samples."""

    def drop(self, sample: Sample) -> None:
        """Forget a sample."""

    def drop_all(self) -> None:
        """Forget all."""


class Speculators:
    """Proposers of all samples of an engine.

    Args:
        speculation: for requests that say nothing; None proposes nothing for them.
        chains: whether trees may not branch, as with sliding windows, or where bits count.

    Attributes:
        counts: what proposing gave so far.
        draft: the draft model, where there is one.
        make: another proposer for each sample, in tests.
    """

    def __init__(self, speculation: Speculation | None, *, chains: bool) -> None:
        self._speculation, self._chains = speculation, chains
        self._by_name: dict[str, Speculation] = {}
        self._of: dict[Sample, _One] = {}
        self._shared = SharedSuffixes()
        self._times = StepTimes()
        self._rest = Rest()
        self.counts = Counts()
        self.draft: Models | None = None
        self.make: Callable[[Sample], Proposer] | None = None

    def check(self, params: SamplingParams) -> None:
        """Raise InputError where a request asks for a draft model that the engine has not, or for what a lossy rule
        does not know.
        """
        asked = params.speculative
        if asked is None and self._speculation is not None and self._speculation.lossy:
            others = ("top_k", "top_p", "min_p", "logprobs")
            used = [name for name in others if getattr(params, name) != getattr(SamplingParams, name)]
            used += ["penalties, biases, bad or allowed tokens"] * params.changes_logits
            if used:
                hint = "speculative=False, or a Speculation without rule"
                raise InputError("params", got=used[0], expected="temperature alone under a lossy rule", hint=hint)
        has = self._speculation is not None and self._speculation.draft is not None
        if isinstance(asked, str) and "draft" in asked.split("+") and not has:
            hint = 'EngineConfig(speculative=Speculation("draft", draft="path/to/folder"))'
            raise InputError("speculative", got=asked, expected="a method that needs no draft model", hint=hint)

    def rule(self, sample: Sample) -> Rule | None:
        """What decides which proposed tokens of a sample stay; None is plain decoding."""
        speculation = self._speculation_of(sample)
        return None if speculation is None else speculation.rule

    def wants(self, sample: Sample) -> bool:
        """Whether tokens are proposed for a sample."""
        return self._speculation_of(sample) is not None

    def propose(self, samples: Sequence[Sample], plain: int, most: int) -> dict[Sample, TokenTree]:
        """Trees for a step, for those samples for which there are any.

        Args:
            samples: that decode, and whose tokens are all known.
            plain: samples that decode in this step, these and others.
            most: nodes of all trees together, roots not counted.
        """
        ones = [(sample, self._one(sample), self._budget(sample)) for sample in samples]
        overhead = self._drafted(ones)
        found: dict[Sample, TokenTree] = {}
        learned: list[tuple[Sample, _One, TokenTree]] = []
        left = most
        for sample, one, budget in ones:
            tree = one.proposer.propose(sample.tokens, budget).cut(budget)
            one.seen = len(sample.tokens)
            tree = _best_chain(tree) if self._chains else tree
            if one.speculation.learned:
                learned.append((sample, one, tree))
            else:
                found[sample] = tree = tree.cut(min(left, len(tree.tokens) - 1))
                left -= len(tree.tokens) - 1
        if learned:
            trees, factors = [tree for *_, tree in learned], [one.calibration.factor for _, one, _ in learned]
            tokens = max(plain, len(trees))
            kept = allocate(trees, self._times, tokens=tokens, most=left, factors=factors, overhead=overhead).trees
            found |= {sample: tree for (sample, *_), tree in zip(learned, kept, strict=True)}
            if overhead:
                self._rest.record(useful=any(len(tree.tokens) > 1 for tree in kept))
        return found

    def took(self, sample: Sample, tree: TokenTree, path: Sequence[int], chosen: Sequence[int]) -> None:
        """Learn from a step.

        Args:
            sample: whose tree it was.
            tree: what was computed.
            path: its accepted nodes.
            chosen: the token that the model chose after each node.
        """
        one = self._of.get(sample)
        self.counts.record(tree, path)
        if one is not None:
            one.calibration.record(tree if len(tree.tokens) > 1 else None, len(path))
            one.proposer.observe(dict(zip(tree.ids, chosen, strict=True)))

    def record(self, tokens: int, seconds: float) -> None:
        """Learn what a step of so many tokens takes."""
        if seconds > 0:
            self._times.record(tokens, seconds)

    def end(self, sample: Sample) -> None:
        """Forget a sample that has ended; others learn from its answer."""
        one = self._of.pop(sample, None)
        if one is not None and "suffix" in one.speculation.methods and sample.finish_reason in ("stop", "length"):
            self._shared.learn(sample.tokens)
        if self.draft is not None:
            self.draft.drop(sample)

    def recover(self) -> None:
        """After an exception, which may have come anywhere: nobody knows what a draft model has computed."""
        if self.draft is not None:
            self.draft.drop_all()

    def _drafted(self, ones: Sequence[tuple[Sample, _One, int]]) -> float:
        """Let the draft model speak for those who want it; the seconds that it took."""
        drafts = [(sample, one, budget) for sample, one, budget in ones if one.draft is not None]
        if not drafts or self.draft is None:
            return 0.0
        if all(one.speculation.learned for _, one, _ in drafts) and self._rest.skips():
            return 0.0
        began = time.perf_counter()
        asked = [(sample, min(budget, one.draft.length)) for sample, one, budget in drafts if one.draft is not None]
        said = self.draft.propose(asked)
        for sample, one, _ in drafts:
            if one.draft is not None:
                one.draft.tokens = said.get(sample, ())
        return time.perf_counter() - began

    def _budget(self, sample: Sample) -> int:
        """Nodes for a sample: the last token of all is the one after a node."""
        return max(0, min(self._one(sample).speculation.nodes, sample.most - len(sample.tokens) - 1))

    def _one(self, sample: Sample) -> _One:
        one = self._of.get(sample)
        if one is None or one.seen > len(sample.tokens):  # a step was taken back
            speculation = self._speculation_of(sample)
            assert speculation is not None
            parts = speculation.parts(self._shared)
            made = parts[0] if len(parts) == 1 else MergedProposer(parts)
            draft = next((part for part in parts if isinstance(part, DraftProposer)), None)
            one = self._of[sample] = _One(made if self.make is None else self.make(sample), speculation, draft)
        return one

    def _speculation_of(self, sample: Sample) -> Speculation | None:
        asked = sample.request.params.speculative
        if asked is None:
            return self._speculation
        if not isinstance(asked, str):  # False
            return None
        if asked not in self._by_name:
            draft = self._speculation.draft if self._speculation and "draft" in asked.split("+") else None
            self._by_name[asked] = Speculation(asked, draft=draft)
        return self._by_name[asked]


class Rest:
    """When a draft model is not asked: as long as nothing that it said was worth a step, twice as long each time."""

    def __init__(self, longest: int = 64) -> None:
        self._longest, self._wait, self._left = longest, 0, 0

    def skips(self) -> bool:
        """Whether this step goes without."""
        self._left -= 1
        return self._left >= 0

    def record(self, *, useful: bool) -> None:
        """Learn from a step for which it was asked."""
        self._wait = 0 if useful else min(self._longest, max(1, 2 * self._wait))
        self._left = self._wait


def _best_chain(tree: TokenTree) -> TokenTree:
    """The most valuable path from the root, of nodes that may be accepted."""
    nodes = [0]
    while True:
        children = [n for n, up in enumerate(tree.parents) if up == nodes[-1] and tree.eligible[n]]
        if not children:
            break
        nodes.append(max(children, key=lambda n: tree.values[n]))
    tokens, values, ids = (tuple(each[n] for n in nodes) for each in (tree.tokens, tree.values, tree.ids))
    return TokenTree(tokens, tuple(range(-1, len(nodes) - 1)), values, (), ids)  # type: ignore[arg-type]
