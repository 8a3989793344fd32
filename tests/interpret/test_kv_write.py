"""The Triton kernels that write into pages, bit for bit, and twins of them that must fail."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tests.ops.kv_write.test_kv_write_by_channel import a_row_is_handed_on
from tilewise.kv import PagePool, pool
from tilewise.ops import triton_launch
from tilewise.ops.kv_write import triton_kv_write
from tilewise.quant import KINDS, encode, encode_by_channel
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import (
    BY_NAME,
    CASES,
    CHANNEL_CASES,
    CHANNEL_ROPE_CASES,
    ENCODED_CASES,
    ENCODED_ROPE_CASES,
    ROPE_CASES,
    RopeCase,
    WriteCase,
)
from tilewise.tiles import rotary as rotary_tiles

SETTINGS = [Setting("triton", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_writes_where_told(setting: Setting, case: WriteCase) -> None:
    writing.writes_where_told(setting, case)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_copies_whole_pages(setting: Setting, case: WriteCase) -> None:
    writing.copies_whole_pages(setting, case)


@pytest.mark.parametrize("elements", [16, 64])
@pytest.mark.parametrize("name", ["odd", "joint", "all_slots"])
def test_other_tiles(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kv_write, "_WRITTEN", elements)
    monkeypatch.setattr(triton_kv_write, "_COPIED", elements)
    writing.writes_where_told(SETTINGS[0], BY_NAME[name])
    writing.copies_whole_pages(SETTINGS[0], BY_NAME[name])


def test_calls_of_other_sizes_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for case in (*CASES, *CASES):
        writing.writes_where_told(SETTINGS[1], case)
        writing.copies_whole_pages(SETTINGS[1], case)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pages_of_a_pool_are_copied_in_all_layers(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch whose rows are layers, which lie further apart than pages do."""
    monkeypatch.setattr(pool, "copy_pages", functools.partial(tw.copy_pages, impl="triton"))
    made = PagePool(3, 5, 4, 2, 8, 12, dtype=torch.float16, order=order)
    before = []
    for layer in range(3):
        for x in made.pages(layer):
            before.append(x.normal_().clone())
    made.copy(torch.tensor([[1, 3], [1, 0]], dtype=torch.int32))
    after = [x for layer in range(3) for x in made.pages(layer)]
    assert all(torch.equal(x, y[[1, 1, 2, 1, 4]]) for x, y in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ENCODED_CASES, ids=repr)
