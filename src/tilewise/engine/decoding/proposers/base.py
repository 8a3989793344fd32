"""What a proposer is, and how it learns how often it is right."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from tilewise.core.errors import InputError
from tilewise.engine.decoding.tree import TokenTree
from tilewise.kv.arguments import check_count

LEAST = 0.02  # nodes of less value are not worth proposing


@runtime_checkable
class Proposer(Protocol):
    """Proposes tokens of one request. It may be wrong in any way: `verify.walk` emits plain decoding's tokens."""

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """What may come next.

        Args:
            context: all tokens of the request, prompt and answer; the last is the pending one. It is the context of
                the call before with tokens appended: only these are read.
            budget: nodes at most, the root not counted.

        Returns:
            A tree whose root is the pending token, with values; the root alone where there is nothing to propose.

        Raises:
            InputError: an empty context, one that became shorter, or no count.
        """

    def observe(self, chosen: Mapping[int, int]) -> None:
        """What the target chose after nodes of the last tree, by the nodes' `ids`; nodes that were cut are missing."""


class Passive:
    """A proposer that does not use what the target chose after nodes."""

    def observe(self, chosen: Mapping[int, int]) -> None:
        """As `Proposer`; does nothing."""


class Reader:
    """Which tokens of a growing context are new."""

    def __init__(self) -> None:
        self.seen = 0

    def new(self, context: Sequence[int], budget: int) -> Sequence[int]:
        """Tokens that the calls before did not give; checks the arguments of `Proposer.propose`."""
        check_count("budget", budget, 0)
        if len(context) < max(self.seen, 1):
            hint = "make a proposer for each request, and give it all tokens"
            raise InputError(
                "context", got=f"{len(context)} tokens", expected=f"{max(self.seen, 1)} or more", hint=hint
            )
        found = context[self.seen :]
        self.seen = len(context)
        return found


class Acceptance:
    """How often proposed tokens were right if their ancestors were, by a key such as the length of a match.

    Args:
        prior: the estimate for a key that nothing is known about.
        weight: how many tokens that estimate counts for.
        memory: of each count the share that remains after another.
    """

    def __init__(self, prior: float = 0.5, weight: float = 4.0, memory: float = 0.98) -> None:
        self._prior, self._weight, self._memory = prior, weight, memory
        self._counts: dict[Hashable, tuple[float, float]] = {}
        self._last: TokenTree | None = None
        self._keys: Sequence[tuple[Hashable, float]] = ()

    def rate(self, key: Hashable, prior: float | None = None) -> float:
        """The estimated probability, from `prior` in place of the one for all keys."""
        right, tried = self._counts.get(key, (0.0, 0.0))
        start = self._prior if prior is None else prior
        return min(1.0, (right + self._weight * start) / (tried + self._weight))

    def proposed(self, tree: TokenTree, keys: Sequence[tuple[Hashable, float]]) -> TokenTree:
        """Remember a proposal for `emitted`, with each node's key and its share among siblings of this key (1 for one
        alone); gives the tree back.
        """
        self._last, self._keys = tree, keys
        return tree

    def emitted(self, tokens: Sequence[int]) -> None:
        """Count children of each node that was reached by the tokens after the last proposal."""
        tree, self._last = self._last, None
        if tree is None:
            return
        children: dict[int, list[int]] = {}
        for n, up in enumerate(tree.parents):
            if tree.eligible[n]:
                children.setdefault(up, []).append(n)
        node = 0
        for token in tokens:
            for n in children.get(node, ()):
                key, share = self._keys[n]
                right, tried = self._counts.get(key, (0.0, 0.0))
                self._counts[key] = right * self._memory + (tree.tokens[n] == token), tried * self._memory + share
            node = next((n for n in children.get(node, ()) if tree.tokens[n] == token), -1)
            if node < 0:
                return
