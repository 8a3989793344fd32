"""Copies what most often followed the longest suffix of the context that occurred before, in the request or in others.

Counts of all strings up to a depth are in a trie in which strings that occurred once end in a leaf that points into the
text; so a token costs as many steps as the longest suffix that repeats has tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from itertools import count

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite
from tilewise.engine.decoding.proposers.base import LEAST, Acceptance, Passive, Reader
from tilewise.engine.decoding.tree import TokenTree, TreeBuilder
from tilewise.kv.arguments import check_count

_BEST = 4  # continuations of a string that are kept in order


class _Node:
    """A string: how often it occurred, what followed; or, without children, where it occurred first."""

    __slots__ = ("at", "best", "children", "count", "followed", "text")

    def __init__(self, text: list[int], at: int) -> None:
        self.text, self.at, self.count, self.followed = text, at, 1, 0
        self.children: dict[int, _Node] | None = None
        self.best: list[int] = []

    def expand(self) -> dict[int, _Node]:
        """Its children, the first occurrence's if it had none yet."""
        if self.children is None:
            self.children = {}
            if self.at < len(self.text):
                self.children[self.text[self.at]] = _Node(self.text, self.at + 1)
                self.best, self.followed = [self.text[self.at]], 1
        return self.children

    def follow(self, token: int, children: dict[int, _Node]) -> None:
        """Count a token after it, which is among its children."""
        self.followed += 1
        best, times = self.best, children[token].count
        if token not in best:
            if len(best) < _BEST:
                best.append(token)
            elif times > children[best[-1]].count:
                best[-1] = token
            else:
                return
        n = best.index(token)
        while n and children[best[n - 1]].count < times:
            best[n - 1], best[n] = token, best[n - 1]
            n -= 1


_Place = tuple[_Node, int]  # a string: a node, and so many tokens of its text after it


def _inner(place: _Place) -> _Place:
    """The same string, whose node may have been expanded since."""
    node, beyond = place
    while beyond and node.children is not None:
        node, beyond = node.children[node.text[node.at]], beyond - 1
    return node, beyond


def _continued(place: _Place) -> Iterator[tuple[int, float, _Place]]:
    """(token, share, place) of the most frequent continuations."""
    node, beyond = _inner(place)
    if node.children is not None:
        for token in node.best:
            yield token, node.children[token].count / node.followed, (node.children[token], 0)
    elif node.at + beyond < len(node.text):
        yield node.text[node.at + beyond], 1.0, (node, beyond + 1)


def _step(place: _Place, token: int) -> _Place | None:
    """The string with one more token, if it occurred."""
    node, beyond = _inner(place)
    if node.children is not None:
        found = node.children.get(token)
        return None if found is None else (found, 0)
    at = node.at + beyond
    return (node, beyond + 1) if at < len(node.text) and node.text[at] == token else None


class CountedTrie:
    """Counts of all strings of texts, of `depth` tokens at most."""

    def __init__(self, depth: int) -> None:
        check_count("depth", depth, 2)
        self.root, self.depth, self.size = _Node([], 0), depth, 0
        self.root.expand()


class TrieWriter:
    """Appends to a text of a trie; `places` are its suffixes that occurred before, by length."""

    def __init__(self, trie: CountedTrie) -> None:
        self._trie, self._text, self._nodes = trie, list[int](), [trie.root]

    @property
    def places(self) -> list[_Place]:
        """Of length 0, 1, ..."""
        return [(node, 0) for node in self._nodes]

    def append(self, token: int) -> None:
        """Count the text's next token after each suffix that occurred before."""
        self._text.append(token)
        moved = [self._trie.root]
        for depth, node in enumerate(self._nodes, 1):
            children = node.expand()
            child = children.get(token)
            if child is None:
                children[token] = _Node(self._text, len(self._text))
                self._trie.size += 1
            else:
                child.count += 1
                self._trie.size += child.children is None
                child.expand()
                if depth < self._trie.depth:
                    moved.append(child)
            node.follow(token, children)
        self._nodes = moved


