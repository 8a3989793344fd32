"""What `kv_write` and `copy_pages` refuse, and that nothing was written then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import BY_NAME

CASE, SETTING = BY_NAME["plain"], Setting("cpu")


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta")


WRONG: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("k", lambda k: [1.0], r"k: got list"),
    ("k", lambda k: k[None], r"k: got shape \(1, 9, 2, 16\)"),
    ("k", lambda k: k[:, :1], r"expected \(tokens, 2, 16\)"),
    ("k", lambda k: k.half(), r"k: got torch.float16 on cpu; expected torch.float32 on cpu, as k_pages"),
    ("k", lambda k: k.double(), r"k: got torch.float64"),
    ("k", lambda k: _meta(k), r"k: got torch.float32 on meta"),
    ("k", lambda k: k.transpose(1, 2).contiguous().transpose(1, 2), r"k: got strides"),
    ("k", lambda k: k.requires_grad_(), r"k: got a tensor that takes a gradient.*no_grad.*detach"),
    ("v", lambda v: v[:8], r"v: got 8 tokens; expected 9"),
    ("k_pages", lambda x: x[0], r"k_pages: got shape \(4, 2, 16\)"),
    ("k_pages", lambda x: x[:, :0], r"k_pages: got pages of 0 tokens"),
    ("k_pages", lambda x: x.requires_grad_(), r"k_pages: got a tensor that takes a gradient"),
    ("v_pages", lambda x: x[:5], r"v_pages: got shape \(5, 4, 2, 16\)"),
    ("v_pages", lambda x: x.bfloat16(), r"v_pages: got torch.bfloat16"),
    ("slot_mapping", lambda x: x.tolist(), r"slot_mapping: got list"),
    ("slot_mapping", lambda x: x[:5], r"slot_mapping: got shape \(5,\)"),
    ("slot_mapping", lambda x: x.float(), r"slot_mapping: got torch.float32"),
    ("slot_mapping", lambda x: x.repeat_interleave(2)[::2], r"slot_mapping: got torch.int64 on cpu, strides \(2,\)"),
    ("slot_mapping", lambda x: x + 28, r"slot_mapping: got slot \d+; expected below 28: 7 pages of 4"),
    ("slot_mapping", lambda x: torch.cat([x[:8], x[:1]]), r"slot_mapping: got slot \d+ twice"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{n}-{w[0]}" for n, w in enumerate(WRONG)])
def test_a_wrong_argument_is_named_before_anything_is_written(
    name: str, change: Callable[[torch.Tensor], Any], message: str
) -> None:
    refused_unwritten(writing.make_memory(CASE, SETTING), name, change, message)


def refused_unwritten(held: writing.Memory, name: str, change: Callable[[Any], Any], message: str) -> None:
    """A call with one argument changed says so, and every page is as it was."""
    before = held.bits
    k, v, slots = writing.make_tokens(CASE, SETTING)
    arguments = {"k": k, "v": v, "k_pages": held.k_pages, "v_pages": held.v_pages, "slot_mapping": slots}
    arguments[name] = change(arguments[name])
    with pytest.raises(InputError, match=message):
        tw.kv_write(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(held.bits, before, strict=True))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (torch.tensor([1, 2]), r"pairs: got shape \(2,\)"),
        (torch.tensor([[1.0, 2.0]]), r"pairs: got torch.float32"),
        (torch.tensor([[1, 7]]), r"pairs: got page 7; expected below 7"),
        (torch.tensor([[1, 2], [3, 2]]), r"pairs: got page 2 written, and in another pair"),
        (torch.tensor([[1, 2], [2, 3]]), r"pairs: got page 2 written, and in another pair"),
        (torch.tensor([[2, 3], [1, 2]]), r"pairs: got page 2 written, and in another pair"),
    ],
)
def test_wrong_pairs(pairs: torch.Tensor, message: str) -> None:
    held = writing.make_memory(CASE, SETTING)
    with pytest.raises(InputError, match=message):
        tw.copy_pages(held.k_pages, held.v_pages, pairs)


def test_a_gradient_that_nobody_wants_now_is_fine() -> None:
    held = writing.make_memory(CASE, SETTING)
    k, v, slots = writing.make_tokens(CASE, SETTING)
    with torch.no_grad():
        tw.kv_write(k.requires_grad_(), v, held.k_pages, held.v_pages, slots)


def test_slots_are_checked_when_a_compiled_region_runs() -> None:
    held = writing.make_memory(CASE, SETTING)
    k, v, slots = writing.make_tokens(CASE, SETTING)
    run = torch.compile(tw.kv_write, fullgraph=True, backend="eager")
    run(k, v, held.k_pages, held.v_pages, slots)
    with pytest.raises(InputError, match="slot 28"):
        run(k, v, held.k_pages, held.v_pages, torch.arange(20, 29))


def test_implementations_are_named() -> None:
    held = writing.make_memory(CASE, SETTING)
    with pytest.raises(InputError, match="impl: got 'fast'; expected None or one of cpu, triton, reference"):
        tw.copy_pages(held.k_pages, held.v_pages, torch.tensor([[0, 1]]), impl="fast")
    with pytest.raises(UnsupportedError, match="expected an NVIDIA GPU"):
        tw.copy_pages(held.k_pages, held.v_pages, torch.tensor([[0, 1]]), impl="triton")
