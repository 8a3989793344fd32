"""Which pages are open, and where: rows for the keys of pages that are not full, counted without tensors."""

from __future__ import annotations

import collections.abc
from typing import NamedTuple

from tilewise.core.errors import OutOfPagesError
from tilewise.kv.allocator import PageAllocator
from tilewise.kv.sequence import Sequence


class Opened(NamedTuple):
    """What the caller of `OpenPages.follow` has to do: open pages, then note the places, then write the tokens.

    `opened` are pairs of a page and the row that gets its keys as they are. `places` are pairs of a page and its place
    from now on, as `tilewise.quant.ByChannel` has it.
    """

    opened: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int], ...]


class OpenPages:
    """Rows for the pages that sequences write but have not filled, one at most for each sequence.

    A page is opened by who writes into it, never by who reads it: a new page, the copy of a page that others read, and
    a page of codes that `truncate` left in the middle. It is closed by who fills it.

    Args:
        num_rows: pages that can be open at once.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows: dict[int, int] = {}  # by page; of pages that were handed back, too, until the next step

    def check(self, allocator: PageAllocator, wanted: collections.abc.Sequence[tuple[Sequence, int]]) -> None:
        """Raise OutOfPagesError if the new tokens of some sequences need more rows than there are."""
        size = allocator.page_size
        writers = {sequence for sequence, n in wanted if n}
        needed = len(self._held(allocator, writers))
        needed += sum(n > 0 and (s.length % size > 0 or (s.length + n) % size > 0) for s, n in wanted)
        if needed > self.num_rows:
            raise OutOfPagesError(
                "open pages",
                got=f"{needed} needed",
                expected=f"at most {self.num_rows}",
                hint="free a sequence, try again later, or make the cache with more open_pages",
            )

    def follow(
        self, allocator: PageAllocator, wanted: collections.abc.Sequence[tuple[Sequence, int]], before: list[int]
    ) -> Opened:
        """Open and close pages as the new tokens need it that the allocator has just made room for, having checked.

        Args:
            wanted: sequences, and how many new tokens each has.
            before: the last page that each had before.
        """
        size = allocator.page_size
        writes = [(s, s.length - n, page) for (s, n), page in zip(wanted, before, strict=True) if n]
        begun = [(s.pages[start // size], page) for s, start, page in writes if start % size]
        kept = self._held(allocator, {s for s, _, _ in writes}) | {page for page, old in begun if page == old}
        self._rows = {page: row for page, row in self._rows.items() if page in kept}
        free = sorted(set(range(self.num_rows)) - set(self._rows.values()), reverse=True)
        opened, places = [], {}
        for page, old in begun:
            if page not in self._rows:
                places[page] = self._rows[page] = free.pop()
                opened.append((old, self._rows[page]))
        for s, start, _ in writes:  # a row that is free now is read by who fills its page before another writes it
            for page in s.pages[start // size : s.full_pages]:
                row = self._rows.pop(page, None)
                places[page] = -1 if row is None else -1 - row
                if row is not None:
                    free.append(row)
        for s, _, _ in writes:
            if s.length % size and s.pages[-1] not in self._rows:
                places[s.pages[-1]] = self._rows[s.pages[-1]] = free.pop()
        return Opened(tuple(opened), tuple(places.items()))

    def _held(self, allocator: PageAllocator, writers: set[Sequence]) -> set[int]:
        """Open pages of all sequences but the writers."""
        size = allocator.page_size
        others = (s for s in allocator.sequences if s not in writers and s.length % size)
        return {s.pages[-1] for s in others if s.pages[-1] in self._rows}
