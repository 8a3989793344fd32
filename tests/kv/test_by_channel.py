"""A cache of keys by channel against plain lists: pages close when they are full, and open again when they are cut."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, OutOfPagesError
from tilewise.kv import KVCache, PagePool, Sequence
from tilewise.kv.open import OpenPages
from tilewise.quant import ByChannel, Encoded, decode, encode, encode_by_channel

LAYERS, HEADS_Q, HEADS, DIM, DIM_V, SIZE = 2, 4, 2, 8, 12, 4


@dataclass
class Text:
    """What a sequence must read: in each layer keys by page, float32, and values; whether a page of keys is codes."""

    keys: list[list[torch.Tensor]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])
    values: list[list[torch.Tensor]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, bits: int, kind: str) -> None:
        """One token; keys that were codes are rounded when their page is opened."""
        pages = self.keys[layer]
        if not pages or len(pages[-1]) == SIZE:
            pages.append(k.float()[:0])
        page = torch.cat([pages[-1].to(k.dtype), k])
        pages[-1] = page.float()
        if len(page) == SIZE:
            pages[-1] = encode_by_channel(page[None], bits).keys(torch.tensor([0]))[0]
        self.values[layer].append(decode(encode(v, kind)))

    def truncate(self, length: int) -> None:
        for layer in range(LAYERS):
            flat = torch.cat([*self.keys[layer], torch.zeros(0, HEADS, DIM)])[:length]
            self.keys[layer] = list(flat.split(SIZE)) if length else []
            self.values[layer] = self.values[layer][:length]

    def copy(self) -> Text:
        return Text([list(pages) for pages in self.keys], [list(values) for values in self.values])


class Checked:
    """A cache, and what its sequences must read."""

    def __init__(
        self, bits: int = 4, kind: str = "int8", order: str = "NHD", device: str = "cpu", **sizes: int
    ) -> None:
        sizes = {"num_pages": 24, "open_pages": 6} | sizes
        self.cache = KVCache(
            LAYERS, sizes["num_pages"], SIZE, HEADS, DIM, DIM_V, order=order, encoding=kind, keys_by_channel=bits,
            open_pages=sizes["open_pages"], device=device,
        )  # fmt: skip
        for layer in range(LAYERS):
            keys, values = self.cache.pages(layer)
            assert isinstance(keys, ByChannel)
            assert isinstance(values, Encoded)
            for x in (keys.scale, keys.least, keys.open, values.scale):
                x.fill_(torch.nan)
        self.bits, self.kind, self.device = bits, kind, device
        self.texts: dict[Sequence, Text] = {}
        self.make = torch.Generator().manual_seed(0)

    def new(self) -> Sequence:
        sequence = self.cache.new()
        self.texts[sequence] = Text()
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        (found,) = self.cache.fork(sequence)
        self.texts[found] = self.texts[sequence].copy()
        return found

    def truncate(self, sequence: Sequence, length: int) -> None:
        self.cache.truncate(sequence, length)
        self.texts[sequence].truncate(length)

    def free(self, sequence: Sequence) -> None:
        self.cache.free(sequence)
        del self.texts[sequence]

    def extend(self, counts: dict[Sequence, int]) -> None:
        """A step; then every sequence of it reads its text, bit for bit, and attention agrees."""
        batch = self.cache.extend(list(counts), list(counts.values()))
        total = sum(counts.values())
        for layer in range(LAYERS):
            k, v = (torch.randn(total, HEADS, dim, generator=self.make).bfloat16() for dim in (DIM, DIM_V))
            k = k + 5 * torch.arange(DIM)
            batch.write(layer, k.to(self.device), v.to(self.device))
            start = 0
            for sequence, count in counts.items():
                for token in range(start, start + count):
                    one = slice(token, token + 1)
                    self.texts[sequence].append(layer, k[one], v[one], self.bits, self.kind)
                start += count
            for sequence in counts:
                self._reads_its_text(sequence, layer)
            q = torch.randn(total, HEADS_Q, DIM, generator=self.make)
            got = tw.attention(q.to(self.device), *self.cache.pages(layer), layout=batch.layout, mask=tw.causal)
            want = [torch.zeros(0, HEADS_Q, DIM_V)]
            for sequence, rows in zip(counts, q.split(list(counts.values())), strict=True):
                if len(rows):
                    text = self.texts[sequence]
                    keys, values = torch.cat(text.keys[layer])[None], torch.cat(text.values[layer])[None]
                    want.append(tw.attention(rows[None], keys, values, mask=tw.causal, impl="reference")[0])
            torch.testing.assert_close(got.cpu(), torch.cat(want), rtol=1e-4, atol=1e-4)

    def _reads_its_text(self, sequence: Sequence, layer: int) -> None:
        keys, values = self.cache.pages(layer)
        assert isinstance(keys, ByChannel)
        assert isinstance(values, Encoded)
        pages = torch.tensor(sequence.pages, dtype=torch.int64, device=self.device)
        text, length = self.texts[sequence], sequence.length
        for found, want in ((keys.keys(pages), text.keys[layer]), (decode(values)[pages], text.values[layer])):
            if length:
                assert torch.equal(found.flatten(0, 1)[:length].cpu(), torch.cat(want))

    def check_rows(self) -> None:
        """Pages that are open are those whose device place says so, in rows of their own."""
        keys, _ = self.cache.pages(0)
        assert isinstance(keys, ByChannel)
        assert self.cache._open is not None
        rows = self.cache._open._rows
        assert len(set(rows.values())) == len(rows)
        for page, row in rows.items():
            assert keys.place[page] == row


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("bits", "kind"), [(4, "int8"), (4, "int4"), (2, "fp8"), (2, "int4")])
def test_sequences_read_their_text(bits: int, kind: str, order: str) -> None:
    """Prompts longer than pages, tokens one by one through the ends of pages, forks, and drafts over two pages."""
    checked = Checked(bits, kind, order)
    one, two = checked.new(), checked.new()
    checked.extend({one: 3 * SIZE + 1, two: SIZE - 1})
    for _ in range(SIZE + 1):
        checked.extend({two: 1, one: 1})
    three = checked.fork(one)
    checked.extend({three: 2 * SIZE, one: 1})
    checked.extend({one: 0, two: SIZE + 2})
    checked.check_rows()


def test_a_page_of_codes_that_is_cut_is_opened_when_it_is_written() -> None:
    checked = Checked()
    one = checked.new()
    checked.extend({one: 2 * SIZE})
    two = checked.fork(one)
    checked.truncate(one, SIZE + 2)
    checked.extend({one: 0})  # read: it stays codes
    assert not checked.cache._open._rows  # type: ignore[union-attr]
    checked.extend({one: 1})  # two reads the page: a copy
    checked.extend({two: 3})
    checked.truncate(two, SIZE + 1)
    checked.extend({two: SIZE - 1})  # alone, in place; full at once
    checked.truncate(two, 1)
    checked.extend({two: 1, one: 1})
    checked.check_rows()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_done(data: st.DataObject) -> None:
    checked = Checked(data.draw(st.sampled_from([4, 2])), open_pages=3, num_pages=14)
    checked.new()
    for _ in range(data.draw(st.integers(1, 14))):
        live = list(checked.texts)
        one = data.draw(st.sampled_from(live))
        match data.draw(st.sampled_from(["extend", "extend", "extend", "fork", "truncate", "free"])):
            case "extend":
                chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3, unique=True))
                counts = {s: data.draw(st.integers(0, 2 * SIZE + 1)) for s in chosen}
                before = [(s.length, list(s.pages)) for s in live]
                try:
                    checked.extend(counts)
                except OutOfPagesError:
                    assert before == [(s.length, list(s.pages)) for s in live]
                checked.check_rows()
            case "fork":
                if len(live) < 4:
                    checked.fork(one)
            case "truncate":
                checked.truncate(one, data.draw(st.integers(0, one.length)))
            case "free":
                checked.free(one)
                checked.new()
    assert not checked.cache.allocator.violations()


def test_remembered_pages_are_codes() -> None:
    checked = Checked()
    prompt = list(range(2 * SIZE + 1))
    one = checked.new()
    checked.extend({one: len(prompt)})
    assert checked.cache.remember(one, prompt) == 2 * SIZE
    two = checked.cache.new(prompt)
    assert two.pages == one.pages[:2]
    checked.texts[two] = checked.texts[one].copy()
    checked.texts[two].truncate(two.length)
    checked.free(one)
    checked.extend({two: 1})
    checked.truncate(two, SIZE + 1)
    checked.extend({two: 1})  # a remembered page is not written: a copy
    assert two.pages[1] not in checked.cache.allocator.kept
    checked.check_rows()


def test_one_row_for_each_sequence_is_enough() -> None:
    """However many pages a step crosses; and one sequence more is refused, and nothing has changed."""
    checked = Checked(open_pages=2)
    one, two = checked.new(), checked.new()
    for count in (1, SIZE, 2 * SIZE + 1, SIZE + 3, SIZE):
        checked.extend({one: count, two: count})
    three = checked.new()
    free = checked.cache.allocator.num_free
    with pytest.raises(OutOfPagesError, match="open pages: got 3 needed; expected at most 2"):
        checked.cache.extend([three], 1)
    assert (checked.cache.allocator.num_free, three.length) == (free, 0)
    checked.extend({three: SIZE})  # a full page needs none
    checked.free(two)
    checked.extend({three: 1})


def test_twins_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are not opened where they are cut, or not closed where they are full, show."""
    follow = OpenPages.follow

    def never_opens(self, *arguments):  # type: ignore[no-untyped-def]
        return follow(self, *arguments)._replace(opened=())

    def never_closes(self, *arguments):  # type: ignore[no-untyped-def]
        found = follow(self, *arguments)
        return found._replace(places=tuple((page, max(place, 0)) for page, place in found.places))

    for twin in (never_opens, never_closes):
        monkeypatch.setattr(OpenPages, "follow", twin)
        with pytest.raises((AssertionError, InputError)):
            test_a_page_of_codes_that_is_cut_is_opened_when_it_is_written()


