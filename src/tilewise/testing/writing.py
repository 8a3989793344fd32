"""`kv_write` and `copy_pages` in every tier: the memory afterwards, bit for bit as plain loops leave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.quant import KINDS, Encoded, encode
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
