"""Writing into encoded pages on the CPU: codes and scales where they belong, torch.compile, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.ops.kv_write.test_kv_write_errors import refused_unwritten
from tilewise.core import dispatch
from tilewise.core.errors import InputError
from tilewise.ops.kv_write import cpu
from tilewise.ops.kv_write.problem import Write
from tilewise.quant import KINDS, Encoded, decode, encode
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import BY_NAME, ENCODED_CASES, WriteCase

SETTINGS = [Setting("cpu"), Setting("cpu", torch.bfloat16), Setting("reference", torch.float16)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ENCODED_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_encodes_where_told(setting: Setting, case: WriteCase, kind: str) -> None:
    writing.encodes_where_told(setting, case, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "hnd", "joint"])
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_copies_encoded_pages(setting: Setting, name: str, kind: str) -> None:
    writing.copies_encoded_pages(setting, BY_NAME[name], kind)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_odd_head_dims_of_whole_bytes(kind: str) -> None:
    for setting in SETTINGS:
        writing.encodes_where_told(setting, BY_NAME["odd"], kind)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    tokens=st.integers(0, 20),
    heads=st.integers(1, 5),
    halves=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    page_size=st.integers(1, 20),
    memory=st.sampled_from(["NHD", "HND", "joint"]),
    sliced=st.booleans(),
    skip=st.booleans(),
)
def test_any_shape(
    kind: str, tokens: int, heads: int, halves: tuple[int, int], page_size: int, memory: str, sliced: bool, skip: bool
) -> None:
    dims = (2 * halves[0], 2 * halves[1])
    case = WriteCase("any", tokens, heads, *dims, page_size, 20, memory=memory, sliced=sliced, skip=skip)
    writing.encodes_where_told(Setting("cpu"), case, kind)
    writing.copies_encoded_pages(Setting("cpu"), case, kind)


def test_a_broken_twin_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    write = cpu.write

    def keeps_old_scales(call: Write) -> None:
        assert call.scales is not None
        write(replace(call, scales=(call.scales[0].clone(), call.scales[1])))

    monkeypatch.setattr(cpu, "write", keeps_old_scales)
    monkeypatch.setattr(dispatch, "_function", lambda module, name: getattr(cpu, name))
    with pytest.raises(AssertionError):
        writing.encodes_where_told(Setting("cpu"), BY_NAME["plain"], "int8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ["NHD", "HND", "joint"])
def test_compiled(memory: str, kind: str) -> None:
    """The whole step of a layer in one graph: a page copied, tokens written, and attention over what is there now."""
    torch._dynamo.reset()
    case = WriteCase("compiled", tokens=6, page_size=4, num_pages=5, memory=memory, skip=False)
    setting = Setting("cpu")
    k, v, _ = writing.make_tokens(case, setting)
    q, slots = torch.randn(6, 4, 16), torch.tensor([8, 9, 10, 11, 12, 13])
    layout = (torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32))
    pairs, cu = torch.tensor([[1, 0]]), torch.tensor([0, 6], dtype=torch.int32)

    def step(q: torch.Tensor, k: torch.Tensor, k_pages: Encoded, v_pages: Encoded) -> torch.Tensor:
        tw.copy_pages(k_pages, v_pages, pairs)
        tw.kv_write(k * 2.0, v, k_pages, v_pages, slots)
        return tw.attention(q, k_pages, v_pages, layout=tw.Paged(*layout, cu), mask=tw.causal)

    found = []
    for run in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        held = writing.encoded_memory(case, setting, kind)
        tw.kv_write(k[:4], v[:4], held.k_pages, held.v_pages, torch.arange(4, 8))
        found.append((run(q, k, held.k_pages, held.v_pages), *held.bits))
    assert found[0][0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_written_pages_are_others_for_autograd() -> None:
    held = writing.encoded_memory(BY_NAME["plain"], SETTINGS[0], "int8")
    k, v, slots = writing.make_tokens(BY_NAME["plain"], SETTINGS[0])
    before = [x._version for x in held.owned]
    tw.kv_write(k, v, held.k_pages, held.v_pages, slots)
    assert all(x._version > version for x, version in zip(held.owned, before, strict=True))


def test_a_token_that_is_not_finite_is_nan() -> None:
    for impl in ("cpu", "reference"):
        pages = [encode(torch.zeros(2, 4, 2, 8), "int4") for _ in range(2)]
        k, v = torch.ones(2, 3, 2, 8)
        k[1, 0, 3] = torch.inf
        tw.kv_write(k, v, *pages, torch.tensor([0, 5, 2]), impl=impl)
        assert decode(pages[0]).isnan().any(-1).nonzero().tolist() == [[1, 1, 0]]


CASE, SETTING = BY_NAME["plain"], Setting("cpu")
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("k", lambda k: k[:, :1], r"k: got shape \(9, 1, 16\); expected \(tokens, 2, 16\)"),
    ("k", lambda k: k[..., :8], r"expected \(tokens, 2, 16\), as k_pages \(7, 4, 2, 16\)"),
    ("k", lambda k: k.double(), r"k: got torch.float64"),
    ("k", lambda k: k.requires_grad_(), r"k: got a tensor that takes a gradient"),
    ("v", lambda v: v.half(), r"v: got torch.float16 on cpu; expected torch.float32 on cpu, as k"),
    ("k", lambda k: k.to("meta"), r"k: got device meta; expected cpu, as k_pages"),
    ("k_pages", lambda x: decode(x), r"k_pages: got Tensor; expected an Encoded"),
    ("v_pages", lambda x: decode(x), r"v_pages: got Tensor; expected an Encoded"),
    ("v_pages", lambda x: encode(decode(x), "fp8"), r"v_pages: got fp8 on cpu; expected int8 on cpu, as k_pages"),
    ("v_pages", lambda x: Encoded(x.data[:5], x.scale[:5]), r"v_pages: got shape \(5, 4, 2, 16\)"),
    ("k_pages", lambda x: Encoded(x.data[0], x.scale[0]), r"k_pages: got an Encoded of shape \(4, 2, 16\)"),
    ("k_pages", lambda x: Encoded(x.data[:, :0], x.scale[:, :0]), r"k_pages: got pages of 0 tokens"),
    ("slot_mapping", lambda x: x + 28, r"slot_mapping: got slot \d+; expected below 28: 7 pages of 4"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{n}-{w[0]}" for n, w in enumerate(WRONG)])
def test_a_wrong_argument_is_named_before_anything_is_written(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    refused_unwritten(writing.encoded_memory(CASE, SETTING, "int8"), name, change, message)


def test_pages_that_are_not_alike_are_not_copied() -> None:
    held = writing.encoded_memory(CASE, SETTING, "int8")
    with pytest.raises(InputError, match="v_pages: got Tensor"):
        tw.copy_pages(held.k_pages, decode(held.v_pages), torch.tensor([[1, 2]]))
    with pytest.raises(InputError, match="pairs: got page 7; expected below 7"):
        tw.copy_pages(held.k_pages, held.v_pages, torch.tensor([[1, 7]]))
