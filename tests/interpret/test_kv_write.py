"""The Triton kernels that write into pages, bit for bit, and twins of them that must fail."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.kv import PagePool, pool
from tilewise.ops.attention import triton_launch
from tilewise.ops.kv_write import triton_kv_write
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import BY_NAME, CASES, WriteCase

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


TWINS = [  # all of them stay inside the tensors
    ("write_tokens", "used = slot >= 0", "used = slot > 0", "all_slots"),
    ("write_tokens", "page = slot // PAGE", "page = slot // PAGE // 2", "plain"),
    ("write_tokens", "offset = slot % PAGE", "offset = slot % PAGE // 2", "plain"),
    ("write_tokens", "into_page = columns_of(column, stride_ph,", "into_page = columns_of(column, DIM,", "joint"),
    ("write_tokens", "K, K_PAGES, stride_kt,", "K, K_PAGES, 0 * stride_kt,", "odd"),
    ("copy_whole_pages", "source >= 0 and target >= 0", "source > 2 and target >= 0", "plain"),
    ("copy_whole_pages", "exists = column < PAGE * HEADS * DIM", "exists = column < HEADS * DIM", "odd"),
    ("copy_whole_pages", "column // (HEADS * DIM)", "0 * column", "plain"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = writing.writes_where_told if kernel == "write_tokens" else writing.copies_whole_pages
    case = BY_NAME[name]
    check(SETTINGS[0], case)  # whole, it passes
    copy = broken_copy(triton_kv_write, old, new, tmp_path)
    monkeypatch.setattr(triton_kv_write, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        check(SETTINGS[0], case)