def test_bytes() -> None:
    """A page's channels have two numbers of 16 bits each; open pages and scales of values count."""
    pool = PagePool(3, 5, 4, 2, 16, 8, encoding="int8", keys_by_channel=2, open_pages=2)
    of_layer = 5 * 4 * 2 * (4 + 8 + 4) + 5 * 2 * 16 * 2 * 2 + 2 * 4 * 2 * 16 * 2
    assert pool.nbytes == 3 * of_layer
    k, v = pool.pages(2)
    assert isinstance(k, ByChannel)
    assert (k.shape, v.shape, k.bits, k.open.dtype) == ((5, 4, 2, 16), (5, 4, 2, 8), 2, torch.bfloat16)
    assert pool.dtype == torch.int8
    assert not k.keys(torch.arange(5)).any()


def test_what_a_pool_refuses() -> None:
    for change, message in (
        ({"keys_by_channel": 3}, "keys_by_channel: got 3; expected 4 or 2"),
        ({"encoding": None}, "encoding: got none, with keys_by_channel; expected the encoding of values"),
        ({"open_pages": None}, "open_pages: got None; expected an integer, at least 1"),
        ({"open_pages": 0}, "open_pages: got 0; expected an integer, at least 1"),
        ({"keys_by_channel": None}, "open_pages: got 2; expected None without keys_by_channel"),
        (
            {"head_dim": 6, "keys_by_channel": 2},
            "head_dim: got head_dim 6; expected a multiple of 4 for keys of 2 bits",
        ),
        ({"head_dim_v": 3}, "head_dim_v: got head_dim 3; expected an even head_dim for 'int4'"),
    ):
        arguments = {"head_dim": 8, "encoding": "int4", "keys_by_channel": 4, "open_pages": 2} | change
        with pytest.raises(InputError, match=message):
            PagePool(1, 2, 4, 2, **arguments)  # type: ignore[arg-type]
