"""Prefixes that are computed once: full pages found again by their tokens, and pages that live sequences share.

The index is a client of the allocator, which tells it of evictions by one callback: the allocator needs to know that
a content is worth keeping, never what it is, and so counts holders the same way with and without an index.
"""

from __future__ import annotations

import collections.abc
import numbers
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.kv.allocator import PageAllocator
from tilewise.kv.arguments import check_count, listed
from tilewise.kv.sequence import Sequence

Tokens = collections.abc.Sequence[int]


@dataclass(eq=False, slots=True)
class _Entry:
    """A page whose content is known: its own tokens, after those of `parent` (None: at the start), under `extra`. The
    page may have been evicted (None) while pages after it are known.
    """

    parent: _Entry | None = field(repr=False)
    tokens: tuple[int, ...]
    extra: Hashable
    key: Hashable
    page: int | None
    children: int = 0

    def holds(self, parent: _Entry | None, tokens: tuple[int, ...], extra: Hashable) -> bool:
        return self.parent is parent and self.tokens == tokens and self.extra == extra


class PrefixCache:
    """An index of full pages by their tokens: finds the pages of a prompt that an earlier sequence has computed.

    Page n has the key h(n) = hash((h(n-1), tokens of page n, extra)). It is taken only if its tokens, its `extra` and
    its predecessor are the wanted ones: a bad hash costs hits, never gives a wrong page. Known pages stay until the
    allocator needs them; the one that has waited longest goes first, and of a prefix the last page.

    Every sequence that holds a known page holds those before it, too, so no page outlives its predecessor, unless
    `PageAllocator.drop_front` has handed predecessors back. Layers with a sliding window need none of those: `window=`
    finds prefixes whose last pages are known.

    Args:
        allocator: the pages; it serves one index at a time.
        hash: a function of a hashable value.

    Raises:
        InputError: no allocator, or one that serves another index.

    Example:
        >>> pages = tw.kv.PageAllocator(num_pages=8, page_size=4)
        >>> index, first = tw.kv.PrefixCache(pages), pages.create()
        >>> _ = pages.append(first, 6)
        >>> index.insert(first, [5, 6, 7, 8, 9, 10])  # one page is full
        4
        >>> index.start([5, 6, 7, 8, 1, 2]).length
        4
    """

    def __init__(self, allocator: PageAllocator, *, hash: Callable[[Hashable], Hashable] = hash) -> None:
        if not isinstance(allocator, PageAllocator):
            hint = "PrefixCache(cache.allocator), or a new one"
            raise InputError("allocator", got=type(allocator).__name__, expected="a PageAllocator", hint=hint)
        if allocator.on_evict is not None:
            raise InputError(
                "allocator",
                got="one that has a PrefixCache",
                expected="one without",
                hint="use that PrefixCache, or a new allocator",
            )
        allocator.on_evict = self._forget
        self.allocator = allocator
        self._hash = hash
        self._by_key: dict[Hashable, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Pages whose content is known, used or cached."""
        return len(self._by_page)

    def match(self, tokens: Tokens, extra: Hashable = None, *, whole: bool = False, window: int | None = None) -> int:
        """How many tokens `start` would find now. It takes nothing, and leaves the order of eviction alone.

        Args:
            tokens, extra, whole, window: as `start` takes them.

        Returns:
            A number of tokens, a multiple of the page size.

        Raises:
            InputError: tokens are no sequence of integers, or extra is not hashable.
        """
        _check_start(tokens, extra, whole, window)
        return len(self._found(tokens, extra, whole, window)) * self.allocator.page_size

    def start(
        self, tokens: Tokens, extra: Hashable = None, *, whole: bool = False, window: int | None = None
    ) -> Sequence:
        """Start a sequence with the known pages of a prompt.

        Args:
            tokens: the prompt, as integers.
            extra: what else keys and values depend on (an adapter of the weights, an image): any hashable value.
                Sequences with different values share nothing.
            whole: also take a page that ends the prompt. Otherwise at least one token is left, to compute logits from.
            window: keys that a query sees at most, its own included; None is all. The sequence begins without the pages
                that no later query sees (`PageAllocator.drop_front`), and these need not be known.

        Returns:
            The sequence; its `length` is the number of tokens of the prefix that was found.

        Raises:
            InputError: tokens are no sequence of integers, extra is not hashable, or window is no positive integer.
        """
        _check_start(tokens, extra, whole, window)
        found = self._found(tokens, extra, whole, window)
        dropped = unseen_pages(len(found) * self.allocator.page_size, window, self.allocator.page_size)
        pages = [entry.page for entry in found[dropped:] if entry.page is not None]
        return self.allocator.create(pages, dropped=dropped)

    def insert(self, sequence: Sequence, tokens: Tokens, extra: Hashable = None) -> int:
        """Make the full pages of a sequence known.

        Where another page is already known for the same prefix, it takes the place of this one, which is handed back:
        read block tables anew. Takes time in proportion to the pages that are new here.

        Args:
            sequence: a live one.
            tokens: the sequence's tokens from its first on, as far as their keys and values have been written.
            extra: as given to `start`.

        Returns:
            How many of its tokens lie in known pages. 0 for a sequence that handed back pages which were never known.

        Raises:
            InputError: more tokens than the sequence has, or others than those its known pages were inserted with.
        """
        allocator, size = self.allocator, self.allocator.page_size
        allocator.check_live(sequence)
        _check_tokens(tokens[:0] if isinstance(tokens, collections.abc.Sequence) else tokens, extra)
        if len(tokens) > sequence.length:
            raise InputError(
                "tokens",
                got=f"{len(tokens)}",
                expected=f"at most {sequence.length}, the length of the sequence",
                hint="KVCache.extend (PageAllocator.append) adds tokens, which are written before they are remembered",
            )
        full = len(tokens) // size
        known = full
        while known and sequence.pages[known - 1] not in self._by_page:
            known -= 1
        _check_tokens(tokens[known * size :], extra)
        if known < sequence.dropped:
            return 0
        parent = self._by_page[sequence.pages[known - 1]] if known else None
        if parent is not None and not parent.holds(parent.parent, _page_tokens(tokens, known - 1, size), extra):
            raise InputError(
                "tokens", got="other tokens, or another extra, than its known pages have", expected="the same ones",
                hint="give the sequence's own tokens from the first on, and the extra that it was started with",
            )  # fmt: skip
        for index in range(known, full):
            own = _page_tokens(tokens, index, size)
            key = self._key(parent, own, extra)
            entry = self._by_key.get(key)
            if entry is None:
                entry = self._by_key[key] = _Entry(parent, own, extra, key, None)
                if parent is not None:
                    parent.children += 1
            if not entry.holds(parent, own, extra):
                return index * size
            if entry.page is not None:
                allocator.merge(sequence, index, entry.page)
            else:
                entry.page = sequence.pages[index]
                allocator.keep(entry.page)
                self._by_page[entry.page] = entry
            parent = entry
        return full * size

    def violations(self) -> list[str]:
        """What of the index contradicts itself or the allocator, in words; empty unless there is a mistake here."""
        found = []
        for page, entry in self._by_page.items():
            if entry.page != page or self._by_key.get(entry.key) is not entry:
                found.append(f"page {page} and its key disagree")
        children = Counter(entry.parent for entry in self._by_key.values() if entry.parent is not None)
        for entry in self._by_key.values():
            if entry.page is None and not entry.children:
                found.append(f"{entry} has neither a page nor a successor")
            if entry.page is not None and self._by_page.get(entry.page) is not entry:
                found.append(f"{entry} has a page that is not known")
            if entry.children != children[entry]:
                found.append(f"{entry} has {children[entry]} successors, not {entry.children}")
            if entry.parent is not None and self._by_key.get(entry.parent.key) is not entry.parent:
                found.append(f"{entry} has outlived its predecessor")
        if set(self._by_page) != self.allocator.kept:
            found.append("the allocator keeps other pages than are known")
        return found

    def _found(self, tokens: Tokens, extra: Hashable, whole: bool, window: int | None) -> list[_Entry]:
        """The longest prefix of which all pages are known that a later query sees."""
        entries = list(self._walk(tokens, extra, whole))
        longest = known = 0  # known: pages without a gap, up to here
        for count, entry in enumerate(entries, 1):
            known = 0 if entry.page is None else known + 1
            if count - known <= unseen_pages(count * self.allocator.page_size, window, self.allocator.page_size):
                longest = count
        return entries[:longest]

    def _walk(self, tokens: Tokens, extra: Hashable, whole: bool) -> Iterator[_Entry]:
        """Entries of `tokens`, from the first on."""
        size = self.allocator.page_size
        parent = None
        for index in range((len(tokens) - (not whole)) // size if tokens else 0):
            own = _page_tokens(tokens, index, size)
            entry = self._by_key.get(self._key(parent, own, extra))
            if entry is None or not entry.holds(parent, own, extra):
                return
            yield entry
            parent = entry

    def _key(self, parent: _Entry | None, tokens: tuple[int, ...], extra: Hashable) -> Hashable:
        try:
            return self._hash((None if parent is None else parent.key, tokens, extra))
        except TypeError:
            hint = "a tensor's are tensor.tolist(); what else keys depend on has to be hashable, too"
            raise InputError("tokens", got=shown(tokens), expected="integers, and an extra", hint=hint) from None

    def _forget(self, page: int) -> None:
        entry: _Entry | None = self._by_page.pop(page)
        assert entry is not None
        entry.page = None
        while entry is not None and entry.page is None and not entry.children:
            del self._by_key[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.children -= 1


def unseen_pages(length: int, window: int | None, page_size: int) -> int:
    """Leading pages of a sequence of `length` tokens that no later query sees under a `window` of keys."""
    return 0 if window is None else max(0, length - window + 1) // page_size


def _check_start(tokens: object, extra: object, whole: bool, window: int | None) -> None:
    check_flags(whole=whole)
    if window is not None:
        check_count("window", window, 1)
    _check_tokens(tokens, extra)


def _check_tokens(tokens: object, extra: object) -> None:
    """Raise InputError unless tokens are a sequence of integers, and `extra` is hashable."""
    if not isinstance(tokens, collections.abc.Sequence) or isinstance(tokens, (str, bytes)):
        hint = "a tensor's are tensor.tolist()"
        raise InputError("tokens", got=type(tokens).__name__, expected="a sequence of integers", hint=hint)
    for kind in set(map(type, tokens)):
        if issubclass(kind, bool) or not issubclass(kind, numbers.Integral):
            got, hint = f"a {kind.__name__} among them", "a tensor's are tensor.tolist()"
            raise InputError("tokens", got=got, expected="a sequence of integers", hint=hint)
    try:
        hash(extra)
    except TypeError:
        hint = "a tuple in place of a list, a name in place of a tensor"
        raise InputError("extra", got=type(extra).__name__, expected="a hashable value", hint=hint) from None


@dataclass(frozen=True)
class SharedPrefix:
    """A run of block-table entries, start to stop - 1, that several sequences share: what `shared_prefixes` returns.

    The sharing is maximal: no further sequence has all these pages at these places, and not all members share the next.

    Attributes:
        members: places of the sequences in the list that was given.
        start, stop: first entry, and the one after the last; these pages are full.

    Example:
        >>> tw.kv.SharedPrefix(members=(0, 1), start=0, stop=2).members
        (0, 1)
    """

    members: tuple[int, ...]
    start: int
    stop: int


def shared_prefixes(sequences: Iterable[Sequence]) -> list[SharedPrefix]:
    """Which sequences share which leading pages: a tree, each node before its children.

    A node is a run of full pages that at least two sequences share. Its children are parts of its members, begin where
    it stops, and do not overlap. The pages that a sequence does not share begin where the last node that has it stops.

    Args:
        sequences: the sequences, whose block tables are compared.

    Returns:
        A list of `SharedPrefix`.

    Raises:
        InputError: something that is no list of `Sequence`s.

    Example:
        >>> pages = tw.kv.PageAllocator(num_pages=8, page_size=4)
        >>> first = pages.create()
        >>> _ = pages.append(first, 8)
        >>> tw.kv.shared_prefixes([first, *pages.fork(first)])
        [SharedPrefix(members=(0, 1), start=0, stop=2)]
    """
    sequences = listed("sequences", sequences, "sequences")
    for sequence in sequences:
        if not isinstance(sequence, Sequence):
            hint = "KVCache.new makes one"
            raise InputError("sequences", got=type(sequence).__name__, expected="sequences", hint=hint)
    tables = [[] if sequence.dropped else sequence.pages[: sequence.full_pages] for sequence in sequences]
    found = []
    waiting = [(list(range(len(tables))), 0)]
    while waiting:
        group, start = waiting.pop()
        branches: dict[int, list[int]] = {}
        for member in group:
            if len(tables[member]) > start:
                branches.setdefault(tables[member][start], []).append(member)
        nodes = []
        for members in branches.values():
            if len(members) > 1:
                stop = start + 1
                while _agree([tables[member] for member in members], stop):
                    stop += 1
                nodes.append((members, stop))
        found += [SharedPrefix(tuple(members), start, stop) for members, stop in nodes]
        waiting += reversed(nodes)
    return found


def _agree(tables: list[list[int]], index: int) -> bool:
    """Whether all tables have the same page at `index`."""
    first = tables[0]
    return index < len(first) and all(index < len(table) and table[index] == first[index] for table in tables)


def _page_tokens(tokens: Tokens, index: int, size: int) -> tuple[int, ...]:
    return tuple(tokens[index * size : (index + 1) * size])
