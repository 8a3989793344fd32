"""Kernels read inside what formulas capture where sequences are short or empty: each address is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

import tilewise as tw
from tests.interpret.small_tiles import use_tiles
from tilewise.testing.slots import Lengths, captured, formulas, packed, rows

AROUND = 4096  # elements before and behind a captured tensor, which nobody may read


def fenced(tensor: torch.Tensor) -> tuple[torch.Tensor, range, range]:
    """The same values amid others, and the addresses of all of them and of its own."""
    whole = torch.zeros(tensor.numel() + 2 * AROUND, dtype=tensor.dtype)
    inside = whole[AROUND : AROUND + tensor.numel()].view(tensor.shape).copy_(tensor)
    own = range(inside.data_ptr(), inside.data_ptr() + inside.numel() * inside.element_size())
    return inside, range(whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()), own


@contextmanager
def watched(fences: list[tuple[range, range]]) -> Iterator[list[int]]:
    """Inside, loads from a fence's ground are noted: how many are inside the tensor, and where one is not."""
    seen = [0]
    load = InterpreterBuilder.create_masked_load

    def look(self: Any, ptrs: Any, which: Any, *rest: Any) -> Any:
        at = np.asarray(ptrs.data)[np.broadcast_to(np.asarray(which.data, dtype=bool), np.shape(ptrs.data))]
        for ground, own in fences:
            near = at[(at >= ground.start) & (at < ground.stop)]
            assert not ((near < own.start) | (near >= own.stop)).any(), "a captured tensor is read outside"
            seen[0] += near.size
        return load(self, ptrs, which, *rest)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", look):
        yield seen


SEQUENCES: tuple[Lengths, ...] = (((5, 0), (9, 20), (0, 30), (21, 21)), ((17, 17), (0, 0), (40, 40)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", SEQUENCES, ids=str)
def test_kernels_read_inside(lengths: Lengths, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, "narrow")
    (ids, *of_ids), (level, *of_level) = map(fenced, captured(lengths))
    found = {}
    for impl in ("triton", "reference"):
        q, k, v = (x.requires_grad_(grad) for x in rows(lengths, torch.float32))
        mask, score = formulas(lengths, tensors=(ids, level))
        with watched([tuple(of_ids), tuple(of_level)]) as seen:
            o = tw.attention(q, k, v, layout=packed(lengths), mask=mask, score=score, impl=impl)
            found[impl] = [o, *torch.autograd.grad(o.square().sum(), (q, k, v))] if grad else [o]
        assert seen[0] > 0 or impl == "reference"
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 3])
def test_kernels_over_pages_read_inside(queries: int) -> None:
    """A request may have no key yet."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(6, 8, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(3, queries, 2, 16, generator=generator)
    table, seqlens = torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor([0, 15, 6], dtype=torch.int32)
    ids, *of_ids = fenced(torch.randint(0, 2, (15,), generator=generator, dtype=torch.int32))
    level, *of_level = fenced(torch.randn(3, 15, generator=generator))
    mask = tw.mask(lambda b, h, i, j: (ids[i] == ids[j]) | (j < i - 4))
    score = tw.score(lambda s, b, h, i, j: s + level[b, j] * level[b, i])
    found = []
    for impl in ("triton_paged", "reference"):
        with watched([tuple(of_ids), tuple(of_level)]) as seen:
            layout = tw.Paged(table, seqlens)
            found.append(tw.attention(q, k, v, layout=layout, mask=mask, score=score, impl=impl))
        assert seen[0] > 0 or impl == "reference"
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert not found[0][0].any()


def test_a_read_outside_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of rows without keys, as they would be."""
    from tilewise.ops.attention import lengths

    use_tiles(monkeypatch, "narrow")
    ids, *of_ids = fenced(torch.zeros(20, dtype=torch.int32))
    q = torch.randn(30, 2, 16)
    monkeypatch.setattr(lengths, "_prove", lambda *_: None)
    with watched([tuple(of_ids)]), pytest.raises(InterpreterError, match="read outside"):
        tw.attention(q, q, q, layout=packed(((30, 30),)), mask=tw.document(ids), impl="triton")
