"""The prefix index: what it finds and refuses to find, in which order it forgets; and who shares which pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import pytest

from tilewise.core.errors import InputError, OutOfPagesError
from tilewise.kv import PageAllocator, PrefixCache, Sequence, SharedPrefix, shared_prefixes
from tilewise.kv.prefix import unseen_pages

TOKENS = list(range(100, 111))


def _cache(num_pages: int = 16, page_size: int = 4) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(num_pages, page_size)
    return allocator, PrefixCache(allocator)


def _computed(cache: PrefixCache, tokens: list[int], extra: Hashable = None) -> Sequence:
    """A sequence of these tokens whose full pages are known."""
    sequence = cache.start(tokens, extra)
    cache.allocator.append(sequence, len(tokens) - sequence.length)
    cache.insert(sequence, tokens, extra)
    assert cache.violations() == cache.allocator.violations() == []
    return sequence


def test_full_pages_of_a_prompt_are_found_again() -> None:
    allocator, cache = _cache()
    first = _computed(cache, TOKENS)
    assert len(cache) == 2
    second = cache.start([*TOKENS[:9], 1, 2, 3])
    assert (second.pages, second.length) == (first.pages[:2], 8)
    assert allocator.holders(first.pages[0]) == 2
    third = cache.start([*TOKENS[:4], 0, *TOKENS[5:]])
    assert third.pages == first.pages[:1]
    assert cache.start([0, *TOKENS[1:]]).pages == []
    assert cache.start([]).pages == []


def test_they_are_found_after_the_sequence_has_ended() -> None:
    allocator, cache = _cache()
    first = _computed(cache, TOKENS)
    pages = list(first.pages)
    allocator.free(first)
    assert (allocator.num_cached, allocator.num_used) == (2, 0)
    assert cache.match(TOKENS) == 8
    assert allocator.num_cached == 2
    assert cache.start(TOKENS).pages == pages[:2]
    assert allocator.num_cached == 0


@pytest.mark.parametrize(("length", "left", "whole"), [(8, 4, 8), (9, 8, 8), (7, 4, 4), (4, 0, 4), (0, 0, 0)])
def test_a_token_is_left_to_compute_unless_the_whole_prompt_is_wanted(length: int, left: int, whole: int) -> None:
    _, cache = _cache()
    _computed(cache, TOKENS)
    assert cache.match(TOKENS[:length]) == cache.start(TOKENS[:length]).length == left
    assert cache.match(TOKENS[:length], whole=True) == cache.start(TOKENS[:length], whole=True).length == whole


def test_other_extras_share_nothing() -> None:
    _, cache = _cache()
    base, adapted = _computed(cache, TOKENS), _computed(cache, TOKENS, "adapter")
    assert not set(base.pages) & set(adapted.pages)
    assert cache.start(TOKENS, "adapter").pages == adapted.pages[:2]
    assert cache.match(TOKENS, "another") == 0


@pytest.mark.parametrize("bad", [lambda value: 0, lambda value: len(value[1]), lambda value: value[1][-1]])
def test_a_bad_hash_never_finds_a_wrong_page(bad: Callable[[Hashable], int]) -> None:
    cache = PrefixCache(PageAllocator(32, 2), hash=bad)
    prefix_in = {}  # what each page holds, and all before it
    for tokens in ([1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 5, 4], [5, 2, 5, 4]):
        for extra in (None, "a"):
            pages = _computed(cache, tokens, extra).pages
            prefix_in.update({pages[0]: (tokens[:2], extra), pages[1]: (tokens, extra)})
            for asked in ([1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 5, 4], [5, 2, 5, 4], [3, 4, 3, 4]):
                for page, wanted in zip(cache.start(asked, extra, whole=True).pages, (asked[:2], asked), strict=False):
                    assert prefix_in[page] == (wanted, extra)
    assert cache.match([1, 2, 3, 4], whole=True) > 0


def test_of_two_that_computed_the_same_the_pages_of_one_remain() -> None:
    allocator, cache = _cache()
    first, second = (allocator.create() for _ in range(2))
    for sequence in (first, second):
        allocator.append(sequence, 11)
    (fork,) = allocator.fork(second)
    assert allocator.num_used == 6
    assert cache.insert(first, TOKENS) == cache.insert(second, TOKENS) == 8
    assert second.pages == fork.pages == [0, 1, 5]
    assert (allocator.num_used, allocator.num_cached) == (4, 0)
    assert cache.insert(fork, TOKENS) == 8
    assert cache.violations() == allocator.violations() == []


def test_forks_of_a_double_do_not_lose_its_first_pages() -> None:
    """The second page becomes known in one fork; whoever holds it must hold the first one that is known."""
    allocator, cache = _cache(num_pages=5, page_size=1)
    first = _computed(cache, [1])
    double = allocator.create()
    allocator.append(double, 2)
    (fork,) = allocator.fork(double)
    cache.insert(double, [1, 2])
    for sequence in (first, double):
        allocator.free(sequence)
    allocator.append(allocator.create(), 3)
    assert cache.match([1, 2], whole=True) == fork.length == 2
    assert cache.violations() == allocator.violations() == []


def test_decoding_makes_pages_known_as_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, cache = _cache()
    sequence = _computed(cache, TOKENS[:3])
    for length in range(4, 12):
        allocator.append(sequence)
        assert cache.insert(sequence, TOKENS[:length]) == length // 4 * 4
    assert len(cache) == 2
    hashed = []
    monkeypatch.setattr(cache, "_hash", lambda value: hashed.append(value) or hash(value))
    allocator.append(sequence)
    cache.insert(sequence, [*TOKENS, 0])
    assert len(hashed) == 1  # only the page that is new


def test_pages_are_forgotten_oldest_first_and_of_a_prefix_last_page_first() -> None:
    allocator, cache = _cache(num_pages=6)
    old, young = [0] * 8, [1] * 8
    for tokens in (old, young):
        allocator.free(_computed(cache, tokens))
    assert (allocator.num_free, allocator.num_cached) == (2, 4)
    matched = []
    taker = allocator.create()
    for _ in range(6):
        matched.append((cache.match(old, whole=True), cache.match(young, whole=True)))
        allocator.append(taker, 4)
        assert cache.violations() == allocator.violations() == []
    assert matched == [(8, 8), (8, 8), (8, 8), (4, 8), (0, 8), (0, 4)]
    assert len(cache) == 0


def test_use_makes_a_page_young_and_a_look_does_not() -> None:
    allocator, cache = _cache(num_pages=2)
    for token in (0, 1):
        allocator.free(_computed(cache, [token] * 4))
    allocator.free(cache.start([0] * 5))
    cache.match([1] * 5)
    allocator.append(allocator.create(), 1)
    assert (cache.match([0] * 5), cache.match([1] * 5)) == (4, 0)


def test_a_rolled_back_sequence_writes_beside_its_known_page() -> None:
    allocator, cache = _cache()
    sequence = _computed(cache, TOKENS[:8])
    allocator.truncate(sequence, 6)
    assert allocator.append(sequence, 2).copies == ((1, 2),)
    other = [*TOKENS[:6], 0, 0]
    cache.insert(sequence, other)
    assert cache.start(TOKENS[:8], whole=True).pages == [0, 1]
    assert cache.start(other, whole=True).pages == sequence.pages == [0, 2]


def test_what_is_not_the_sequences_is_refused() -> None:
    allocator, cache = _cache()
    sequence = _computed(cache, TOKENS)
    with pytest.raises(InputError, match="tokens: got 12; expected at most 11"):
        cache.insert(sequence, [*TOKENS, 0])
    for tokens, extra in (([0] * 11, None), (TOKENS, "adapter")):
        with pytest.raises(InputError, match="tokens: got other tokens, or another extra, than its known"):
            cache.insert(sequence, tokens, extra)
    allocator.free(sequence)
    with pytest.raises(InputError, match="sequence: "):
        cache.insert(sequence, [])
    with pytest.raises(InputError, match="allocator: "):
        PrefixCache(allocator)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: c._by_key.clear(), "page 0 and its key disagree"),
        (lambda c: c._by_page.update({0: c._by_page[1]}), "page 0 and its key disagree"),
        (lambda c: c._by_key.pop(c._by_page[0].key), "has outlived its predecessor"),
        (lambda c: setattr(c._by_page[0], "children", 0), "has 1 successors, not 0"),
        (lambda c: setattr(c._by_page[1], "page", None), "has neither a page nor a successor"),
        (lambda c: c._forget(1), "the allocator keeps other pages"),
    ],
)
def test_a_damaged_index_is_found(damage: Callable[[PrefixCache], object], words: str) -> None:
    _, cache = _cache()
    _computed(cache, TOKENS)
    damage(cache)
    assert words in "\n".join(cache.violations())


def test_sequences_that_share_pages_are_grouped_as_a_tree() -> None:
    allocator, cache = _cache(num_pages=64)
    system, ask, other = [1] * 8, [2] * 4, [3] * 4
    prompts = (
        [*system, *ask, 5],
        [9] * 9,
        [*system, *other, 6],
        [*system, *ask, 7],
        [*system, *other, *other, 8],
        [*system, 4],
    )
    sequences = [_computed(cache, tokens) for tokens in prompts]
    (fork,) = allocator.fork(sequences[4])
    assert shared_prefixes([*sequences, fork]) == [
        SharedPrefix((0, 2, 3, 4, 5, 6), 0, 2),
        SharedPrefix((0, 3), 2, 3),
        SharedPrefix((2, 4, 6), 2, 3),
        SharedPrefix((4, 6), 3, 4),
    ]


def test_only_pages_that_are_full_for_all_count_as_shared() -> None:
    allocator = PageAllocator(16, 4)
    sequence = allocator.create()
    allocator.append(sequence, 10)
    (fork,) = allocator.fork(sequence)
    assert shared_prefixes([sequence, fork]) == [SharedPrefix((0, 1), 0, 2)]
    allocator.truncate(fork, 7)
    assert shared_prefixes([sequence, fork]) == [SharedPrefix((0, 1), 0, 1)]
    allocator.truncate(fork, 3)
    assert shared_prefixes([sequence, fork]) == []
    assert shared_prefixes([sequence, allocator.create()]) == []
    assert shared_prefixes([]) == []


def test_a_window_needs_the_last_pages_alone() -> None:
    allocator, cache = _cache()
    sequence = _computed(cache, TOKENS[:8])  # two full pages of 4
    assert cache.match(TOKENS, window=4) == 8
    started = cache.start(TOKENS, window=4)
    assert (started.pages, started.length, started.dropped) == ([-1, 1], 8, 1)
    allocator.free(started)
    allocator.drop_front(sequence, 1)
    while allocator.num_free:
        allocator.append(allocator.create(), 4)
    allocator.append(allocator.create(), 4)  # evicts the page that was handed back
    assert cache.violations() == allocator.violations() == []
    assert (cache.match(TOKENS), cache.match(TOKENS, window=6), cache.match(TOKENS, window=5)) == (0, 0, 8)
    assert cache.start(TOKENS, window=1).pages == [-1, -1]


def test_pages_handed_back_before_they_were_known_stay_unknown() -> None:
    allocator, cache = _cache()
    sequence = allocator.create()
    allocator.append(sequence, 8)
    allocator.drop_front(sequence, 1)
    assert cache.insert(sequence, TOKENS[:8]) == 0
    assert len(cache) == 0


@pytest.mark.parametrize("window", [2, 3, 4, 9, None])
def test_prefixes_under_windows_are_those_of_a_search(window: int | None) -> None:
    """Random sequences that hand pages back, against a search over what each page holds."""
    generator, size = random.Random(f"{window}"), 4
    allocator = PageAllocator(24, size)
    cache = PrefixCache(allocator)
    content: dict[int, tuple[int, ...]] = {}
    live: list[tuple[Sequence, list[int]]] = []
    found = 0
    for _ in range(600):
        if live and (generator.random() < 0.4 or allocator.num_available < 8):
            allocator.free(live.pop(generator.randrange(len(live)))[0])
        tokens = [generator.randrange(2) for _ in range(generator.randint(1, 26))]
        known = {content[page] for page in cache._by_page}
        right = 0
        for count in range(1, (len(tokens) - 1) // size + 1):
            first = 0 if window is None else max(0, count * size - window + 1) // size
            if all(tuple(tokens[: (n + 1) * size]) in known for n in range(first, count)):
                right = count * size
        assert cache.match(tokens, window=window) == right
        found += right
        sequence = cache.start(tokens, window=window)
        assert sequence.length == right
        for n, page in enumerate(sequence.pages):
            assert page == -1 if n < sequence.dropped else content[page] == tuple(tokens[: (n + 1) * size])
        try:
            allocator.append(sequence, len(tokens) - right)
        except OutOfPagesError:
            allocator.free(sequence)
            continue
        if cache.insert(sequence, tokens):
            full = range(sequence.dropped, sequence.full_pages)
            content |= {sequence.pages[n]: tuple(tokens[: (n + 1) * size]) for n in full}
        allocator.drop_front(sequence, max(0, min(unseen_pages(len(tokens), window, size), sequence.full_pages - 1)))
        live.append((sequence, tokens))
        assert cache.violations() == allocator.violations() == []
    assert found > 100
