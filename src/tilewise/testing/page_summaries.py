"""Summaries of pages against PyTorch, on any device, and what the compile tier compiles of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.page_summaries.problem import Call
from tilewise.ops.page_summaries.table import SUMMARIZE
from tilewise.testing.page_selection import PagesCase, columns_of, keys_of, make_inputs


def check(case: PagesCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """Each page's least and largest keys are exact, and its means those of float64, rounded."""
    given = make_inputs(case, dtype, device)
    layout, size = given["layout"], case.page_size
    bits = columns_of(case)
    summaries = tw.PageSummaries.of(given["k"], given["v"], bits)
    whole = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    paged = tw.Paged(layout.block_table, layout.seqlens_k, whole)
    tw.summarize_pages(given["k"], given["v"], summaries, paged, sum(case.lengths), impl=impl)
    used = []
    for r, length in enumerate(case.lengths):
        for n in range(-(-length // size)):
            page = int(layout.block_table[r, n])
            used.append(page)
            k, v = (given[name][page, : min(size, length - n * size)] for name in "kv")
            assert torch.equal(summaries.least[page], k.amin(0))
            assert torch.equal(summaries.largest[page], k.amax(0))
            for mean, x in ((summaries.k_mean[page], k), (summaries.v_mean[page], v)):
                want = x.double().mean(0)
                unit = torch.finfo(dtype).eps / 2
                allowed = unit * want.abs() + size * 2.0**-24 * float(x.abs().max())
                assert bool(((mean.double() - want).abs() <= allowed).all())
            if bits:
                assert summaries.columns is not None
                scale = (k.amax(0).double() - k.amin(0)) / (2**bits - 1)
                got = keys_of(summaries, page, size)
                assert bool(((got[: len(k)] - k.double()).abs() <= (0.5 + 2.0**-10) * scale).all())
                assert bool((got[len(k) :] == k.amin(0).double()).all())  # the code is 0
    rest = [page for page in range(summaries.least.shape[0]) if page not in used]
    assert all(bool((x[rest] == 0).all()) for x in summaries.tensors.values())


def pages(width: int) -> tuple[int, int]:
    """(head_dim, page_size) of a variant: heads of 128, 100 or 256."""
    return {4096: (128, 16), 1000: (100, 5)}.get(width, (256, 64))


def _variant(bits: int) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        dim, size = pages(width)
        k = torch.zeros(10, size, 2, dim, dtype=dtype)
        starts, table = torch.zeros(4, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
        return SUMMARIZE, Call(k, k.clone(), table, starts[:3].clone(), starts, 3, 0 if size % 2 else bits)

    return make


VARIANTS = {"ends": _variant(0), "columns of 8 bits": _variant(8), "columns of 4 bits": _variant(4)}
