"""Proposers of the samples that run: what each proposes for a step, how often it was right, and what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewise.engine.decoding.budget import Calibration, StepTimes, allocate
from tilewise.engine.decoding.methods import Speculation
from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.proposers.suffix import SharedSuffixes
from tilewise.engine.decoding.tree import TokenTree
from tilewise.engine.request import Sample


@dataclass
class _One:
    """A sample's proposer."""

    proposer: Proposer
    speculation: Speculation
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


class Speculators:
    """Proposers of all samples of an engine.

    Args:
        speculation: for requests that say nothing; None proposes nothing for them.
        chains: whether trees may not branch, as with sliding windows, or where bits count.
    """

    def __init__(self, speculation: Speculation | None, *, chains: bool) -> None:
        self._speculation, self._chains = speculation, chains
        self._by_name: dict[str, Speculation] = {}
        self._of: dict[Sample, _One] = {}
        self._shared = SharedSuffixes()
        self._times = StepTimes()
        self.counts = Counts()
        self.make: Callable[[Sample], Proposer] | None = None  # another proposer for each sample, in tests

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
        ones: list[tuple[Sample, _One, TokenTree]] = []
        for sample in samples:
            one = self._one(sample)
            room = sample.most - len(sample.tokens) - 1  # the last token of all is the one after a node
            budget = max(0, min(one.speculation.nodes, room))
            tree = one.proposer.propose(sample.tokens, budget).cut(budget)
            one.seen = len(sample.tokens)
            ones.append((sample, one, _best_chain(tree) if self._chains else tree))
        learned = [each for each in ones if each[1].speculation.learned]
        found = {sample: tree for sample, one, tree in ones if not one.speculation.learned}
        if learned:
            most_left = most - sum(len(tree.tokens) - 1 for tree in found.values())
            factors = [one.calibration.factor for _, one, _ in learned]
            trees = [tree for *_, tree in learned]
            tokens = max(plain, len(trees))
            cut = allocate(trees, self._times, tokens=tokens, most=max(0, most_left), factors=factors).trees
            found |= {sample: tree for (sample, *_), tree in zip(learned, cut, strict=True)}
        left = most
        for sample, tree in found.items():
            found[sample] = kept = tree.cut(min(left, len(tree.tokens) - 1))
            left -= len(kept.tokens) - 1
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

    def _one(self, sample: Sample) -> _One:
        one = self._of.get(sample)
        if one is None or one.seen > len(sample.tokens):  # a step was taken back
            speculation = self._speculation_of(sample)
            assert speculation is not None
            made = speculation.proposer(self._shared) if self.make is None else self.make(sample)
            one = self._of[sample] = _One(made, speculation)
        return one

    def _speculation_of(self, sample: Sample) -> Speculation | None:
        asked = sample.request.params.speculative
        if asked is None:
            return self._speculation
        if not isinstance(asked, str):  # False
            return None
        return self._by_name.setdefault(asked, Speculation(asked))


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
