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
        self._keys: Sequence[Hashable] = ()

    def rate(self, key: Hashable, prior: float | None = None) -> float:
        """The estimated probability, from `prior` in place of the one for all keys."""
        right, tried = self._counts.get(key, (0.0, 0.0))
        start = self._prior if prior is None else prior
        return (right + self._weight * start) / (tried + self._weight)

    def proposed(self, tree: TokenTree, keys: Sequence[Hashable]) -> TokenTree:
        """Remember a proposal and its nodes' keys, for `emitted`; gives the tree back."""
        self._last, self._keys = tree, keys
        return tree

    def emitted(self, tokens: Sequence[int]) -> None:
        """Count the first proposed child of each node that was reached by the tokens after the last proposal."""
        tree, node = self._last, 0
        self._last = None
        if tree is None or not tokens:
            return
        first: dict[int, int] = {}
        by_token: dict[tuple[int, int], int] = {}
        for n in range(1, len(tree.tokens)):
            if tree.eligible[n]:
                first.setdefault(tree.parents[n], n)
                by_token.setdefault((tree.parents[n], tree.tokens[n]), n)
        for token in tokens:
            if node not in first:
                return
            key, right = self._keys[first[node]], tree.tokens[first[node]] == token
            before = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (before[0] * self._memory + right, before[1] * self._memory + 1.0)
            if (node, token) not in by_token:
                return
            node = by_token[node, token]
