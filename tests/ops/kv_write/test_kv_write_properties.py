"""Writing into pages on the CPU: any shapes and memory, under torch.compile, and beside attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core import dispatch
from tilewise.ops.kv_write import cpu
from tilewise.ops.kv_write.problem import Write
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import BITS, BY_NAME, CASES, WriteCase

SETTINGS = [Setting("cpu"), Setting("cpu", torch.bfloat16), Setting("reference", torch.float16)]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_writes_where_told(setting: Setting, case: WriteCase) -> None:
    writing.writes_where_told(setting, case)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_copies_whole_pages(setting: Setting, case: WriteCase) -> None:
    writing.copies_whole_pages(setting, case)


WRITE_CASES = st.builds(
    WriteCase,
    name=st.just("any"),
    tokens=st.integers(0, 20),
    heads=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    head_dim_v=st.integers(1, 40),
    page_size=st.integers(1, 20),
    num_pages=st.integers(20, 25),
    memory=st.sampled_from(["NHD", "HND", "joint"]),
    sliced=st.booleans(),
    skip=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 100),
)


@settings(max_examples=100, deadline=None)
@given(case=WRITE_CASES, dtype=st.sampled_from(list(BITS)))
def test_any_shape(case: WriteCase, dtype: torch.dtype) -> None:
    writing.writes_where_told(Setting("cpu", dtype), case)
    writing.copies_whole_pages(Setting("cpu", dtype), case)


def test_a_broken_twin_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_offset(call: Write) -> None:
        call.k_pages[call.slots // call.k_pages.shape[1], 0] = call.k

    monkeypatch.setattr(cpu, "write", forgets_the_offset)
    monkeypatch.setattr(dispatch, "_function", lambda module, name: getattr(cpu, name))
    with pytest.raises(AssertionError):
        writing.writes_where_told(Setting("cpu"), BY_NAME["plain"])


@pytest.mark.parametrize("memory", ["NHD", "HND", "joint"])
def test_compiled(memory: str) -> None:
    """The whole step of a layer in one graph: a page copied, tokens written, and attention over what is there now."""
    case = WriteCase("compiled", tokens=6, page_size=4, num_pages=5, memory=memory, skip=False)
    setting = Setting("cpu")
    k, v, _ = writing.make_tokens(case, setting)
    q, slots = torch.randn(6, 4, 16), torch.tensor([8, 9, 10, 11, 12, 13])
    layout = (torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32))
    pairs, cu = torch.tensor([[1, 0]]), torch.tensor([0, 6], dtype=torch.int32)

    def step(q: torch.Tensor, k: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        tw.copy_pages(k_pages, v_pages, pairs)
        tw.kv_write(k * 2.0, v, k_pages, v_pages, slots)
        return tw.attention(q, k_pages, v_pages, layout=tw.Paged(*layout, cu), mask=tw.causal)

    found = []
    for run in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        held = writing.make_memory(case, setting)
        for x in held.owned:
            x.nan_to_num_(0.5)
        found.append((run(q, k, held.k_pages, held.v_pages), *held.bits))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autograd_hears_of_a_write() -> None:
    """What a backward needs of the pages is not silently replaced."""
    held = writing.make_memory(BY_NAME["plain"], Setting("cpu"))
    k, v, slots = writing.make_tokens(BY_NAME["plain"], Setting("cpu"))
    scale = torch.ones(16, requires_grad=True)
    product = (held.k_pages * scale).sum()
    tw.kv_write(k, v, held.k_pages, held.v_pages, slots)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        writing.writes_where_told(Setting("cpu"), BY_NAME["skips"])
        writing.copies_whole_pages(Setting("cpu"), BY_NAME["skips"])
