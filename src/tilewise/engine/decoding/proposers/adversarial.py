"""Proposers that are wrong in every way that a tree allows, for tests: whatever they propose, tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tilewise.core.errors import InputError
from tilewise.engine.decoding.proposers.base import Passive, Reader
from tilewise.engine.decoding.tree import TokenTree

KINDS = ("random", "duplicates", "chain", "star", "constant", "nothing", "repeat")


class AdversarialProposer(Passive):
    """Random trees of the full budget, equal siblings, deep chains, one token everywhere; all claim to be certain.

    Args:
        vocab_size: tokens of the model.
        seed: of the trees.
        kinds: which to make, one after another; of "random", "duplicates" (siblings of one token), "chain", "star" (all
            nodes under the root), "constant" (one token), "nothing" and "repeat" (the context's last tokens again).
        most: nodes of a tree at most.
    """

    def __init__(self, vocab_size: int, seed: int = 0, kinds: Sequence[str] = KINDS, most: int = 80) -> None:
        if not kinds or not {*kinds} <= {*KINDS}:
            raise InputError(
                "kinds", got=repr(kinds), expected=f"some of {', '.join(KINDS)}", hint="leave it out for all"
            )
        self._vocab_size, self._kinds, self._most = vocab_size, tuple(kinds), most
        self._random, self._reader, self._calls = random.Random(seed), Reader(), 0

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`."""
        self._reader.new(context, budget)
        kind = self._kinds[self._calls % len(self._kinds)]
        self._calls += 1
        count = min(budget, self._most)
        if kind == "nothing" or not count:
            return TokenTree((context[-1],), (-1,))
        draw = self._random
        parents = [-1]
        for n in range(1, count + 1):
            up = {"chain": n - 1, "repeat": n - 1, "star": 0, "duplicates": (n - 1) // 2}
            parents.append(up.get(kind, draw.randrange(n)))
        tokens = [context[-1], *(draw.randrange(self._vocab_size) for _ in range(count))]
        if kind == "repeat":
            tokens[1:] = [context[-1 - n % len(context)] for n in range(count)]
        if kind == "constant":
            tokens[1:] = [tokens[1]] * count
        if kind == "duplicates":
            tokens[1:] = [tokens[1 + n // 2 % min(count, 3)] for n in range(count)]
        return TokenTree(tuple(tokens), tuple(parents))
