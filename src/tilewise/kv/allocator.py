"""Pages of a KV cache by number: who holds which, which slots to write, which pages to copy before. No tensors."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from tilewise.core.errors import InputError, OutOfPagesError, shown
from tilewise.kv.arguments import check_count, check_index, described, listed
from tilewise.kv.sequence import NO_PAGE, Sequence, Write, pages_for, runs_of


class PageAllocator:
    """`num_pages` pages of `page_size` slots, handed out to sequences and shared between them. It has no tensors.

    A page is used (sequences hold it), cached (none does, but its content is kept to be found again) or free. `append`
    says where the caller writes; it asks for a copy of a page with other holders, or whose content is kept. Operations
    take time in proportion to the pages that they touch, are deterministic, and succeed or change nothing.

    Args:
        num_pages: pages in the pool, numbered from 0.
        page_size: slots of a page, one for each token; any number from 1 on.

    Raises:
        InputError: a size that is no positive integer; in methods, a sequence that was freed, an argument out of range.
        OutOfPagesError: an operation needs more pages than are free or cached; nothing has changed.

    Example:
        >>> pages = tw.kv.PageAllocator(num_pages=8, page_size=4)
        >>> first = pages.create()
        >>> pages.append(first, 6).slots
        [0, 1, 2, 3, 4, 5]
        >>> second = pages.fork(first)[0]
        >>> pages.append(second).copies  # the page that both hold is copied before it is written
        ((1, 2),)
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        check_count("num_pages", num_pages, 1)
        check_count("page_size", page_size, 1)
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] | None = None
        self.on_replace: Callable[[Sequence, int], None] | None = None  # a sequence, and the index of another page
        self._free = list(range(num_pages - 1, -1, -1))  # the next page is the last entry
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next page to evict is the first entry
        self._kept: set[int] = set()
        self._holders = [0] * num_pages
        self._live: dict[Sequence, None] = {}

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence holds and whose content is kept until the page is needed."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, each counted once."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that an operation can take: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def kept(self) -> frozenset[int]:
        """Pages whose content is known, used or cached."""
        return frozenset(self._kept)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The live sequences, oldest first."""
        return tuple(self._live)

    def holders(self, page: int) -> int:
        """How many sequences hold `page`."""
        check_index("page", page, self.num_pages, "pages are those of a table")
        return self._holders[page]

    def wasted_slots(self) -> int:
        """Slots of used pages in which no sequence has a token; walks every block table."""
        filled: dict[int, int] = {}
        for sequence in self._live:
            for index, page in enumerate(sequence.pages[sequence.dropped :], sequence.dropped):
                tokens = min(self.page_size, sequence.length - index * self.page_size)
                filled[page] = max(filled.get(page, 0), tokens)
        return sum(self.page_size - tokens for tokens in filled.values())

    def create(self, shared: Iterable[int] = (), *, dropped: int = 0) -> Sequence:
        """Start a sequence: empty, or with full pages `shared` whose content is kept, of which it becomes a holder.
        They come after `dropped` pages that it does not have, as if `drop_front` had handed those back.
        """
        check_count("dropped", dropped, 0)
        pages = listed("shared", shared, "pages that are kept")
        for page in pages:
            self._check_known(page)
        for page in pages:
            self._hold(page)
        pages = [NO_PAGE] * dropped + pages
        sequence = Sequence(self.page_size, pages, len(pages) * self.page_size, dropped)
        self._live[sequence] = None
        return sequence

    def needed(self, sequence: Sequence, n: int = 1) -> int:
        """Pages that `append` of `n` tokens to `sequence` would take now, the destination of a copy included."""
        self.check_live(sequence)
        check_count("n", n, 0)
        return self._growth(sequence, n) + self._copies(sequence, n)

    def append(self, sequence: Sequence, n: int = 1) -> Write:
        """Make room for `n` more tokens of `sequence`; the result says what to copy and where to write.

        Raises:
            OutOfPagesError: fewer pages are free or cached than are needed; nothing has changed.
            InputError: the sequence was freed or is another allocator's, or `n` is negative.
        """
        self.check_live(sequence)
        check_count("n", n, 0)
        copied = self._copies(sequence, n)
        taken = self._take(self._growth(sequence, n) + copied)
        pages = sequence.pages
        copies: tuple[tuple[int, int], ...] = ()
        if copied:
            source, pages[-1] = pages[-1], taken[0]
            copies = ((source, taken[0]),)
            self._release(source)
        pages.extend(taken[copied:])
        start, sequence.length = sequence.length, sequence.length + n
        return Write(runs_of(pages, start, sequence.length, self.page_size), copies)

    def append_in_place(self, sequences: Iterable[Sequence], n: int = 1) -> bool:
        """`append` of `n` tokens to each of the live `sequences`, if that takes no page and copies none. Unlike
        `append` it checks no argument: it is for steps of many sequences that grow by a token.

        Returns:
            Whether it did; else nothing has changed.
        """
        size = self.page_size
        for sequence in sequences:
            used = sequence.length % size
            if not used or used + n > size:
                return False
            last = sequence.pages[-1]
            if self._holders[last] > 1 or last in self._kept:
                return False
        for sequence in sequences:
            sequence.length += n
        return True

    def append_all(self, wanted: Iterable[tuple[Sequence, int]]) -> list[Write]:
        """Append to each of `wanted`, pairs (sequence, n), in their order, or to none of them.

        No page that is copied from is handed out again here, so the copies may be made at once.

        Raises:
            OutOfPagesError: fewer pages are available now than all take; nothing has changed.
            InputError: as `append` raises it, or for a sequence that comes twice; nothing has changed.
        """
        batch = listed("wanted", wanted, "pairs of a sequence and how many tokens it grows by")
        try:
            once = len({sequence for sequence, _ in batch}) == len(batch)
        except (TypeError, ValueError):
            got, hint = shown(batch), "append_all([(sequence, 1), ...])"
            raise InputError("wanted", got=got, expected="pairs (sequence, tokens)", hint=hint) from None
        if not once:
            raise InputError("sequences", got="the same one twice", expected="each once", hint="add up its new tokens")
        self._check_available(self._needed_by_all(batch))
        return [self.append(sequence, n) for sequence, n in batch]

    def shortfall(self, wanted: Iterable[tuple[Sequence, int]]) -> int:
        """Pages that `append_all` would lack now for `wanted`, pairs (sequence, tokens); 0 if there are enough."""
        return max(0, self._needed_by_all(listed("wanted", wanted, "pairs (sequence, tokens)")) - self.num_available)

    def fork(self, sequence: Sequence, n: int = 1) -> list[Sequence]:
        """Start `n` sequences with the tokens and pages of `sequence`; what `append` gave must have been written."""
        self.check_live(sequence)
        check_count("n", n, 0)
        for page in sequence.pages[sequence.dropped :]:
            self._holders[page] += n
        forks = [Sequence(self.page_size, list(sequence.pages), sequence.length, sequence.dropped) for _ in range(n)]
        self._live.update(dict.fromkeys(forks))
        return forks

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of `sequence` from `length` on, and hand back the pages that held nothing else."""
        self.check_live(sequence)
        check_count("length", length, 0)
        if length > sequence.length:
            raise InputError(
                "length",
                got=shown(length),
                expected=f"0 to {sequence.length}, the sequence's length",
                hint="KVCache.extend (PageAllocator.append) adds tokens",
            )
        if length < sequence.dropped * self.page_size:
            expected = f"{sequence.dropped * self.page_size} or more"
            raise InputError("length", got=length, expected=expected, hint="drop_front has handed back those before")
        self._drop(sequence, pages_for(length, self.page_size))
        sequence.length = length

    def drop_front(self, sequence: Sequence, pages: int) -> None:
        """Hand back the first `pages` pages of `sequence`, whose tokens no later query sees; its length stays.

        Layers with a sliding window need only the last tokens. Where a page was, `sequence.pages` has `NO_PAGE`.

        Raises:
            InputError: the sequence was freed, or has not so many full pages.

        Example:
            >>> pages = tw.kv.PageAllocator(num_pages=8, page_size=4)
            >>> sequence = pages.create()
            >>> _ = pages.append(sequence, 10)
            >>> pages.drop_front(sequence, 2)
            >>> sequence.pages, sequence.length, pages.num_free
            ([-1, -1, 2], 10, 7)
        """
        self.check_live(sequence)
        check_count("pages", pages, 0)
        if pages > sequence.full_pages:
            expected = f"0 to {sequence.full_pages}, its full pages"
            raise InputError("pages", got=pages, expected=expected, hint="the last tokens' page is still written")
        for index in range(sequence.dropped, pages):
            self._release(sequence.pages[index])
            sequence.pages[index] = NO_PAGE
        sequence.dropped = max(sequence.dropped, pages)

    def free(self, sequence: Sequence) -> None:
        """End the `sequence` and hand back its pages, last first, so that of kept ones the first is evicted last."""
        self.check_live(sequence)
        self._drop(sequence, 0)
        sequence.length = 0
        del self._live[sequence]

    def keep(self, page: int) -> None:
        """Keep the content of a used `page`: it is not written any more, and cached when its last holder goes."""
        if not self.holders(page):
            raise InputError(
                "page",
                got=f"page {page}, held by none",
                expected="a used page",
                hint="keep a page while a sequence holds it",
            )
        self._kept.add(page)

    def merge(self, sequence: Sequence, index: int, page: int) -> None:
        """Put the kept `page` in place of page number `index` of `sequence`, which has the same content.

        It replaces that page in every table: sequences that share a page share all before it, and still do.
        """
        self.check_live(sequence)
        self._check_known(page)
        check_index("index", index, sequence.full_pages, "only full pages are replaced")
        replaced = sequence.pages[index]
        alone = self._holders[replaced] == 1
        for other in [sequence] if alone else self._live:
            if index < len(other.pages) and other.pages[index] == replaced:
                self._hold(page)
                self._release(replaced)
                other.pages[index] = page
                if self.on_replace is not None:
                    self.on_replace(other, index)

    def check_live(self, sequence: Sequence) -> None:
        """Raise InputError unless the sequence is one of this allocator and has not been freed."""
        known = isinstance(sequence, Sequence)
        if not known or sequence not in self._live:
            raise InputError(
                "sequence",
                got="a sequence that was freed, or another allocator's" if known else type(sequence).__name__,
                expected="a live sequence",
                hint="KVCache.new (PageAllocator.create) and fork make sequences, and free ends them",
            )

    def violations(self) -> list[str]:
        """What of the bookkeeping contradicts itself, in words; empty unless there is a mistake in this file."""
        found = []
        held = Counter(page for sequence in self._live for page in sequence.pages[sequence.dropped :])
        places = Counter([*self._free, *self._cached, *set(held)])
        for page in range(self.num_pages):
            if places[page] != 1:
                found.append(f"page {page} is in {places[page]} of free, cached and used")
            if self._holders[page] != held[page]:
                found.append(f"page {page} has {held[page]} holders, not {self._holders[page]}")
        found += [f"page {page} is cached but not kept" for page in self._cached if page not in self._kept]
        found += [f"page {page} is free but kept" for page in self._free if page in self._kept]
        if len(held) != self.num_used:
            found.append(f"{len(held)} pages are used, not {self.num_used}")
        before: dict[int, int] = {}
        for sequence in self._live:
            if len(sequence.pages) != pages_for(sequence.length, self.page_size):
                found.append(f"{sequence} has {len(sequence.pages)} pages")
            if sequence.pages[: sequence.dropped] != [NO_PAGE] * sequence.dropped:
                found.append(f"{sequence} still names pages that it has handed back")
            own = sequence.pages[sequence.dropped :]
            for previous, page in itertools.pairwise(own if sequence.dropped else [NO_PAGE, *own]):
                if before.setdefault(page, previous) != previous:
                    found.append(f"page {page} comes after page {previous} and after page {before[page]}")
        return found

    def _needed_by_all(self, batch: list[tuple[Sequence, int]]) -> int:
        """Pages that these sequences take together: each is given with how many tokens it grows by."""
        writers: Counter[int] = Counter()
        for sequence, n in batch:
            if self.needed(sequence, n) > self._growth(sequence, n):
                writers[sequence.pages[-1]] += 1
        # of those that hold a page and write it, the last one finds itself alone
        copied = sum(n - (n == self._holders[page] and page not in self._kept) for page, n in writers.items())
        return copied + sum(self._growth(sequence, n) for sequence, n in batch)

    def _growth(self, sequence: Sequence, n: int) -> int:
        return pages_for(sequence.length + n, self.page_size) - len(sequence.pages)

    def _copies(self, sequence: Sequence, n: int) -> int:
        """1 where the last page would be written and may not be."""
        if n == 0 or sequence.length % self.page_size == 0:
            return 0
        last = sequence.pages[-1]
        return int(self._holders[last] > 1 or last in self._kept)

    def _take(self, count: int) -> list[int]:
        self._check_available(count)
        return [self._take_one() for _ in range(count)]

    def _check_available(self, count: int) -> None:
        if count > self.num_available:
            raise OutOfPagesError(
                "pages",
                got=f"{count} needed",
                expected=f"at most {self.num_available} ({self.num_free} free, {self.num_cached} cached)",
                hint="free a sequence, try again later, or make the pool larger",
            )

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._kept.remove(page)
            if self.on_evict is not None:
                self.on_evict(page)
        self._holders[page] = 1
        return page

    def _hold(self, page: int) -> None:
        if not self._holders[page]:
            del self._cached[page]
        self._holders[page] += 1

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            if page in self._kept:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _drop(self, sequence: Sequence, keep: int) -> None:
        """Release all pages but the first `keep`, from the last on."""
        while len(sequence.pages) > max(keep, sequence.dropped):
            self._release(sequence.pages.pop())
        del sequence.pages[keep:]
        sequence.dropped = min(sequence.dropped, keep)

    def _check_known(self, page: int) -> None:
        if not isinstance(page, int) or page not in self._kept:
            got = f"page {described(page)}"
            raise InputError(
                "page",
                got=got,
                expected="one that is kept",
                hint="PageAllocator.keep marks a page while a sequence holds it",
            )
