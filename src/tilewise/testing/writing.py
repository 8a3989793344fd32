"""`kv_write` and `copy_pages` in every tier: the memory afterwards, bit for bit as plain loops leave it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilewise as tw
from tilewise.quant import KINDS, ByChannel, Encoded, encode, encode_by_channel
from tilewise.testing.properties import Setting

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class WriteCase:
    """Tokens and pages: `memory` is "NHD" or "HND" pages in tensors of their own, or "joint" ones of keys and values in
    one tensor with room between heads. `sliced` tokens are parts of a joint projection. Every third token of `skip` has
    no slot.
    """

    name: str
    tokens: int = 9
    heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    page_size: int = 4
    num_pages: int = 7
    memory: str = "NHD"
    sliced: bool = False
    skip: bool = True
    index: torch.dtype = torch.int64
    seed: int = 0

    def __repr__(self) -> str:
        return self.name


CASES = [
    WriteCase("plain", skip=False),
    WriteCase("skips", index=torch.int32),
    WriteCase("hnd", memory="HND", sliced=True),
    WriteCase("joint", memory="joint", head_dim=24, head_dim_v=8),
    WriteCase("odd", heads=3, head_dim=5, head_dim_v=7, page_size=5, sliced=True),
    WriteCase("page_of_one", page_size=1, num_pages=13, heads=1),
    WriteCase("wide", tokens=3, heads=5, head_dim=192, head_dim_v=128, memory="HND"),
    WriteCase("one_token", tokens=1, heads=8, head_dim=128, head_dim_v=128, skip=False),
    WriteCase("no_token", tokens=0),
    WriteCase("all_slots", tokens=28, skip=False),
]
BY_NAME = {case.name: case for case in CASES}
ENCODED_CASES = [case for case in CASES if not (case.head_dim % 2 or case.head_dim_v % 2)]

CHANNEL_CASES = [case for case in ENCODED_CASES if case.head_dim % 4 == 0]


@dataclass(frozen=True)
class RopeCase:
    """Tokens of `case` whose keys are rotated: `rotary_dim` dimensions of them. `joint` tables are halves of one."""

    name: str
    case: WriteCase
    rotary_dim: int
    interleaved: bool = False
    table: torch.dtype = torch.float32
    joint: bool = False

    def __repr__(self) -> str:
        return self.name


FARTHEST = 100_000  # the largest position
ROPE_CASES = [
    RopeCase("halves", BY_NAME["plain"], 16),
    RopeCase("neighbours", BY_NAME["hnd"], 16, interleaved=True, joint=True),
    RopeCase("halves_of_some", BY_NAME["joint"], 12, table=torch.bfloat16),
    RopeCase("neighbours_of_some", BY_NAME["joint"], 20, interleaved=True, joint=True),
    RopeCase("odd_halves", BY_NAME["odd"], 2, joint=True),
    RopeCase("odd_neighbours", BY_NAME["odd"], 4, interleaved=True, table=torch.float16),
    RopeCase("one_pair", BY_NAME["skips"], 2, interleaved=True),
    RopeCase("three_halves", WriteCase("three", head_dim=6, head_dim_v=4, page_size=64, num_pages=3), 6),
    RopeCase("three_neighbours", WriteCase("three", head_dim=6, head_dim_v=2, page_size=16), 6, interleaved=True),
    RopeCase("uneven", WriteCase("uneven", heads=3, head_dim=48, page_size=1, num_pages=11), 32, joint=True),
    RopeCase("page_of_one", BY_NAME["page_of_one"], 8),
    RopeCase("wide", BY_NAME["wide"], 64, interleaved=True),
    RopeCase("one_token", BY_NAME["one_token"], 128),
    RopeCase("no_token", BY_NAME["no_token"], 16),
]
ENCODED_ROPE_CASES = [rotary for rotary in ROPE_CASES if not (rotary.case.head_dim % 2 or rotary.case.head_dim_v % 2)]

CHANNEL_ROPE_CASES = [rotary for rotary in ENCODED_ROPE_CASES if rotary.case.head_dim % 4 == 0]


@dataclass(frozen=True, eq=False)
class Memory:
    """Pages as views of all that was allocated for them."""

    owned: tuple[torch.Tensor, ...]
    k_pages: Any
    v_pages: Any

    @property
    def bits(self) -> list[torch.Tensor]:
        """All of it, gaps included; NaN compare as numbers."""
        return [x.view(BITS.get(x.dtype, x.dtype)).clone() for x in self.owned]


def make_memory(case: WriteCase, setting: Setting) -> Memory:
    """Pages that hold random numbers, and NaN here and there."""
    make = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=make)
        x[torch.rand(shape, generator=make) < 0.1] = torch.nan
        return x.to(setting.device, setting.dtype)

    sizes = (case.num_pages, case.page_size, case.heads)
    if case.memory == "joint":
        owned = random(case.num_pages, 2, case.page_size, case.heads, max(case.head_dim, case.head_dim_v) + 8)
        return Memory((owned,), owned[:, 0, ..., : case.head_dim], owned[:, 1, ..., : case.head_dim_v])
    if case.memory == "HND":
        k, v = (random(sizes[0], sizes[2], sizes[1], dim) for dim in (case.head_dim, case.head_dim_v))
        return Memory((k, v), k.transpose(1, 2), v.transpose(1, 2))
    k, v = (random(*sizes, dim) for dim in (case.head_dim, case.head_dim_v))
    return Memory((k, v), k, v)


def encoded_memory(case: WriteCase, setting: Setting, kind: str) -> Memory:
    """Encoded pages, a row of scales further apart than it need be: any bytes, and any numbers as scales."""
    make = torch.Generator().manual_seed(case.seed)
    owned: list[torch.Tensor] = []

    def pages(dim: int) -> Encoded:
        width, gap = dim // KINDS[kind].in_byte, 16 if case.memory == "joint" else 0
        rows = (case.page_size, case.heads) if case.memory != "HND" else (case.heads, case.page_size)
        data = torch.randint(0, 256, (case.num_pages, *rows, width + gap), generator=make).to(torch.uint8)
        scale = torch.randn(case.num_pages, *rows, 1 + gap, generator=make)
        owned.extend((data.to(setting.device), scale.to(setting.device)))
        found = (owned[-2][..., :width].view(KINDS[kind].dtype), owned[-1][..., 0])
        return Encoded(*(x.transpose(1, 2) for x in found)) if case.memory == "HND" else Encoded(*found)

    k_pages, v_pages = pages(case.head_dim), pages(case.head_dim_v)
    return Memory(tuple(owned), k_pages, v_pages)


def make_tokens(case: WriteCase, setting: Setting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, v, slots)"""
    make = torch.Generator().manual_seed(case.seed + 1)
    dims = (case.head_dim, case.head_dim_v)
    rows = torch.randn(case.tokens, case.heads * sum(dims), generator=make).to(setting.device, setting.dtype)
    split = case.heads * case.head_dim
    k = rows[:, :split].view(case.tokens, case.heads, case.head_dim)
    v = rows[:, split:].view(case.tokens, case.heads, case.head_dim_v)
    if not case.sliced:
        k, v = k.contiguous(), v.contiguous()
    slots = torch.randperm(case.num_pages * case.page_size, generator=make)[: case.tokens].to(case.index)
    if case.skip:
        slots[::3] = -1 - slots[::3]
    return k, v, slots.to(setting.device)


