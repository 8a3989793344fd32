"""Writing keys by channel on the CPU: open pages, pages that are full, torch.compile, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core import dispatch
from tilewise.core.errors import InputError
from tilewise.ops.kv_write import cpu
from tilewise.quant import ByChannel, Encoded, encode, encode_by_channel
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import BY_NAME, CHANNEL_CASES, CHANNEL_ROPE_CASES, RopeCase, WriteCase

SETTINGS = [Setting("cpu"), Setting("cpu", torch.bfloat16), Setting("reference", torch.float16)]


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("case", CHANNEL_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_encodes_full_pages(setting: Setting, case: WriteCase, bits: int) -> None:
    writing.encodes_full_pages(setting, case, bits, "int4" if bits == 2 else "int8")


@pytest.mark.parametrize("rotary", CHANNEL_ROPE_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_rotates_before(setting: Setting, rotary: RopeCase) -> None:
    writing.encodes_full_pages(setting, rotary.case, 4, rotary=rotary)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 2]),
    tokens=st.integers(0, 8),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    page_size=st.integers(1, 9),
    memory=st.sampled_from(["NHD", "HND", "joint"]),
    seed=st.integers(0, 100),
)
def test_any_shape(bits: int, tokens: int, heads: int, head_dim: int, page_size: int, memory: str, seed: int) -> None:
    case = WriteCase("any", tokens, heads, 4 * head_dim, 6, page_size, 8, memory=memory, seed=seed)
    writing.encodes_full_pages(Setting("cpu"), case, bits)


@pytest.mark.parametrize("twin", ["a page forgets what was open", "a page stays open"])
def test_a_broken_twin_is_caught(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_channel = cpu._by_channel

    def broken(channels: ByChannel, slots: torch.Tensor, k: torch.Tensor) -> None:
        if twin.endswith("open"):
            channels = replace(channels, open=channels.open.clone())
            channels = replace(channels, place=channels.place.clamp(min=0)) if "stays" in twin else channels
        by_channel(channels, slots, k)

    monkeypatch.setattr(cpu, "_by_channel", broken)
    monkeypatch.setattr(dispatch, "_function", lambda module, name: getattr(cpu, name))
    with pytest.raises(AssertionError):
        writing.encodes_full_pages(Setting("cpu"), BY_NAME["plain"], 4)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_row_may_be_handed_on_in_the_step_that_frees_it(impl: str) -> None:
    a_row_is_handed_on(impl)


def a_row_is_handed_on(impl: str) -> None:
    """Row 1 has the first keys of page 0, which is filled, and gets those of page 2."""
    keys, values = encode_by_channel(torch.zeros(3, 4, 2, 8), 4), encode(torch.zeros(3, 4, 2, 6), "int8")
    old, k = torch.randn(2, 4, 2, 8), torch.randn(4, 2, 8)
    keys = replace(keys, open=old.clone(), place=torch.tensor([-2, -1, 1], dtype=torch.int32))
    tw.kv_write(k, torch.ones(4, 2, 6), keys, values, torch.tensor([2, 3, 8, 9]), impl=impl)
    want = encode_by_channel(torch.cat([old[1, :2], k[:2]])[None], 4)
    assert torch.equal(keys.data[0], want.data[0])
    assert torch.equal(keys.open, torch.stack([old[0], torch.cat([k[2:], old[1, 2:]])]))


@pytest.mark.parametrize("memory", ["NHD", "HND", "joint"])
def test_compiled(memory: str) -> None:
    """Tokens written and attended to in one graph."""
    torch._dynamo.reset()
    case = WriteCase("compiled", tokens=6, page_size=4, num_pages=5, memory=memory, skip=False)
    setting = Setting("cpu")
    k, v, _ = writing.make_tokens(case, setting)
    q, slots = torch.randn(6, 4, 16), torch.tensor([8, 9, 10, 11, 12, 13])
    layout = (torch.tensor([[2, 3]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
    cu = torch.tensor([0, 6], dtype=torch.int32)

    def step(q: torch.Tensor, k: torch.Tensor, k_pages: ByChannel, v_pages: Encoded) -> torch.Tensor:
        tw.kv_write(k * 2.0, v, k_pages, v_pages, slots)
        return tw.attention(q, k_pages, v_pages, layout=tw.Paged(*layout, cu), mask=tw.causal)

    found = []
    for run in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        held = writing.memory_by_channel(case, setting, 4)
        held.k_pages.place.copy_(torch.tensor([-1, -1, -1, 0, -1]))
        found.append((run(q, k, held.k_pages, held.v_pages), *held.bits))
    assert found[0][0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_written_pages_are_others_for_autograd() -> None:
    held = writing.memory_by_channel(BY_NAME["plain"], SETTINGS[0], 4)
    slots = writing.slots_of_pages(BY_NAME["plain"], held.k_pages.place, "cpu")
    k, v = torch.zeros(2, len(slots), 2, 16)
    *written, place = held.owned[2:]
    before, of_place = [x._version for x in written], place._version
    tw.kv_write(k, v, held.k_pages, held.v_pages, slots)
    assert all(x._version > version for x, version in zip(written, before, strict=True))
    assert place._version == of_place


KEYS = encode_by_channel(torch.zeros(3, 4, 2, 8), 4)
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("k", lambda k: k[..., :4], r"k: got shape \(6, 2, 4\); expected \(tokens, 2, 8\), as k_pages"),
    ("k", lambda k: k.requires_grad_(), r"k: got a tensor that takes a gradient"),
    ("k_pages", lambda x: replace(x, open=x.open.bfloat16(), scale=x.scale.bfloat16(), least=x.least.bfloat16()),
     r"k: got torch.float32 on cpu; expected torch.bfloat16 on cpu, as k_pages.open"),
    ("k_pages", lambda x: replace(x, place=torch.ones_like(x.place)), r"k.place: got row 1; expected below 1"),
    ("v_pages", lambda x: torch.zeros(3, 4, 2, 8), r"v_pages: got Tensor; expected an Encoded"),
    ("v_pages", lambda x: KEYS, r"v_pages: got ByChannel; expected an Encoded"),
    ("v_pages", lambda x: Encoded(x.data[:2], x.scale[:2]), r"v_pages: got shape \(2, 4, 2, 8\)"),
    ("slot_mapping", lambda x: x + 12, r"slot_mapping: got slot \d+; expected below 12"),
    ("slot_mapping", lambda x: x - 1, r"slot_mapping: got slot 4, in a page of codes that this call does not fill"),
    ("slot_mapping", lambda x: x.flip(0), r"slot_mapping: got slot \d, in a page of codes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{n}-{w[0]}" for n, w in enumerate(WRONG)])
def test_a_wrong_argument_is_named_before_anything_is_written(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    opened, place = torch.zeros(1, 4, 2, 8), torch.tensor([0, -1, -1], dtype=torch.int32)
    keys, values = (
        replace(KEYS, data=KEYS.data.clone(), open=opened, place=place),
        encode(torch.zeros(3, 4, 2, 8), "fp8"),
    )
    arguments = {
        "k": torch.ones(6, 2, 8), "v": torch.ones(6, 2, 8), "k_pages": keys, "v_pages": values,
        "slot_mapping": torch.tensor([1, 2, 4, 5, 6, 7]),
    }  # fmt: skip
    tw.kv_write(**(arguments | {"k_pages": replace(keys, data=KEYS.data.clone(), open=opened.clone())}))
    arguments[name] = change(arguments[name])
    with pytest.raises(InputError, match=message):
        tw.kv_write(**arguments)
    assert not keys.data.any()
    assert not keys.open.any()


def test_without_open_pages_a_page_is_written_whole() -> None:
    keys, values = replace(KEYS, data=KEYS.data.clone()), encode(torch.zeros(3, 4, 2, 8), "fp8")
    k = torch.randn(4, 2, 8)
    tw.kv_write(k, k, keys, values, torch.tensor([4, 5, 6, 7]))
    assert torch.equal(keys.data[1], encode_by_channel(k[None], 4).data[0])
    with pytest.raises(InputError, match="slot_mapping: got slot 5, in a page of codes that this call does not fill"):
        tw.kv_write(k[1:], k[1:], keys, values, torch.tensor([5, 6, 7]))


def test_pages_are_not_copied_by_themselves() -> None:
    with pytest.raises(InputError, match="k_pages: got a ByChannel; expected tensors, or an Encoded"):
        tw.copy_pages(KEYS, encode(torch.zeros(3, 4, 2, 8), "fp8"), torch.tensor([[0, 1]]))  # type: ignore[arg-type]
