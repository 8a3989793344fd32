"""Random operations on pages and on plain lists: every live sequence reads the same from both, after every step.

`python -m benchmarks kv_memory --only operations` runs a million of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tilewise.kv import Sequence, shared_prefixes
from tilewise.testing.pages import MirroredCache, random_operations

HASHES: dict[str, Callable[[Hashable], Hashable]] = {
    "hash": hash,
    "three values": lambda value: hash(value) % 3,
    "one value": lambda value: 0,
}
TOKENS = st.lists(st.integers(0, 2), max_size=6)


class Pages(RuleBasedStateMachine):
    """Everything that an engine does, in any order, on a pool that runs out of pages."""

    cache: MirroredCache

    @initialize(num_pages=st.integers(2, 16), page_size=st.integers(1, 4), name=st.sampled_from(sorted(HASHES)))
    def pool(self, num_pages: int, page_size: int, name: str) -> None:
        self.cache = MirroredCache(num_pages, page_size, HASHES[name])

    def _one(self, data: Any) -> Sequence:
        return data.draw(st.sampled_from(list(self.cache.texts)))

    @rule(tokens=TOKENS, extra=st.sampled_from((None, "a")), whole=st.booleans(), known=st.booleans())
    def start(self, tokens: list[int], extra: Hashable, whole: bool, known: bool) -> None:
        sequence = self.cache.start(tokens, extra, whole)
        if known:
            self.cache.insert(sequence)

    @precondition(lambda self: self.cache.texts)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data: Any, tokens: list[int]) -> None:
        self.cache.append(self._one(data), tokens)

    @precondition(lambda self: self.cache.texts)
    @rule(data=st.data(), n=st.integers(0, 3))
    def fork(self, data: Any, n: int) -> None:
        self.cache.fork(self._one(data), n)

    @precondition(lambda self: self.cache.texts)
    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        sequence = self._one(data)
        self.cache.truncate(sequence, data.draw(st.integers(0, sequence.length)))

    @precondition(lambda self: self.cache.texts)
    @rule(data=st.data())
    def insert(self, data: Any) -> None:
        self.cache.insert(self._one(data))

    @precondition(lambda self: self.cache.texts)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        self.cache.free(self._one(data))

    @invariant()
    def everything_agrees(self) -> None:
        self.cache.check_all()

    @invariant()
    def shared_prefixes_are_those_of_the_tables(self) -> None:
        sequences = list(self.cache.texts)
        shared = [0] * len(sequences)
        for group in shared_prefixes(sequences):
            runs = {tuple(sequences[member].pages[group.start : group.stop]) for member in group.members}
            assert len(runs) == 1
            for member in group.members:
                assert shared[member] == group.start
                shared[member] = group.stop
        for one, stop in zip(sequences, shared, strict=True):
            assert stop == max((_common(one, other) for other in sequences if other is not one), default=0)

    def teardown(self) -> None:
        for sequence in list(self.cache.texts):
            self.cache.free(sequence)
        self.cache.check_all()
        assert self.cache.allocator.num_used == 0


def _common(one: Sequence, other: Sequence) -> int:
    """Leading pages that are full and the same in both."""
    full = min(one.full_pages, other.full_pages)
    return next((index for index in range(full) if one.pages[index] != other.pages[index]), full)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=250, stateful_step_count=40)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", HASHES)
def test_twenty_thousand_random_operations_leave_both_equal(page_size: int, name: str) -> None:
    cache = MirroredCache(48, page_size, HASHES[name])
    counts = random_operations(cache, 2250, seed=1)
    assert min(counts.values()) > 20, counts
    assert cache.refused > 20


def test_the_driver_does_the_same_for_the_same_seed() -> None:
    one, two, other = (MirroredCache(32, 4) for _ in range(3))
    assert random_operations(one, 500, seed=1) == random_operations(two, 500, seed=1)
    assert one.slots == two.slots
    random_operations(other, 500, seed=2)
    assert other.slots != one.slots
