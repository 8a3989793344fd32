"""Proposers that know the answer: the upper bound of what proposing can gain. For tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.engine.decoding.proposers.base import Passive, Reader
from tilewise.engine.decoding.tree import TokenTree
from tilewise.kv.arguments import check_count


class OracleProposer(Passive):
    """Proposes the next tokens of a known text.

    Args:
        text: prompt and answer, as plain decoding gave them.
        length: tokens at a time.
    """

    def __init__(self, text: Sequence[int], length: int = 8) -> None:
        check_count("length", length, 1)
        self._text, self._length, self._reader = list(text), length, Reader()

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`."""
        self._reader.new(context, budget)
        tokens = (context[-1], *self._text[len(context) : len(context) + min(self._length, budget)])
        return TokenTree(tokens, tuple(range(-1, len(tokens) - 1)))
