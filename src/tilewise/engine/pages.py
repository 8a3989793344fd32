"""Keys and values of the engine: pages that samples hold, and a block table on the device with a row for each slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tilewise.kv.allocator import PageAllocator
from tilewise.kv.pool import PagePool
from tilewise.kv.prefix import PrefixCache
from tilewise.kv.sequence import Sequence as Held


class Growth(NamedTuple):
    """What the device does before a step: pages to copy, and entries of the block table that change."""

    copies: list[tuple[int, int]]  # (source, destination)
    changes: list[tuple[int, int, int]]  # (slot, index in its row, page)


class Pages:
    """Pages of all layers, and who holds them. The block table stays on the device; only entries that change are sent.

    Args:
        pool: the memory.
        slots: rows of the block table.
        max_length: tokens of a sequence at most.
        share: whether sequences that begin alike share pages.
    """

    def __init__(self, pool: PagePool, slots: int, max_length: int, *, share: bool) -> None:
        self.pool = pool
        self.allocator = PageAllocator(pool.num_pages, pool.page_size)
        self.allocator.on_replace = self._replaced
        self.table = torch.zeros(slots, -(-max_length // pool.page_size), dtype=torch.int32, device=pool.device)
        self._prefixes = PrefixCache(self.allocator) if share else None
        self._rows: dict[int, Held] = {}
        self._slots: dict[Held, int] = {}
        self._sent: dict[int, int] = {}  # leading entries that the device's row has
        self._grown: dict[int, Growth] = {}  # since `grown` was last asked

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pool.page_size

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold."""
        return self.pool.num_pages * self.page_size

    def start(self, tokens: Sequence[int], *, shared: bool = True) -> Held:
        """A sequence that begins with what is known of these tokens; its length says how many need no computing."""
        if self._prefixes is None or not shared:
            return self.allocator.create()
        return self._prefixes.start(tokens)

    def fork(self, sequence: Held, length: int) -> Held:
        """Another sequence with the first tokens of this one, in the same pages until one of them grows."""
        (forked,) = self.allocator.fork(sequence)
        self.allocator.truncate(forked, length)
        return forked

    def matched(self, tokens: Sequence[int]) -> int:
        """How many tokens `start` would find."""
        return 0 if self._prefixes is None else self._prefixes.match(tokens)

    def remember(self, sequence: Held, tokens: Sequence[int]) -> None:
        """Let later sequences find the full pages of this one, of which these tokens are written, or are by a step
        that was launched.
        """
        if self._prefixes is not None:
            self._prefixes.insert(sequence, tokens)

    def seat(self, slot: int, sequence: Held) -> None:
        """Give a sequence a row of the block table."""
        self._rows[slot], self._slots[sequence], self._sent[slot] = sequence, slot, 0

    def leave(self, slot: int) -> None:
        """Take it back, and end the sequence."""
        sequence = self._rows.pop(slot)
        self._grown.pop(slot, None)
        del self._sent[slot], self._slots[sequence]
        self.allocator.free(sequence)

    def fits(self, wanted: Iterable[tuple[Held, int]]) -> bool:
        """Whether there are pages for these more tokens of these sequences."""
        return self.allocator.shortfall(wanted) == 0

    def grow(self, slot: int, count: int) -> None:
        """Make room for more tokens of a slot's sequence, in the next step."""
        sequence = self._rows[slot]
        before = len(sequence.pages)
        (write,) = self.allocator.append_all([(sequence, count)])
        first = min(self._sent[slot], before - bool(write.copies))
        changes = [(slot, at, sequence.pages[at]) for at in range(first, len(sequence.pages))]
        self._grown[slot] = Growth(list(write.copies), changes)
        self._sent[slot] = len(sequence.pages)

    def grown(self) -> Growth:
        """What the device has to do before the next step, all together."""
        found, self._grown = list(self._grown.values()), {}
        return Growth([x for each in found for x in each.copies], [x for each in found for x in each.changes])

    def violations(self) -> list[str]:
        """What of the bookkeeping contradicts itself, in words."""
        found = self.allocator.violations() + (self._prefixes.violations() if self._prefixes is not None else [])
        host = self.table.tolist()
        for slot, sequence in self._rows.items():
            sent = self._sent[slot]
            if host[slot][:sent] != sequence.pages[:sent]:
                found.append(f"row {slot} of the device's block table is not that of its sequence")
        return found

    def _replaced(self, sequence: Held, index: int) -> None:
        slot = self._slots.get(sequence)
        if slot is not None:
            self._sent[slot] = min(self._sent[slot], index)
