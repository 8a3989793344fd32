"""Proposes what a smaller model says; `engine/decoding/draft.py` asks it for all requests together."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.engine.decoding.proposers.base import LEAST, Acceptance, Passive, Reader
from tilewise.engine.decoding.tree import TokenTree
from tilewise.kv.arguments import check_count


class DraftProposer(Passive):
    """A chain of tokens that another model made.

    Args:
        length: tokens at most.

    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2022.

    Example:
        >>> from tilewise.engine.decoding.proposers.draft import DraftProposer
        >>> proposer = DraftProposer(length=3)
        >>> proposer.tokens = [8, 9]  # what the smaller model says after 5, 6, 7
        >>> proposer.propose([5, 6, 7], budget=8).tokens
        (7, 8, 9)
    """

    def __init__(self, *, length: int = 5) -> None:
        check_count("length", length, 1)
        self.length = length
        self.tokens: Sequence[int] = ()  # for the next proposal
        self._reader, self._acceptance = Reader(), Acceptance(prior=0.7)

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`."""
        self._acceptance.emitted(self._reader.new(context, budget))
        tokens, self.tokens = self.tokens[: min(self.length, budget)], ()
        values = [1.0]
        for depth in range(1, len(tokens) + 1):
            values.append(max(LEAST, self._acceptance.rate(depth)) * values[-1])
        tree = TokenTree((context[-1], *tokens), tuple(range(-1, len(tokens))), tuple(values))
        return self._acceptance.proposed(tree, [(depth, 1.0) for depth in tree.depths])