class TrieReader:
    """Matches suffixes of a context, of half the trie's depth at most; `places` are those that occur, by length."""

    def __init__(self, trie: CountedTrie) -> None:
        self._trie = trie
        self.places: list[_Place] = [(trie.root, 0)]

    def append(self, token: int) -> None:
        """Go on to the suffixes with the context's next token."""
        moved: list[_Place] = [(self._trie.root, 0)]
        for place in self.places[: self._trie.depth // 2]:
            found = _step(place, token)
            if found is None:
                break  # nor does a longer one
            moved.append(found)
        self.places = moved


class SharedSuffixes:
    """Texts of other requests. When a trie is full, another begins, and the one before the last is forgotten.

    Args:
        depth: of its tries.
        most: strings of a trie at most, about 200 bytes each.
    """

    def __init__(self, depth: int = 32, most: int = 1_000_000) -> None:
        check_count("most", most, 1)
        self._depth, self._most = depth, most
        self.tries = [CountedTrie(depth)]

    def learn(self, tokens: Sequence[int]) -> None:
        """Add a text, such as a finished answer."""
        if self.tries[0].size >= self._most:
            self.tries = [CountedTrie(self._depth), self.tries[0]]
        writer = TrieWriter(self.tries[0])
        for token in tokens:
            writer.append(token)


class SuffixProposer(Passive):
    """The most frequent continuations of the longest match, at most `factor` nodes for each of its tokens.

    The match in the request's own text competes with the ones in others'; the larger sum of values wins.

    Args:
        shared: texts of other requests.
        depth: tokens of a counted string at most, match and continuation together.
        factor: nodes of a tree for each token of the match.
        shortest: tokens of a match at least.

    Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024.

    Example:
        >>> from tilewise.engine.decoding.proposers.suffix import SuffixProposer
        >>> SuffixProposer().propose([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2], budget=2).tokens
        (2, 4, 1)
    """

    def __init__(
        self, shared: SharedSuffixes | None = None, *, depth: int = 32, factor: float = 2.0, shortest: int = 1
    ) -> None:
        check_count("shortest", shortest, 1)
        if not is_finite(factor) or factor <= 0:
            raise InputError("factor", got=shown(factor), expected="a positive number", hint="1 to 4 are usual")
        self._own = TrieWriter(CountedTrie(depth))
        self._shared, self._factor, self._shortest, self._half = shared, factor, shortest, depth // 2
        self._readers: dict[CountedTrie, TrieReader] = {}
        self._reader, self._acceptance = Reader(), Acceptance()

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`."""
        fresh = self._reader.new(context, budget)
        self._acceptance.emitted(fresh)
        for token in fresh:
            self._own.append(token)
        places = [self._own.places, *(each.places for each in self._read(context, fresh))]
        found = [self._grown(context[-1], each, budget, n > 0) for n, each in enumerate(places)]
        return self._acceptance.proposed(*max(found, key=lambda each: sum(each[0].values)))

    def _read(self, context: Sequence[int], fresh: Sequence[int]) -> list[TrieReader]:
        """Readers of all shared tries, brought up to date."""
        before, self._readers = self._readers, {}
        for trie in () if self._shared is None else self._shared.tries:
            self._readers[trie] = before.get(trie) or TrieReader(trie)
            for token in fresh if trie in before else context[-self._half :]:
                self._readers[trie].append(token)
        return [*self._readers.values()]

    def _grown(
        self, pending: int, places: Sequence[_Place], budget: int, shared: bool
    ) -> tuple[TokenTree, list[tuple[Hashable, float]]]:
        """The most valuable nodes after the longest match, and their keys."""
        builder, keys = TreeBuilder(pending), list[tuple[Hashable, float]]([(None, 1.0)])
        longest = len(places) - 1
        while longest and not [*_continued(places[min(longest, self._half)])]:  # others' texts end there
            longest -= 1
        if longest < self._shortest:
            return builder.tree(), keys
        most = min(budget, max(1, int(self._factor * longest)))
        first, on, order = (shared, longest), (shared, longest, "on"), count()
        rate = self._acceptance.rate(first, longest / (longest + 1))
        start = places[min(longest, self._half)]
        heap = [(-share * rate, next(order), 0, token, at, share) for token, share, at in _continued(start)]
        heapq.heapify(heap)
        after = self._acceptance.rate(on, (longest + 1) / (longest + 2))
        while heap and len(builder) <= most:
            negative, _, parent, token, place, part = heapq.heappop(heap)
            if -negative < LEAST:
                break
            node = builder.add(parent, token, -negative)
            keys.append((on if parent else first, part))
            for next_token, share, at in _continued(place):
                heapq.heappush(heap, (negative * share * after, next(order), node, next_token, at, share))
        return builder.tree(), keys