def test_encodes_where_told(case: WriteCase, kind: str) -> None:
    setting = SETTINGS[sum(map(ord, case.name)) % len(SETTINGS)]
    writing.encodes_where_told(setting, case, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_encoded_pages(kind: str) -> None:
    for name in ("plain", "hnd", "joint"):
        writing.copies_encoded_pages(SETTINGS[0], BY_NAME[name], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_any_row_is_encoded_as_on_the_cpu(kind: str) -> None:
    """Ties between codes, numbers of any size, zeros, rows that are not finite; bit for bit, but for those of NaN."""
    make = torch.Generator().manual_seed(0)
    k = torch.randn(400, 2, 16, generator=make) * 2.0 ** torch.randint(-140, 120, (400, 2, 1), generator=make)
    k[:100] = torch.randint(-16, 17, (100, 2, 16), generator=make) / 2.0
    k[:100, :, 0] = KINDS[kind].largest  # so that the scale is 1 and halves are ties
    k[100:102], k[102, 0, 3], k[103, 0, 15], k[104, 1, 8] = 0.0, torch.nan, torch.inf, -torch.inf
    k[105:120] = (torch.arange(480).view(15, 2, 16) - 240) / 2.0**11
    k[105:120, :, 0] = KINDS[kind].largest
    pages = [encode(torch.zeros(100, 4, 2, 16), kind) for _ in range(2)]
    tw.kv_write(k, -k, *pages, torch.arange(400), impl="triton")
    for x, got in ((k, pages[0]), (-k, pages[1])):
        want = encode(x, kind)
        assert torch.equal(got.data.view(torch.uint8).flatten(0, 1), want.data.view(torch.uint8))
        torch.testing.assert_close(got.scale.flatten(0, 1), want.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("case", CHANNEL_CASES, ids=repr)
def test_encodes_full_pages(case: WriteCase, bits: int) -> None:
    setting = SETTINGS[sum(map(ord, case.name)) % 2]  # the interpreter cuts off what bfloat16 has no bits for
    writing.encodes_full_pages(setting, case, bits, "int4" if bits == 2 else "fp8")


@pytest.mark.parametrize("rotary", CHANNEL_ROPE_CASES, ids=repr)
def test_rotates_before_pages_are_full(rotary: RopeCase) -> None:
    for setting in SETTINGS[:2]:
        writing.encodes_full_pages(setting, rotary.case, 4, rotary=rotary)


def test_a_row_may_be_handed_on_in_the_step_that_frees_it() -> None:
    a_row_is_handed_on("triton")


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_channel_is_encoded_as_on_the_cpu(dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties between codes, spans of any size, equal keys, both zeros, channels that are not finite, a run of tokens a
    program; bit for bit, but for those of NaN.
    """
    monkeypatch.setattr(triton_kv_write, "_ALONE", 20)
    make = torch.Generator().manual_seed(0)
    most = 2**bits - 1
    k = torch.randn(60, 5, 2, 16, generator=make) * 2.0 ** torch.randint(-140, 120, (60, 1, 2, 16), generator=make)
    k[:20] = torch.randint(0, 2 * most + 1, (20, 5, 2, 16), generator=make) / 2.0
    k[:20, 1], k[:20, 3] = 0.0, most  # so that the step is 1 and halves are ties
    k[20:22] = k[20:22, :1]
    k[22] = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0])[:, None, None]
    k[23, 1, 0, 3], k[24, 4, 1, 15], k[25, 0, 1, 8] = torch.nan, torch.inf, -torch.inf
    k[26] = torch.tensor([3e38, -3e38, 0.0, 1.0, 2.0])[:, None, None]
    k = k.to(dtype)
    made = encode_by_channel(torch.zeros(60, 5, 2, 16, dtype=dtype), bits)
    slots = torch.arange(300)
    tw.kv_write(k.flatten(0, 1), k.flatten(0, 1), made, encode(torch.zeros(60, 5, 2, 16), "int8"), slots, impl="triton")
    want = encode_by_channel(k, bits)
    assert torch.equal(made.data, want.data)
    for got, of_cpu in ((made.scale, want.scale), (made.least, want.least)):
        torch.testing.assert_close(got, of_cpu, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() & ~got.isnan(), of_cpu.signbit() & ~of_cpu.isnan())


@pytest.mark.parametrize("rotary", ROPE_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS[:2], ids=repr)  # the interpreter cuts off what bfloat16 has no bits for
def test_rotates_where_told(setting: Setting, rotary: RopeCase) -> None:
    writing.rotates_where_told(setting, rotary)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", ENCODED_ROPE_CASES, ids=repr)
def test_rotates_and_encodes_where_told(rotary: RopeCase, kind: str) -> None:
    setting = SETTINGS[sum(map(ord, rotary.name)) % len(SETTINGS)]
    writing.rotates_where_told(setting, rotary, kind)


def test_ropes_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without, of other widths, pairs and tables."""
    monkeypatch.setattr(triton_launch, "remember", True)
    case = BY_NAME["all_slots"]
    for rotary in (*ROPE_CASES, *ROPE_CASES):
        writing.rotates_where_told(SETTINGS[0], replace(rotary, case=case, rotary_dim=min(rotary.rotary_dim, 16)))
        writing.writes_where_told(SETTINGS[0], case)


TWINS = [  # all of them stay inside the tensors
    ("write_tokens", "used = slot >= 0", "used = slot > 0", "all_slots"),
    ("write_tokens", "page = slot // PAGE", "page = slot // PAGE // 2", "plain"),
    ("write_tokens", "offset = slot % PAGE", "offset = slot % PAGE // 2", "plain"),
    ("write_tokens", "into_page = columns_of(column, stride_ph,", "into_page = columns_of(column, DIM,", "joint"),
    ("write_tokens", "K, K_PAGES, ROPE, stride_kt,", "K, K_PAGES, ROPE, 0 * stride_kt,", "odd"),
    ("encode_tokens", "offset * stride_ss", "0 * offset", "plain"),
    ("encode_tokens", "head = row % HEADS", "head = row % HEADS * 0", "plain"),
    ("encode_tokens", "offs[None, :] + STEP, mask", "offs[None, :], mask", "plain"),
    (
        "encode_tokens",
        "slot = page * stride_pp + offset * stride_ps + head * stride_ph",
        "slot = page * stride_pp + offset * stride_ps + head * DIM",
        "joint",
    ),
    (
        "encode_tokens",
        "token < tokens, other=-1).to(tl.int64)\n    used = slot >= 0",
        "token < tokens, other=-1).to(tl.int64)\n    used = slot > 0",
        "all_slots",
    ),
    ("encode_full_pages", "(inside & ~new)[:, None]", "new[:, None] & ~new[:, None]", "plain"),
    ("encode_full_pages", "& (place < 0):", "& (place < -9):", "all_slots"),
    ("encode_full_pages", "n * STEP + columns", "(1 - n) * STEP + columns", "plain"),
    (
        "encode_full_pages",
        "slot = row * stride_op + offs",
        "slot = 0 * row + offs",
        "all_slots",
    ),
    ("encode_full_pages", "page * stride_lp + head * stride_lh", "page * stride_lp", "joint"),
    ("encode_full_pages", ".to(K.dtype.element_ty)\n    slot", "\n    slot", "joint"),
    ("keep_keys_encode_values", "offset, row >= 0, DIM", "offset, row > 0, DIM", "all_slots"),
    ("keep_keys_encode_values", "offset * stride_os + head * stride_oh", "offset * stride_os", "plain"),
    ("copy_whole_pages", "source >= 0 and target >= 0", "source > 2 and target >= 0", "plain"),
    ("copy_whole_pages", "exists = column < PAGE * HEADS * DIM", "exists = column < HEADS * DIM", "odd"),
    ("copy_whole_pages", "column // (HEADS * DIM)", "0 * column", "plain"),
]


def by_channel(setting: Setting, case: WriteCase) -> None:
    """Turned ones are rounded before they are encoded."""
    writing.encodes_full_pages(setting, case, 4)
    writing.encodes_full_pages(SETTINGS[1], case, 4, rotary=RopeCase("turned", case, 8))


@pytest.mark.parametrize(("kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = {
        "write_tokens": writing.writes_where_told,
        "encode_tokens": lambda setting, case: writing.encodes_where_told(setting, case, "int4"),
        "encode_full_pages": by_channel,
        "keep_keys_encode_values": by_channel,
        "copy_whole_pages": writing.copies_whole_pages,
    }[kernel]
    case = BY_NAME[name]
    check(SETTINGS[0], case)  # whole, it passes
    copy = broken_copy(triton_kv_write, old, new, tmp_path)
    monkeypatch.setattr(triton_kv_write, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        check(SETTINGS[0], case)


ROPE_TWINS = [  # all of them stay inside the tensors
    ("pair < HALF", "pair < HALF - 1", "neighbours"),
    ("a * c - b * s, a)", "a * c + b * s, a)", "neighbours"),
    ("tl.where(is_turned, b * c + a * s, b)", "b * c + a * s", "one_pair"),
    ("tl.where(is_first[None, :], -s, s), x)", "s, x)", "halves_of_some"),
    ("tl.where(is_turned, x * c", "tl.where(dim[None, :] < HALF, x * c", "halves"),
    ("dim ^ 1", "dim", "odd_neighbours"),
    ("inside & is_turned, other=0.0", "inside & is_turned & is_first[None, :], other=0.0", "uneven"),
    ("ROPE[2] + token", "ROPE[2] + token * 0", "all_slots"),
    ("position * ROPE[3]", "position // 2 * ROPE[3]", "uneven"),
    ("position * ROPE[4]", "position // 2 * ROPE[4]", "uneven"),
]


@pytest.mark.parametrize(("old", "new", "name"), ROPE_TWINS)
def test_a_broken_rotation_is_caught(
    old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotary = {**{x.name: x for x in ROPE_CASES}, "all_slots": RopeCase("all_slots", BY_NAME["all_slots"], 16)}[name]
    kinds = (None,) if rotary.case.head_dim % 2 else (None, "int4")
    for kind in kinds:
        writing.rotates_where_told(SETTINGS[0], rotary, kind)  # whole, it passes
    copy = broken_copy(rotary_tiles, old, new, tmp_path)
    monkeypatch.setattr(triton_kv_write, "turned", copy.turned)
    monkeypatch.setattr(triton_kv_write, "angles_of", copy.angles_of)
    for kind in kinds:
        with pytest.raises(AssertionError):
            writing.rotates_where_told(SETTINGS[0], rotary, kind)