def writes_where_told(setting: Setting, case: WriteCase) -> None:
    """Every token is in its slot, and nothing else has changed, room between rows included."""
    memory, wanted = make_memory(case, setting), make_memory(case, setting)
    k, v, slots = make_tokens(case, setting)
    tw.kv_write(k, v, memory.k_pages, memory.v_pages, slots, impl=setting.impl)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted.k_pages[slot // case.page_size, slot % case.page_size] = k[token]
            wanted.v_pages[slot // case.page_size, slot % case.page_size] = v[token]
    _same(memory, wanted)


def encodes_where_told(setting: Setting, case: WriteCase, kind: str) -> None:
    """Every token's codes and scales are in its slot, bit for bit those of `encode`, and nothing else has changed."""
    memory, wanted = encoded_memory(case, setting, kind), encoded_memory(case, setting, kind)
    k, v, slots = make_tokens(case, setting)
    if case.tokens > 2:
        k[2, 0] = 0.0
    tw.kv_write(k, v, memory.k_pages, memory.v_pages, slots, impl=setting.impl)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = divmod(slot, case.page_size)
            for x, pages in ((k, wanted.k_pages), (v, wanted.v_pages)):
                made = encode(x[token], kind)
                pages.data[at], pages.scale[at] = made.data, made.scale
    _same(memory, wanted)


def memory_by_channel(case: WriteCase, setting: Setting, bits: int, kind: str = "int8") -> Memory:
    """As `encoded_memory`, with keys by channel: any numbers in as many open pages as there are pages, and of the
    places, which rows begin in no order, two of three below 0.
    """
    make = torch.Generator().manual_seed(case.seed + 3)
    values = encoded_memory(case, setting, kind)
    gap = 16 if case.memory == "joint" else 0
    rows = (case.page_size, case.heads) if case.memory != "HND" else (case.heads, case.page_size)

    def owned(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(*shape[:-1], shape[-1] + gap, generator=make) * 50
        return x.to(setting.device, dtype or setting.dtype)

    channels = (case.num_pages, case.heads, case.head_dim)
    data = owned(case.num_pages, *rows, case.head_dim * bits // 8, dtype=torch.int32).to(torch.uint8)
    scale, least, opened = owned(*channels), owned(*channels), owned(case.num_pages, *rows, case.head_dim)
    place = torch.randperm(case.num_pages, generator=make)
    place = torch.where(torch.arange(case.num_pages) % 3 == 0, place, -1 - place).to(setting.device, torch.int32)
    found = [x[..., : x.shape[-1] - gap] for x in (data, opened)]
    if case.memory == "HND":
        found = [x.transpose(1, 2) for x in found]
    scale_of, least_of = (x[..., : case.head_dim] for x in (scale, least))
    k_pages = ByChannel(found[0], scale_of, least_of, found[1], place)
    return Memory((*values.owned, data, scale, least, opened, place), k_pages, values.v_pages)


def slots_of_pages(case: WriteCase, place: torch.Tensor, device: str) -> torch.Tensor:
    """Slots that such pages may get, a page's side by side: some of each open page, and of each other page either all
    or those behind what it had when it was open; with `skip`, tokens without a slot between pages.
    """
    make = torch.Generator().manual_seed(case.seed + 4)
    slots: list[int] = []
    for page in torch.randperm(case.num_pages, generator=make)[: case.tokens].tolist():
        start, stop = sorted(torch.randint(0, case.page_size + 1, (2,), generator=make).tolist())
        if place[page] < 0:
            start, stop = (0 if page % 2 else min(max(start, 1), case.page_size - 1)), case.page_size
        slots += range(page * case.page_size + start, page * case.page_size + stop)
        slots += [-1] * (case.skip and page % 3 == 1)
    return torch.tensor(slots, dtype=case.index, device=device)


def encodes_full_pages(
    setting: Setting, case: WriteCase, bits: int, kind: str = "int8", rotary: RopeCase | None = None
) -> None:
    """Keys of open pages are in their rows, full pages are the codes of all their keys, bit for bit those of
    `encode_by_channel`, and nothing else has changed. Keys are rounded before, so steps make no difference.
    """
    memory, wanted = (memory_by_channel(case, setting, bits, kind) for _ in range(2))
    slots = slots_of_pages(case, memory.k_pages.place, setting.device)
    k, v, _ = make_tokens(replace(case, tokens=len(slots), num_pages=len(slots) + 1), setting)
    rope = None if rotary is None else make_rope(replace(rotary, case=case), slots)
    tw.kv_write(k, v, memory.k_pages, memory.v_pages, slots, rope=rope, impl=setting.impl)
    pages, rows = wanted.k_pages, wanted.k_pages.place.tolist()
    keys = [
        x if rope is None or slot < 0 else _turned(x, rope, token)[0].to(k.dtype)
        for token, (x, slot) in enumerate(zip(k, slots.tolist(), strict=True))
    ]
    found = {page: pages.open[-1 - place].clone() for page, place in enumerate(rows) if place < 0}
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, case.page_size)
            if rows[page] < 0:
                found[page][offset] = keys[token]
                if offset == case.page_size - 1:
                    full = encode_by_channel(found[page][None], bits)
                    pages.data[page], pages.scale[page], pages.least[page] = full.data[0], full.scale[0], full.least[0]
            else:
                pages.open[rows[page], offset] = keys[token]
            made = encode(v[token], kind)
            wanted.v_pages.data[page, offset], wanted.v_pages.scale[page, offset] = made.data, made.scale
    _same(memory, wanted)


def make_rope(rotary: RopeCase, slots: torch.Tensor) -> tw.Rope:
    """Any positions up to `FARTHEST`, both ends among them; of tokens without a slot positions that no table has."""
    make = torch.Generator().manual_seed(rotary.case.seed + 2)
    positions = torch.randint(0, FARTHEST + 1, slots.shape, generator=make)
    positions[1::4], positions[2::4] = 0, FARTHEST
    positions[slots.cpu() < 0] = torch.iinfo(rotary.case.index).max
    cos, sin = _tables(rotary.rotary_dim // 2, rotary.table, rotary.joint, slots.device)
    return tw.Rope(cos, sin, positions.to(slots.device, rotary.case.index), rotary.interleaved)


@functools.lru_cache(maxsize=32)
def _tables(half: int, dtype: torch.dtype, joint: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin)"""
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(FARTHEST + 1, dtype=torch.float64), frequency)
    both = torch.cat((angle.cos(), angle.sin()), 1).to(device, dtype)
    cos, sin = both.chunk(2, 1)
    return (cos, sin) if joint else (cos.contiguous(), sin.contiguous())


def rotates_where_told(setting: Setting, rotary: RopeCase, kind: str | None = None) -> None:
    """As `writes_where_told`, or with `kind` as `encodes_where_told`, with keys that are the products of complex
    numbers up to rounding, and bit for bit those of float32 arithmetic.
    """
    case = rotary.case
    memory, wanted = ((encoded_memory(case, setting, kind) if kind else make_memory(case, setting)) for _ in range(2))
    k, v, slots = make_tokens(case, setting)
    rope = make_rope(rotary, slots)
    if case.head_dim - rotary.rotary_dim > 1 and not kind:  # what stays, stays as it is
        k[1:, :, -2], k[1:, :, -1] = torch.inf, -0.0
    tw.kv_write(k, v, memory.k_pages, memory.v_pages, slots, rope=rope, impl=setting.impl)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = divmod(slot, case.page_size)
            turned, exact, error = _turned(k[token], rope, token)
            assert bool(((turned.double() - exact).abs() <= error)[..., : rope.rotary_dim].all())
            for x, pages in ((turned, wanted.k_pages), (v[token], wanted.v_pages)):
                if kind:
                    made = encode(x, kind)
                    pages.data[at], pages.scale[at] = made.data, made.scale
                else:
                    pages[at] = x.to(pages.dtype)
            if not kind:
                half = torch.finfo(k.dtype).eps / 2  # of a unit
                near = half * (exact.abs() + error + 2 * torch.finfo(k.dtype).tiny)
                off = (memory.k_pages[at].double() - exact).abs()
                assert bool((off <= error + near)[..., : rope.rotary_dim].all())
    _same(memory, wanted)


def _turned(x: torch.Tensor, rope: tw.Rope, token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads of one token, turned: in float32, in float64 by complex numbers, and how far these may be apart."""
    half = rope.rotary_dim // 2
    first = torch.arange(half, device=x.device) * (2 if rope.interleaved else 1)
    second = first + (1 if rope.interleaved else half)
    cos, sin = (table[int(rope.positions[token])] for table in (rope.cos, rope.sin))
    a, b, c, s = (y.float() for y in (x[:, first], x[:, second], cos, sin))
    turned, exact, error = x.float(), x.double(), torch.zeros_like(x, dtype=torch.float64)
    turned[:, first], turned[:, second] = a * c - b * s, b * c + a * s
    product = torch.complex(a.double(), b.double()) * torch.complex(c.double(), s.double())
    exact[:, first], exact[:, second] = product.real, product.imag
    for at, y, z in ((first, b, a), (second, a, b)):  # two products and their sum, each rounded
        error[:, at] = torch.finfo(torch.float32).eps * ((z * c).abs() + (y * s).abs()).double()
    return turned, exact, error


def copies_encoded_pages(setting: Setting, case: WriteCase, kind: str) -> None:
    """Every copy is its page, codes and scales, and nothing else has changed."""
    memory, wanted = encoded_memory(case, setting, kind), encoded_memory(case, setting, kind)
    pairs = torch.tensor([(1, 3), (-1, 0), (1, 0), (4, -1), (2, 5)], dtype=case.index).to(setting.device)
    for source, target in pairs.tolist():
        if min(source, target) >= 0:
            for pages in (wanted.k_pages, wanted.v_pages):
                pages.data[target], pages.scale[target] = pages.data[source], pages.scale[source]
    tw.copy_pages(memory.k_pages, memory.v_pages, pairs, impl=setting.impl)
    _same(memory, wanted)


def copies_whole_pages(setting: Setting, case: WriteCase) -> None:
    """Every copy is its page, and nothing else has changed."""
    memory, wanted = make_memory(case, setting), make_memory(case, setting)
    order = torch.randperm(case.num_pages, generator=torch.Generator().manual_seed(case.seed)).tolist()
    half = (case.num_pages - 1) // 2
    pairs = [(order[n // 2], order[half + 1 + n]) for n in range(half)]  # a page may be read twice
    if case.skip:
        pairs += [(-1, order[0]), (order[0], -1)]
    for source, target in pairs:
        if min(source, target) >= 0:
            wanted.k_pages[target] = wanted.k_pages[source]
            wanted.v_pages[target] = wanted.v_pages[source]
    found = torch.tensor(pairs, dtype=case.index).view(-1, 2).to(setting.device)
    tw.copy_pages(memory.k_pages, memory.v_pages, found, impl=setting.impl)
    _same(memory, wanted)


def _same(got: Memory, want: Memory) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got.bits, want.bits, strict=True))
