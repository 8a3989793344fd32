"""Proposes n-grams that the model itself made in a window of guesses ahead (Jacobi iteration), as part of each step.

The window needs the model: its nodes are in the tree, not eligible, and `observe` takes the tokens that the target
chose after the nodes of the window's last level. A step that does not say them leaves the window as it was.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence

from tilewise.core.errors import InputError
from tilewise.core.real import is_finite
from tilewise.engine.decoding.proposers.base import LEAST, Acceptance, Reader
from tilewise.engine.decoding.tree import TokenTree, TreeBuilder
from tilewise.kv.arguments import check_count


class LookaheadProposer:
    """n-grams that begin with the pending token, from a pool, beside a window that fills the pool.

    The window has n - 1 levels; level l, column c holds a guess of the token l + c positions after the pending one,
    which is level 0, column 0. A node of level 0 follows the column before, any other the level before. What the
    target chooses after the last level completes an n-gram in each column; then all levels move up by one.

    Args:
        window: columns.
        ngram: tokens of an n-gram, the one that it is found by included.
        guesses: n-grams for each token, the newest; the oldest use is forgotten first.
        worth: value of the window's nodes, for budgets: what they are hoped to save later.
        from_context: whether n-grams of prompt and answer are in the pool, too.
        seed: of the random guesses at the start.

    Source: Fu, Bailis, Stoica and Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    2024.

    Example:
        >>> from tilewise.engine.decoding.proposers.lookahead import LookaheadProposer
        >>> tree = LookaheadProposer(window=3, ngram=3).propose([4, 5, 6, 4], budget=16)
        >>> [(token, parent) for token, parent, ok in zip(tree.tokens, tree.parents, tree.eligible) if ok]
        [(4, -1), (5, 0), (6, 4)]
    """

    def __init__(
        self,
        window: int = 7,
        ngram: int = 5,
        guesses: int = 7,
        *,
        worth: float = 0.1,
        from_context: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 3), ("guesses", guesses, 1)):
            check_count(name, value, least)
        if not is_finite(worth) or not 0 <= worth <= 1:
            raise InputError("worth", got=repr(worth), expected="a number from 0 to 1", hint="0.1 is usual")
        self._window, self._ngram, self._guesses = window, ngram, guesses
        self._worth, self._from_context, self._random = worth, from_context, random.Random(seed)
        self._reader, self._acceptance = Reader(), Acceptance()
        self._levels: list[list[int]] = []  # level 0 without the pending token
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}  # newest last
        self._rows: list[int] = []  # nodes of the last level, by column
        self._pending = -1

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`. A window that does not fit into the budget is left out."""
        before, fresh = self._reader.seen, self._reader.new(context, budget)
        self._acceptance.emitted(fresh)
        if not self._levels:
            self._levels = [self._random.choices(context, k=self._window + self._ngram - 3)]
        if self._from_context:
            for end in range(max(before, self._ngram - 1) + 1, len(context) + 1):
                self._remember(context[end - self._ngram], context[end - self._ngram + 1 : end])
        self._pending, self._rows = context[-1], []
        builder = TreeBuilder(self._pending)
        if sum(map(len, self._levels)) <= budget:
            self._rows = self._add_window(builder)
        keys: list[tuple[Hashable, float]] = [(None, 1.0)] * len(builder)
        for rank, guess in enumerate(reversed(self._pool.get(self._pending, {}))):
            value, node = self._acceptance.rate(rank, 0.3 * 0.7**rank), 0
            for token in guess:
                if value < LEAST or len(builder) > budget:
                    break
                node, first = builder.add(node, token, value), node == 0
                keys += [(rank if first else "on", 1.0)] * (len(builder) - len(keys))
                value *= self._acceptance.rate("on", 0.7)
        return self._acceptance.proposed(builder.tree(), keys)

    def observe(self, chosen: Mapping[int, int]) -> None:
        """As `Proposer`: complete an n-gram in each column, and move the window."""
        last = [chosen.get(row, -1) for row in self._rows]
        self._rows = []
        if not last or min(last) < 0:
            return
        first, *others = self._levels
        if len(self._levels) < self._ngram - 1:  # the levels are not filled yet
            self._levels = [level[1:] for level in self._levels] + [last[1:]]
            return
        for column, token in enumerate(last):
            key = first[column - 1] if column else self._pending
            self._remember(key, [*(level[column] for level in others), token])
        self._levels = [others[0][1:], *others[1:], last]

    def _add_window(self, builder: TreeBuilder) -> list[int]:
        """Add all levels; the nodes of the last one."""
        nodes = [0]
        for token in self._levels[0]:
            nodes.append(builder.add(nodes[-1], token, self._worth, eligible=False))
        for level in self._levels[1:]:
            pairs = zip(nodes, level, strict=True)
            nodes = [builder.add(up, token, self._worth, eligible=False) for up, token in pairs]
        return nodes

    def _remember(self, key: int, tokens: Sequence[int]) -> None:
        """An n-gram is the newest of its first token."""
        found = self._pool.setdefault(key, {})
        found.pop(tuple(tokens), None)
        found[tuple(tokens)] = None
        if len(found) > self._guesses:
            del found[next(iter(found))]
