"""The page allocator: which slots and copies it asks for, what it shares, counts and refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilewise.core.errors import InputError, OutOfPagesError
from tilewise.kv import PageAllocator, Sequence, Write, shared_prefixes


def _of_length(allocator: PageAllocator, length: int) -> Sequence:
    sequence = allocator.create()
    allocator.append(sequence, length)
    return sequence


def _counts(allocator: PageAllocator) -> tuple[int, int, int]:
    assert allocator.violations() == []
    return allocator.num_free, allocator.num_cached, allocator.num_used


def test_tokens_fill_pages_in_order() -> None:
    allocator = PageAllocator(8, 4)
    sequence = allocator.create()
    assert allocator.append(sequence, 6) == Write((range(4), range(4, 6)), ())
    other = allocator.create()
    assert allocator.append(other).slots == [8]
    assert allocator.append(sequence, 5) == Write((range(6, 8), range(12, 15)), ())
    assert (sequence.pages, sequence.length, sequence.full_pages) == ([0, 1, 3], 11, 2)
    assert [sequence.slot(token) for token in range(11)] == [*range(8), 12, 13, 14]
    assert _counts(allocator) == (4, 0, 4)
    assert allocator.wasted_slots() == 1 + 3


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_at_most_one_page_less_a_slot_is_wasted(page_size: int) -> None:
    allocator = PageAllocator(100, page_size)
    sequence = allocator.create()
    for length in range(1, 40):
        allocator.append(sequence)
        assert len(sequence.pages) == -(-length // page_size)
        assert allocator.wasted_slots() == -length % page_size


def test_appending_nothing_asks_for_nothing() -> None:
    allocator = PageAllocator(2, 4)
    sequence = _of_length(allocator, 2)
    allocator.fork(sequence)
    assert allocator.needed(sequence, 0) == 0
    assert allocator.append(sequence, 0) == Write((), ())
    assert sequence.length == 2


def test_forks_share_pages_until_one_writes() -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 6)
    one, two = allocator.fork(sequence, 2)
    assert one.pages == two.pages == sequence.pages
    assert one.pages is not sequence.pages
    assert [allocator.holders(page) for page in (0, 1, 2)] == [3, 3, 0]
    assert _counts(allocator) == (6, 0, 2)
    assert allocator.needed(one) == 1
    assert allocator.append(one) == Write((range(10, 11),), ((1, 2),))
    assert allocator.append(sequence, 4) == Write((range(14, 16), range(16, 18)), ((1, 3),))
    assert allocator.needed(two) == 0  # the last holder may write
    assert allocator.append(two) == Write((range(6, 7),), ())
    assert [fork.pages for fork in (sequence, one, two)] == [[0, 3, 4], [0, 2], [0, 1]]
    assert allocator.holders(0) == 3
    assert allocator.wasted_slots() == 2 + 1 + 1


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 8)
    (fork,) = allocator.fork(sequence)
    assert allocator.append(fork) == Write((range(8, 9),), ())
    assert allocator.append(sequence) == Write((range(12, 13),), ())


def test_a_page_is_shared_until_its_last_holder_is_freed() -> None:
    allocator = PageAllocator(4, 4)
    sequence = _of_length(allocator, 6)
    (fork,) = allocator.fork(sequence)
    allocator.free(sequence)
    assert _counts(allocator) == (2, 0, 2)
    assert allocator.append(fork).copies == ()
    allocator.free(fork)
    assert _counts(allocator) == (4, 0, 0)
    assert allocator.sequences == ()


def test_truncation_hands_back_whole_pages() -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 14)
    allocator.truncate(sequence, 14)
    assert len(sequence.pages) == 4
    allocator.truncate(sequence, 9)
    assert (len(sequence.pages), sequence.length) == (3, 9)
    allocator.truncate(sequence, 8)
    assert _counts(allocator) == (6, 0, 2)
    allocator.truncate(sequence, 0)
    assert _counts(allocator) == (8, 0, 0)
    assert allocator.append(sequence).slots == [0]


def test_a_truncated_fork_still_may_not_write_what_others_read() -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 8)
    (fork,) = allocator.fork(sequence)
    allocator.truncate(fork, 7)
    assert allocator.wasted_slots() == 0
    assert allocator.append(fork) == Write((range(11, 12),), ((1, 2),))
    assert sequence.pages == [0, 1]


def test_kept_pages_are_cached_and_evicted_oldest_first_and_of_a_sequence_last_page_first() -> None:
    allocator = PageAllocator(6, 4)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    first, second = _of_length(allocator, 12), _of_length(allocator, 10)
    for page in (0, 1, 2, 3):
        allocator.keep(page)
    allocator.free(first)
    assert _counts(allocator) == (0, 3, 3)
    allocator.free(second)
    assert _counts(allocator) == (2, 4, 0)
    assert allocator.kept == {0, 1, 2, 3}
    third = _of_length(allocator, 12)
    assert (evicted, third.pages[:2]) == ([2], [4, 5])  # free pages go first
    allocator.append(third, 12)
    assert evicted == [2, 1, 0, 3]
    assert allocator.kept == set()


def test_a_cached_page_that_is_held_again_is_not_evicted() -> None:
    allocator = PageAllocator(3, 4)
    sequence = _of_length(allocator, 8)
    allocator.keep(0)
    allocator.keep(1)
    allocator.free(sequence)
    again = allocator.create([0])
    assert (again.pages, again.length) == ([0], 4)
    assert _counts(allocator) == (1, 1, 1)
    allocator.append(again, 8)
    assert again.pages == [0, 2, 1]


def test_a_kept_page_is_copied_before_it_is_written() -> None:
    allocator = PageAllocator(4, 4)
    sequence = _of_length(allocator, 4)
    allocator.keep(0)
    allocator.truncate(sequence, 3)
    assert allocator.needed(sequence) == 1
    assert allocator.append(sequence) == Write((range(7, 8),), ((0, 1),))
    assert _counts(allocator) == (2, 1, 1)


def test_merging_replaces_a_page_in_every_table_that_has_it() -> None:
    allocator = PageAllocator(8, 4)
    known, double = _of_length(allocator, 4), _of_length(allocator, 9)
    allocator.keep(0)
    (fork,) = allocator.fork(double)
    allocator.merge(double, 0, 0)
    assert (known.pages, double.pages, fork.pages) == ([0], [0, 2, 3], [0, 2, 3])
    assert allocator.holders(0) == 3
    assert _counts(allocator) == (5, 0, 3)


@pytest.mark.parametrize("length", [9, 12, 13])
def test_without_enough_pages_nothing_changes(length: int) -> None:
    allocator = PageAllocator(5, 4)
    sequence, kept = _of_length(allocator, 6), _of_length(allocator, 4)
    (fork,) = allocator.fork(sequence)
    allocator.keep(kept.pages[0])
    allocator.free(kept)
    assert _counts(allocator) == (2, 1, 2)
    needed = -(-(6 + length) // 4) - 2 + 1
    if needed > 3:
        with pytest.raises(OutOfPagesError, match=rf"{needed} needed.* at most 3 \(2 free, 1 cached\)"):
            allocator.append(sequence, length)
        assert _counts(allocator) == (2, 1, 2)
        assert (sequence.pages, sequence.length, allocator.kept) == (fork.pages, 6, {2})
        allocator.free(fork)
    assert sum(map(len, allocator.append(sequence, length).runs)) == length


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda a, s: PageAllocator(0, 4), "num_pages"),
        (lambda a, s: PageAllocator(4, 0), "page_size"),
        (lambda a, s: PageAllocator(4, 2.5), "page_size"),  # type: ignore[arg-type]
        (lambda a, s: a.append(s, -1), "n"),
        (lambda a, s: a.append(s, 1.5), "n"),
        (lambda a, s: a.needed(s, -1), "n"),
        (lambda a, s: a.fork(s, -1), "n"),
        (lambda a, s: a.truncate(s, 7), "length"),
        (lambda a, s: a.truncate(s, -1), "length"),
        (lambda a, s: a.keep(3), "page"),
        (lambda a, s: a.keep(-1), "page"),
        (lambda a, s: a.holders(8), "page"),
        (lambda a, s: a.create([0]), "page"),
        (lambda a, s: a.merge(s, 0, 3), "page"),
        (lambda a, s: (a.keep(0), a.merge(s, 1, 0)), "index"),
    ],
)
def test_wrong_arguments_are_named_and_change_nothing(
    wrong: Callable[[PageAllocator, Sequence], object], name: str
) -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 6)
    with pytest.raises(InputError, match=f"^{name}: got"):
        wrong(allocator, sequence)
    assert (sequence.pages, sequence.length) == ([0, 1], 6)
    assert _counts(allocator) == (6, 0, 2)


@pytest.mark.parametrize("use", ["append", "needed", "fork", "free", "truncate", "merge"])
@pytest.mark.parametrize("freed", [True, False])
def test_a_sequence_that_is_not_there_is_refused(use: str, freed: bool) -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator if freed else PageAllocator(8, 4), 6)
    if freed:
        allocator.free(sequence)
        assert (sequence.pages, sequence.length) == ([], 0)
    arguments = {"truncate": (0,), "merge": (0, 0)}.get(use, ())
    with pytest.raises(InputError, match=r"sequence: .*freed, or another allocator's"):
        getattr(allocator, use)(sequence, *arguments)
    assert _counts(allocator) == (8, 0, 0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda a: a._free.append(0), "page 0 is in 2 of free, cached and used"),
        (lambda a: a._free.pop(), "page 2 is in 0 of"),
        (lambda a: a._holders.__setitem__(1, 2), "page 1 has 1 holders, not 2"),
        (lambda a: a._cached.update({a._free.pop(): None}), "page 2 is cached but not kept"),
        (lambda a: a._kept.add(5), "page 5 is free but kept"),
        (lambda a: a.sequences[0].pages.append(3), "has 3 pages"),
        (lambda a: a.fork(a.sequences[0])[0].pages.reverse(), "page 1 comes after page -1 and after page 0"),
    ],
)
def test_damaged_bookkeeping_is_found(damage: Callable[[PageAllocator], object], words: str) -> None:
    allocator = PageAllocator(6, 4)
    _of_length(allocator, 6)
    assert allocator.violations() == []
    damage(allocator)
    assert words in "\n".join(allocator.violations())


def test_front_pages_are_handed_back() -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 10)
    fork = allocator.fork(sequence)[0]
    allocator.drop_front(sequence, 2)
    assert (sequence.pages, sequence.length, sequence.dropped) == ([-1, -1, 2], 10, 2)
    assert _counts(allocator) == (5, 0, 3)  # the fork holds them
    allocator.free(fork)
    assert _counts(allocator) == (7, 0, 1)
    again = allocator.fork(sequence)[0]
    allocator.drop_front(again, 1)  # has them no more
    assert again.pages == sequence.pages
    assert allocator.append(again, 3).copies == ((2, 0),)
    assert (again.slot(8), again.slot(12)) == (0, 4)
    with pytest.raises(InputError, match="token: got 7; expected 8 or later"):
        again.slot(7)
    with pytest.raises(InputError, match="length: got 7; expected 8 or more"):
        allocator.truncate(again, 7)
    with pytest.raises(InputError, match="pages: got 4; expected 0 to 3"):
        allocator.drop_front(again, 4)
    allocator.truncate(again, 8)
    assert again.pages == [-1, -1]
    assert allocator.append(again, 1).copies == ()
    allocator.free(again)
    allocator.free(sequence)
    assert _counts(allocator) == (8, 0, 0)
    assert sequence.pages == []


def test_sequences_without_their_front_share_nothing_there() -> None:
    allocator = PageAllocator(8, 4)
    sequence = _of_length(allocator, 8)
    allocator.drop_front(sequence, 1)
    assert shared_prefixes([sequence, *allocator.fork(sequence)]) == []


def test_append_in_place_is_append_where_no_page_is_taken() -> None:
    pages = PageAllocator(8, 4)
    one, other, empty = pages.create(), pages.create(), pages.create()
    pages.append(one, 5), pages.append(other, 6)
    assert pages.append_in_place([one, other])
    assert (one.length, other.length) == (6, 7)
    assert not pages.append_in_place([one, other], 2)  # the other would need a page: neither grows
    assert not pages.append_in_place([empty])
    (fork,) = pages.fork(one)
    assert not pages.append_in_place([one])  # shared: append copies the page
    pages.free(fork)
    assert pages.append_in_place([one])
    pages.append(one, 1)
    pages.append(one, 3)
    pages.keep(one.pages[-1])
    assert not pages.append_in_place([one])  # known by its content
    assert (one.length, other.length, empty.length) == (11, 7, 0)
    assert pages.violations() == []
