"""A KV cache twice: in pages, and as a plain list for each sequence; random operations on both must leave them equal.

The content of a slot is a fingerprint of its token and of all before it, as keys and values are: a page found for the
wrong prefix reads wrong even where its own tokens are the right ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.errors import OutOfPagesError
from tilewise.kv.allocator import PageAllocator
from tilewise.kv.prefix import PrefixCache
from tilewise.kv.sequence import Sequence, Write


@dataclass
class Text:
    """What a sequence should hold: its tokens, their fingerprints, and the extra that it was started with."""

    extra: Hashable
    tokens: list[int] = field(default_factory=list)
    prints: list[int] = field(default_factory=list)

    def extend(self, tokens: list[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            before = self.prints[-1] if self.prints else ("start", self.extra)
            self.prints.append(hash((before, token)))
        self.tokens += tokens

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        del self.tokens[length:], self.prints[length:]

    def copy(self) -> Text:
        """The same text, of its own."""
        return Text(self.extra, list(self.tokens), list(self.prints))


class MirroredCache:
    """An allocator with its prefix index, the slots that they manage, and a `Text` for each live sequence.

    Args:
        num_pages, page_size: of the allocator.
        hash: the index's hash function.
    """

    def __init__(self, num_pages: int, page_size: int, hash: Callable[[Hashable], Hashable] = hash) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.prefixes = PrefixCache(self.allocator, hash=hash)
        self.slots: list[int | None] = [None] * (num_pages * page_size)
        self.texts: dict[Sequence, Text] = {}
        self.refused = 0

    def start(self, tokens: list[int], extra: Hashable, whole: bool) -> Sequence:
        """Begin a sequence with what is known of `tokens`, and append the rest as far as the pool allows."""
        matched = self.prefixes.match(tokens, extra, whole=whole)
        sequence = self.prefixes.start(tokens, extra, whole=whole)
        assert sequence.length == matched <= max(0, len(tokens) - (not whole))
        self.texts[sequence] = text = Text(extra)
        text.extend(tokens[:matched])
        self.check(sequence)
        self.append(sequence, tokens[matched:])
        return sequence

    def append(self, sequence: Sequence, tokens: list[int]) -> Write | None:
        """Append and write; None where the pool refused, and then nothing may have changed."""
        enough = self.allocator.needed(sequence, len(tokens)) <= self.allocator.num_available
        before = None if enough else self.snapshot()
        try:
            write = self.allocator.append(sequence, len(tokens))
        except OutOfPagesError:
            assert self.snapshot() == before
            self.refused += 1
            return None
        assert enough
        size = self.allocator.page_size
        for source, target in write.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        text = self.texts[sequence]
        text.extend(tokens)
        slots = write.slots
        assert len(slots) == len(set(slots)) == len(tokens)
        for slot, value in zip(slots, text.prints[len(text.prints) - len(tokens) :], strict=True):
            self.slots[slot] = value
        return write

    def fork(self, sequence: Sequence, n: int) -> list[Sequence]:
        """Fork the sequence and its text."""
        forks = self.allocator.fork(sequence, n)
        self.texts.update((fork, self.texts[sequence].copy()) for fork in forks)
        return forks

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Cut the sequence and its text."""
        self.allocator.truncate(sequence, length)
        self.texts[sequence].cut(length)

    def insert(self, sequence: Sequence) -> int:
        """Make the full pages of the sequence known."""
        text = self.texts[sequence]
        known = self.prefixes.insert(sequence, text.tokens, text.extra)
        assert known == sequence.full_pages * self.allocator.page_size or self.prefixes._hash is not hash
        return known

    def free(self, sequence: Sequence) -> None:
        """End the sequence."""
        self.allocator.free(sequence)
        del self.texts[sequence]

    def check(self, sequence: Sequence) -> None:
        """The sequence, read through its block table, must be its text."""
        assert [self.slots[sequence.slot(token)] for token in range(sequence.length)] == self.texts[sequence].prints

    def check_all(self) -> None:
        """Every sequence must be its text, the bookkeeping sound, and the pages accounted for."""
        assert self.allocator.violations() == []
        assert self.prefixes.violations() == []
        assert self.allocator.sequences == tuple(self.texts)
        for sequence in self.texts:
            self.check(sequence)
        pages = {page for sequence in self.texts for page in sequence.pages}
        assert len(pages) == self.allocator.num_used

    def snapshot(self) -> Any:
        """All that the allocator and the index hold, in a form that can be compared."""
        allocator = self.allocator
        return (
            list(allocator._free), list(allocator._cached), set(allocator._kept), list(allocator._holders),
            [(sequence, list(sequence.pages), sequence.length) for sequence in allocator.sequences],
            dict(self.prefixes._by_key), dict(self.prefixes._by_page),
        )  # fmt: skip


def random_operations(cache: MirroredCache, operations: int, seed: int, *, check_every: int = 1000) -> dict[str, int]:
    """Run seeded random operations; the sequence that one touched is checked now and then, all of it `check_every`.

    Tokens are 0 or 1 and prompts begin alike, so that prefixes are found. Returns how often each operation ran.
    """
    draw = random.Random(seed)
    most = 3 * cache.allocator.page_size
    prompts = [draw.choices((0, 1), k=2 * most) for _ in range(4)]
    live: list[Sequence] = []
    counts = dict.fromkeys(("start", "append", "fork", "truncate", "insert", "free", "found"), 0)
    for done in range(operations):
        name = draw.choices(("start", "append", "fork", "truncate", "insert", "free"), (14, 44, 4, 8, 20, 18))[0]
        if name == "start" or not live:
            name = "start"
            tokens = draw.choice(prompts)[: draw.randrange(2 * most)] + draw.choices((0, 1), k=draw.randrange(4))
            live.append(cache.start(tokens, draw.choice((None, "a")), draw.random() < 0.2))
            counts["found"] += bool(live[-1].pages)
        else:
            place = draw.randrange(len(live))
            sequence = live[place]
            if name == "append" and cache.append(sequence, draw.choices((0, 1), k=draw.randint(1, 3))) is None:
                name = "free"  # what an engine does too: someone has to go
            elif name == "fork":
                live += cache.fork(sequence, draw.randint(1, 3))
            elif name == "truncate":
                cache.truncate(sequence, draw.randint(max(0, sequence.length - most), sequence.length))
            elif name == "insert":
                cache.insert(sequence)
            if name == "free":
                cache.free(sequence)
                live[place] = live[-1]
                live.pop()
            elif done % 8 == 0:
                cache.check(sequence)
        counts[name] += 1
        if done % check_every == 0:
            cache.check_all()
    cache.check_all()
    while live:
        cache.free(live.pop())
    cache.check_all()
    assert cache.allocator.num_used == 0
    return counts
