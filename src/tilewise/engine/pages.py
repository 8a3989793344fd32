"""Keys and values of the engine: pages that samples hold, and block tables on the device with a row for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilewise.engine.groups import Group
from tilewise.kv.allocator import PageAllocator
from tilewise.kv.pool import PagePool
from tilewise.kv.prefix import PrefixCache, unseen_pages
from tilewise.kv.sequence import NO_PAGE
from tilewise.kv.sequence import Sequence as Part


class Growth(NamedTuple):
    """What the device does before a step: pages to copy, and entries of the block tables that change."""

    copies: list[tuple[int, int]]  # (source, destination)
    changes: list[tuple[int, int, int, int]]  # (group, slot, index in its row, page)


class Held(NamedTuple):
    """Pages of one sample: in each group of layers a sequence, all of one length."""

    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """Tokens that there is room for."""
        return self.parts[0].length


class Pages:
    """Pages of all layers, and who holds them. Block tables stay on the device; only entries that change are sent.

    All groups of layers take pages from one allocator. Where a group's window has passed, its pages are handed back,
    and its table names a page that is always zero: kernels may load it, and no query sees it.

    Args:
        pool: the memory, with as many layers as the largest group; with windows its last page stays zero.
        groups: of layers.
        slots: rows of each block table.
        max_length: tokens of a sequence at most.
        share: whether sequences that begin alike share pages.
    """

    def __init__(self, pool: PagePool, groups: Sequence[Group], slots: int, max_length: int, *, share: bool) -> None:
        self.pool, self.groups = pool, tuple(groups)
        self._windows = any(group.window is not None for group in groups)
        self._zero = pool.num_pages - 1
        self.allocator = PageAllocator(pool.num_pages - self._windows, pool.page_size)
        self.allocator.on_replace = self._replaced
        width = -(-max_length // pool.page_size)
        self.tables = torch.zeros(len(groups), slots, width, dtype=torch.int32, device=pool.device)
        self._prefixes = PrefixCache(self.allocator) if share else None
        self._rows: dict[int, Held] = {}
        self._places: dict[Part, tuple[int, int]] = {}  # (group, slot)
        self._sent: dict[int, list[int]] = {}  # by slot: entries of each group's row that the device has
        self._stale: dict[int, set[tuple[int, int]]] = {}  # by slot: those of them, (group, index), that have changed
        self._grown: dict[int, Growth] = {}  # by slot, since the last launch

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pool.page_size

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold, of all layers."""
        return self.allocator.num_pages // len(self.groups) * self.page_size

    def start(self, tokens: Sequence[int], *, shared: bool = True) -> Held:
        """A sequence that begins with what is known of these tokens; its length says how many need no computing."""
        if self._prefixes is None or not shared:
            return Held(tuple(self.allocator.create() for _ in self.groups))
        known = tokens[: self.matched(tokens)]
        return Held(
            tuple(
                self._prefixes.start(known, number, whole=True, window=group.window)
                for number, group in enumerate(self.groups)
            )
        )

    def fork(self, held: Held, length: int) -> Held | None:
        """Another sequence with the first tokens of this one, in the same pages until one of them grows; None where
        this one has handed back pages that the other would need.
        """
        if not self._has_seen(held, length):
            return None
        parts = [self.allocator.fork(part)[0] for part in held.parts]
        for part in parts:
            self.allocator.truncate(part, length)
        return Held(tuple(parts))

    def free(self, held: Held) -> None:
        """End a sequence that has no slot."""
        for part in held.parts:
            self.allocator.free(part)

    def free_unseated(self) -> None:
        """End all sequences that have no slot."""
        for part in self.allocator.sequences:
            if part not in self._places:
                self.allocator.free(part)

    def forget(self) -> None:
        """Let nobody find what pages hold that no sequence has."""
        taken = self.allocator.create()
        self.allocator.append(taken, self.allocator.num_available * self.page_size)
        self.allocator.free(taken)

    def matched(self, tokens: Sequence[int]) -> int:
        """How many tokens `start` would find: a prefix that all groups know."""
        if self._prefixes is None:
            return 0
        found = len(tokens) - 1
        while True:
            before = found
            for number, group in enumerate(self.groups):
                found = self._prefixes.match(tokens[:found], number, whole=True, window=group.window)
            if found == before or len(self.groups) == 1:  # what one group finds, all others have to find as well
                return found

    def remember(self, held: Held, tokens: Sequence[int]) -> None:
        """Let later sequences find the full pages of this one, of which these tokens are written, or are by a step
        that was launched.
        """
        if self._prefixes is not None:
            for number, part in enumerate(held.parts):
                self._prefixes.insert(part, tokens, number)

    def drop_unseen(self, slot: int, length: int) -> None:
        """Hand back pages whose tokens no query of a slot's sequence sees from position `length` on; steps under way
        still read them, and whoever takes these pages writes after that.
        """
        if not self._windows:
            return
        for number, (part, group) in enumerate(zip(self._rows[slot].parts, self.groups, strict=True)):
            # the last full page stays: the prefix cache goes on from it
            unseen = min(unseen_pages(length, group.window, self.page_size), part.full_pages - 1)
            if unseen > part.dropped:
                self._stale[slot] |= {(number, index) for index in range(part.dropped, unseen)}
                self.allocator.drop_front(part, unseen)

    def seat(self, slot: int, held: Held) -> None:
        """Give a sequence a row of each block table."""
        self._rows[slot], self._sent[slot], self._stale[slot] = held, [0] * len(self.groups), set()
        for number, part in enumerate(held.parts):
            self._places[part] = (number, slot)

    def leave(self, slot: int) -> None:
        """Take it back, and end the sequence."""
        held = self._rows.pop(slot)
        self._grown.pop(slot, None)
        del self._sent[slot], self._stale[slot]
        for part in held.parts:
            del self._places[part]
        self.free(held)

    def needed(self, held: Held, count: int) -> int:
        """Pages that so many more tokens of a sequence take."""
        return sum(self.allocator.needed(part, count) for part in held.parts)

    def fits(self, held: Held, count: int, reserve: int = 0) -> bool:
        """Whether there are these, and a `reserve` beside them."""
        return self.needed(held, count) + reserve <= self.allocator.num_available

    def grow_in_place(self, slot: int, count: int) -> bool:
        """`grow`, if the device need not hear of it, as in most steps of a sequence that decodes; whether it did."""
        parts = self._rows[slot].parts
        if self._stale[slot] or self._sent[slot] != [len(part.pages) for part in parts]:
            return False
        return self.allocator.append_in_place(parts, count)

    def grow(self, slot: int, count: int) -> None:
        """Make room for more tokens of a slot's sequence, in the next step."""
        parts, sent, stale = self._rows[slot].parts, self._sent[slot], self._stale[slot]
        copies: list[tuple[int, int]] = []
        writes = self.allocator.append_all([(part, count) for part in parts])
        for number, (part, write) in enumerate(zip(parts, writes, strict=True)):
            if write.copies:  # the page that the first of the new tokens goes to
                stale.add((number, (part.length - count) // self.page_size))
            copies += write.copies
            stale |= {(number, index) for index in range(sent[number], len(part.pages))}
            sent[number] = len(part.pages)
        changes = [(number, slot, index, self._page(slot, number, index)) for number, index in sorted(stale)]
        self._grown[slot] = Growth(copies, changes)
        stale.clear()

    def shrink(self, slot: int, length: int) -> None:
        """Take back what a slot's sequence has beyond `length` tokens, after the step that it grew for."""
        for number, part in enumerate(self._rows[slot].parts):
            self.allocator.truncate(part, length)
            self._sent[slot][number] = min(self._sent[slot][number], len(part.pages))
        pages = [len(part.pages) for part in self._rows[slot].parts]
        self._stale[slot] = {(number, index) for number, index in self._stale[slot] if index < pages[number]}

    def move(self, slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy keys and values of tokens of these slots' sequences to other positions of theirs, all at once.

        Args:
            slots, sources, targets: int32 (n,) on the device; the slot, a token's position, and its new one.
        """
        rows = slots.long()
        places = []
        for positions in (sources, targets):
            index = positions.long()
            pages = self.tables[:, rows, index // self.page_size]
            places.append((pages.long() * self.page_size + index % self.page_size).flatten())
        self.pool.move(*places)

    def copies(self, slot: int) -> bool:
        """Whether a page of a slot's sequence gets its content in the next step, from another page."""
        return slot in self._grown and bool(self._grown[slot].copies)

    def grown(self) -> Growth:
        """What the device has to do before the next step, all together."""
        found = self._grown.values()
        return Growth([x for each in found for x in each.copies], [x for each in found for x in each.changes])

    def launched(self) -> None:
        """Note that the device does what `grown` said."""
        self._grown = {}

    def rewind(self, slot: int, length: int) -> int | None:
        """Take back what a slot's sequence has beyond `length` tokens, and what `grow` made since the last launch.

        Returns:
            Tokens that it has now: fewer than `length` where their page was to be copied, which did not happen. None
            where it has handed back pages that the next query sees, and nothing has changed.
        """
        held, growth = self._rows[slot], self._grown.get(slot)
        if growth is not None and growth.copies:
            copied = {page for _, page in growth.copies}
            index = min(part.pages.index(page) for part in held.parts for page in copied & set(part.pages))
            length = min(length, index * self.page_size)
        if not self._has_seen(held, length):
            return None
        for part in held.parts:
            self.allocator.truncate(part, length)
        self._grown.pop(slot, None)
        self._sent[slot], self._stale[slot] = [0] * len(self.groups), set()  # nobody knows how far the device came
        return length

    def violations(self) -> list[str]:
        """What of the bookkeeping contradicts itself, in words."""
        found = self.allocator.violations() + (self._prefixes.violations() if self._prefixes is not None else [])
        host = self.tables.tolist()
        for slot, held in self._rows.items():
            for number, part in enumerate(held.parts):
                if part.length != held.length:
                    found.append(f"slot {slot} has {part.length} tokens in group {number}, {held.length} in the first")
                for index in range(self._sent[slot][number]):
                    stale = (number, index) in self._stale[slot]
                    if not stale and host[number][slot][index] != self._page(slot, number, index):
                        found.append(f"entry {index} of row {slot} of group {number} on the device is another page")
        return found

    def _has_seen(self, held: Held, length: int) -> bool:
        """Whether a sequence has all pages that queries see from position `length` on."""
        return all(
            part.dropped <= unseen_pages(length, group.window, self.page_size)
            for part, group in zip(held.parts, self.groups, strict=True)
        )

    def _page(self, slot: int, number: int, index: int) -> int:
        """What an entry of a block table is."""
        page = self._rows[slot].parts[number].pages[index]
        return self._zero if page == NO_PAGE else page

    def _replaced(self, part: Part, index: int) -> None:
        number, slot = self._places.get(part, (0, -1))
        if slot >= 0 and index < self._sent[slot][number]:
            self._stale[slot].add((number, index))
