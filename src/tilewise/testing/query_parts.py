"""Queries' largest dimensions against their specification, on any device, and what the compile tier compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.query_parts.problem import Call
from tilewise.ops.query_parts.table import PART_QUERIES
from tilewise.testing.page_selection import PagesCase


def make_call(case: PagesCase, dtype: torch.dtype, device: str = "cpu") -> Call:
    """Queries of a case's sizes."""
    assert isinstance(case.select, tw.SparQ)
    generator = torch.Generator().manual_seed(len(case.name))
    q = torch.randn(len(case.lengths) * case.queries, case.heads[0], case.dim, generator=generator)
    return Call(q.to(device, dtype), case.heads[1], case.select.rank, 0.3)


def check(call: Call, impl: str) -> None:
    """Dimensions are those of the specification but where sums in float32 may be in another order."""
    dims, parts = PART_QUERIES(call, impl)
    want, _ = PART_QUERIES(call, "reference")
    q = call.q.double().view(call.q.shape[0], call.heads, call.group, -1)
    sums = q.abs().sum(2)
    sums = torch.where(sums.isfinite(), sums, 1e300)
    least, bound = (sums.gather(2, x.long()).min(-1).values for x in (dims, want))
    assert bool((least >= bound * (1.0 - 2.0**-22)).all())
    assert bool((dims.diff(dim=-1) > 0).all())
    assert int(dims.min()) >= 0
    assert int(dims.max()) < call.q.shape[2]
    part = q.gather(3, dims.long()[:, :, None].expand(-1, -1, call.group, -1))
    warmer = (q.abs().sum(-1, keepdim=True) / part.abs().sum(-1, keepdim=True).clamp(min=1e-30)).sqrt()
    torch.testing.assert_close(parts.double(), part * warmer * call.scale, rtol=2.0**-19, atol=0.0, equal_nan=True)


def _variant(group: int) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        return PART_QUERIES, Call(torch.zeros(3, 2 * group, 128, dtype=dtype), 2, 32, 0.1)

    return make


VARIANTS = {"group of 4": _variant(4), "one": _variant(1)}
