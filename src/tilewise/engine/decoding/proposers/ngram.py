"""Copies what followed the last tokens where they occurred before: in the request's own text, or in references."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from tilewise.core.errors import InputError
from tilewise.engine.decoding.proposers.base import LEAST, Acceptance, Passive, Reader
from tilewise.engine.decoding.tree import TokenTree, TreeBuilder
from tilewise.kv.arguments import check_count


class NgramProposer(Passive):
    """The longest match of the last tokens, the most recent one first, and what came after it.

    The request's own text is preferred to references among matches of one length. Host work and memory are `longest`
    dictionary entries for each token.

    Args:
        references: texts to copy from, such as retrieved documents; copies end where a text ends.
        longest: tokens of a match at most.
        shortest: tokens of a match at least.
        length: copied tokens at most.
        branches: how many matches of that length are followed, as branches of the tree.
        ends: tokens after which copies end.

    Source: Yang et al., "Inference with Reference: Lossless Acceleration of Large Language Models" (LLMA), 2023; with
    the prompt as the only reference known as prompt lookup.

    Example:
        >>> from tilewise.engine.decoding.proposers.ngram import NgramProposer
        >>> NgramProposer(longest=2, length=3).propose([5, 6, 7, 8, 5, 6], budget=8).tokens
        (6, 7, 8, 5)
    """

    def __init__(
        self,
        references: Iterable[Sequence[int]] = (),
        *,
        longest: int = 5,
        shortest: int = 1,
        length: int = 20,
        branches: int = 1,
        ends: Collection[int] = (),
    ) -> None:
        for name, value in {"longest": longest, "shortest": shortest, "length": length, "branches": branches}.items():
            check_count(name, value, 1)
        if shortest > longest:
            raise InputError("shortest", got=str(shortest), expected=f"at most {longest}", hint="raise longest as well")
        self._sizes = range(longest, shortest - 1, -1)
        self._length, self._branches, self._ends = length, branches, frozenset(ends)
        self._reader, self._acceptance = Reader(), Acceptance()
        self._texts: list[list[int]] = [[]]  # the request's own, then references
        self._places: dict[tuple[int, ...], dict[tuple[int, int], None]] = {}  # (text, index after it), oldest first
        for text in references:
            self._texts.append([])
            self._extend(len(self._texts) - 1, text)

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`."""
        fresh = self._reader.new(context, budget)
        self._acceptance.emitted(fresh)
        self._extend(0, fresh)
        own = self._texts[0]
        builder = TreeBuilder(own[-1])
        keys: list[tuple[Hashable, float]] = [(None, 1.0)]
        for followed, (size, text, at) in enumerate(itertools.islice(self._matches(), self._branches)):
            key, on, node = (size, followed), (size, "on"), 0
            value = self._acceptance.rate(key, size / (size + 1) * 0.5**followed)
            after = self._acceptance.rate(on, (size + 1) / (size + 2))
            copied = self._texts[text][at : at + self._length]
            while text == 0 and len(copied) < self._length:  # the text's end is followed by what is copied
                copied.append(copied[at - len(own)])
            for token in copied:
                if value < LEAST or len(builder) > budget:
                    break
                node, first = builder.add(node, token, value), node == 0
                keys += [(key if first else on, 1.0)] * (len(builder) - len(keys))
                value *= after
                if token in self._ends:
                    break
        return self._acceptance.proposed(builder.tree(), keys)

    def _extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text; an n-gram is stored with the index after it."""
        all_of_it = self._texts[text]
        for token in tokens:
            all_of_it.append(token)
            for size in self._sizes:
                if size <= len(all_of_it):
                    places = self._places.setdefault(tuple(all_of_it[-size:]), {})
                    places[text, len(all_of_it)] = None
                    if len(places) > self._branches + 1:  # the newest is the end of the context itself
                        del places[next(iter(places))]

    def _matches(self) -> Iterator[tuple[int, int, int]]:
        """(length, text, index of the next token), best first; none twice."""
        own = self._texts[0]
        found = set()
        for size in self._sizes:
            if size > len(own):
                continue
            places = [*reversed(self._places[tuple(own[-size:])])]
            for text, at in places:
                if at < len(self._texts[text]) and (text, at) not in found:
                    found.add((text, at))
                    yield size, text, at
