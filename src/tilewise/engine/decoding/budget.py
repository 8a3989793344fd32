"""How many proposed tokens a step computes: as many as make it emit more tokens a second, by measured times."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite
from tilewise.engine.decoding.tree import TokenTree
from tilewise.kv.arguments import check_count

_NEW = 0.1  # the share of a new time at least
_OUTLIER = 3.0  # times longer than this many known ones count as that


class StepTimes:
    """Seconds of a step by its number of tokens, learned as steps run.

    Sizes that differ by less than a fifth share an entry. Between entries times are linear and never fall. Beyond the
    largest they are as long as there, below the smallest shorter in proportion: a size that was never tried looks
    cheap, so it is tried once.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, float, int]] = {}  # tokens, seconds, times recorded
        self._points: tuple[list[float], list[float]] | None = None

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a step of so many tokens."""
        check_count("tokens", tokens, 1)
        if not is_finite(seconds) or not seconds > 0:
            raise InputError("seconds", got=shown(seconds), expected="a positive number", hint="measure with a clock")
        key = round(math.log2(tokens) * 4)
        size, known, count = self._entries.get(key, (float(tokens), seconds, 0))
        share = max(_NEW, 1 / (count + 1))
        seconds = known + share * (min(seconds, _OUTLIER * known) - known)
        self._entries[key] = (size + share * (tokens - size), seconds, count + 1)
        self._points = None

    def predict(self, tokens: int) -> float:
        """Seconds of a step of so many tokens; 1 as long as nothing is known."""
        if self._points is None:
            entries = [self._entries[key] for key in sorted(self._entries)]
            most = [max(entry[1] for entry in entries[: n + 1]) for n in range(len(entries))]
            self._points = [entry[0] for entry in entries], most
        sizes, seconds = self._points
        at = bisect.bisect_left(sizes, tokens)
        if not sizes:
            return 1.0
        if at in (0, len(sizes)):
            return seconds[0] * tokens / sizes[0] if at == 0 else seconds[-1]
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


class Calibration:
    """Accepted nodes of a request in proportion to those that values promised, mostly of late.

    Args:
        memory: the share that remains after another step, also one without a proposal: so a request whose proposals
            were bad is tried again some time.
        weight: promised nodes that an estimate of 1 counts for.
    """

    def __init__(self, memory: float = 0.95, weight: float = 2.0) -> None:
        self._memory, self._weight = memory, weight
        self._promised = self._accepted = 0.0

    @property
    def factor(self) -> float:
        """What values of this request's nodes are to be multiplied with, at most 1."""
        return min(1.0, (self._accepted + self._weight) / (self._promised + self._weight))

    def record(self, tree: TokenTree | None = None, accepted: int = 0) -> None:
        """Learn from a step: what was verified, if anything, and how many of its nodes were accepted."""
        promised = 0.0 if tree is None else sum(tree.values[n] for n in range(1, len(tree.tokens)) if tree.eligible[n])
        self._promised = self._promised * self._memory + promised
        self._accepted = self._accepted * self._memory + accepted


class Allocation(NamedTuple):
    """What a step computes.

    Args:
        trees: those that were proposed, cut.
        gain: expected tokens a second, in proportion to those of plain decoding.
    """

    trees: list[TokenTree]
    gain: float


def allocate(
    trees: Sequence[TokenTree],
    times: StepTimes,
    *,
    tokens: int,
    most: int,
    factors: Sequence[float] | None = None,
    overhead: float = 0.0,
    margin: float = 1.0,
) -> Allocation:
    """Cut the trees of a step so that it emits the most tokens a second: each request one, and its nodes by value.

    Nodes are taken in the order of their values, those of all requests together, and any number of them is compared.

    Args:
        trees: one for each request that decodes.
        times: measured ones.
        tokens: of the step without proposed nodes: pending tokens, and parts of prompts.
        most: nodes of all trees together at most, roots not counted.
        factors: for each tree what its values are multiplied with (`Calibration.factor`). None is 1.
        overhead: seconds that a step with proposed nodes takes beside its tokens' time.
        margin: gain over plain decoding from which nodes are taken at all.

    Returns:
        `Allocation(trees, gain)`; the roots alone where nothing pays.

    Raises:
        InputError: no count, or not one factor for each tree.

    Example:
        >>> from tilewise.engine.decoding.budget import StepTimes, allocate
        >>> from tilewise.engine.decoding.tree import TokenTree
        >>> times = StepTimes()
        >>> for size in (1, 2, 4, 8):
        ...     times.record(size, 1.0 + 0.5 * size)
        >>> tree = TokenTree((7, 1, 2, 3), (-1, 0, 1, 2), (1.0, 0.9, 0.6, 0.1))
        >>> allocate([tree], times, tokens=1, most=8).trees[0].tokens
        (7, 1, 2)
    """
    check_count("most", most, 0)
    check_count("tokens", tokens, len(trees))
    factors = [1.0] * len(trees) if factors is None else factors
    if len(factors) != len(trees):
        raise InputError(
            "factors", got=f"{len(factors)}", expected=f"{len(trees)}, one a tree", hint="1 changes nothing"
        )
    ranked = sorted(
        (-tree.values[n] * factor, at, n)
        for at, (tree, factor) in enumerate(zip(trees, factors, strict=True))
        for n in range(1, len(tree.tokens))
    )[:most]
    plain = len(trees) / times.predict(max(tokens, 1))
    best, taken, expected = plain * margin, 0, float(len(trees))
    for count, (negative, _, _) in enumerate(ranked, 1):
        expected -= negative
        rate = expected / (times.predict(tokens + count) + overhead)
        if rate > best:
            best, taken = rate, count
    counts = [0] * len(trees)
    for _, at, _ in ranked[:taken]:
        counts[at] += 1
    gain = best / plain if taken else 1.0
    return Allocation([tree.cut(count) for tree, count in zip(trees, counts, strict=True)], gain)
