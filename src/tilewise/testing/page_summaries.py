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
from tilewise.testing.page_selection import PagesCase, make_inputs


def check(case: PagesCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """Each page's least and largest keys are exact, and its means those of float64, rounded."""
    given = make_inputs(case, dtype, device)
    layout, size = given["layout"], case.page_size
    summaries = tw.PageSummaries.of(given["k"], given["v"])
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
    rest = [page for page in range(summaries.least.shape[0]) if page not in used]
    assert all(bool((x[rest] == 0).all()) for x in vars(summaries).values())


def pages(width: int) -> tuple[int, int]:
    """(head_dim, page_size) of a variant: heads of 128, 100 or 256."""
    return {4096: (128, 16), 1000: (100, 5)}.get(width, (256, 64))


def _variant(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
    dim, size = pages(width)
    k = torch.zeros(10, size, 2, dim, dtype=dtype)
    numbers = torch.zeros(4, dtype=torch.int32)
    return SUMMARIZE, Call(k, k.clone(), torch.zeros(3, 8, dtype=torch.int32), numbers[:3].clone(), numbers, 3)


VARIANTS: dict[str, Callable[[int, torch.dtype], tuple[Operation[Any], Any]]] = {"pages": _variant}
