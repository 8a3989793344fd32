"""A sequence's pages by number, and what a caller does before it writes into them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.core.errors import InputError
from tilewise.kv.arguments import check_index

NO_PAGE = -1  # where a sequence had a page that it has handed back


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence's length in tokens and its pages. `KVCache` and `PageAllocator` change both; all others only read.

    Token t lies in slot `pages[t // page_size] * page_size + t % page_size`. Sequences compare by identity.

    Attributes:
        page_size: slots of a page.
        pages: numbers of its pages, in the order of its tokens; `NO_PAGE` (-1) for those that were handed back.
        length: number of its tokens.
        dropped: how many leading pages `PageAllocator.drop_front` has handed back.

    Example:
        >>> tw.kv.Sequence(page_size=16, pages=[3, 1], length=20).slot(0)
        48
    """

    page_size: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    dropped: int = 0

    @property
    def full_pages(self) -> int:
        """How many of the pages have every slot taken."""
        return self.length // self.page_size

    def slot(self, token: int) -> int:
        """The slot of a token.

        Args:
            token: its number, from 0.

        Returns:
            The slot's number.

        Raises:
            InputError: the token is not there, or its page was handed back.
        """
        check_index("token", token, self.length, "tokens of the sequence")
        if token // self.page_size < self.dropped:
            expected = f"{self.dropped * self.page_size} or later"
            raise InputError("token", got=token, expected=expected, hint="drop_front has handed back its page")
        return self.pages[token // self.page_size] * self.page_size + token % self.page_size


class Write(NamedTuple):
    """What the caller of `PageAllocator.append` has to do: first copy pages, then write new tokens into slots.

    Attributes:
        runs: ranges of slots in the order of the tokens, one for each page.
        copies: pairs (source page, destination page), at most one; those of several appends are done in the order of
            the appends, all before any write.

    Example:
        >>> pages = tw.kv.PageAllocator(num_pages=8, page_size=4)
        >>> pages.append(pages.create(), 6).runs
        (range(0, 4), range(4, 6))
    """

    runs: tuple[range, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def slots(self) -> list[int]:
        """One slot for each new token."""
        return list(itertools.chain.from_iterable(self.runs))


def pages_for(length: int, page_size: int) -> int:
    """Pages that so many tokens take."""
    return -(-length // page_size)


def runs_of(pages: list[int], start: int, stop: int, page_size: int) -> tuple[range, ...]:
    """The slots of tokens start to stop - 1, a range for each page."""
    runs = []
    while start < stop:
        index, offset = divmod(start, page_size)
        count = min(page_size - offset, stop - start)
        first = pages[index] * page_size + offset
        runs.append(range(first, first + count))
        start += count
    return tuple(runs)
