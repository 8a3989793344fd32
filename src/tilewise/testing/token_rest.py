"""What stands for tokens that are not read against its specification, on any device, and what the compile tier compiles
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.token_rest.problem import Call
from tilewise.ops.token_rest.table import ADD_REST
from tilewise.testing.page_selection import PagesCase
from tilewise.testing.page_summaries import pages


def make_call(case: PagesCase, dtype: torch.dtype, device: str = "cpu") -> Call:
    """Numbers in a case's sizes: of some queries what is read weighs more than all, as may be by rounding."""
    assert isinstance(case.select, tw.SparQ)
    generator = torch.Generator().manual_seed(len(case.name))
    lengths = torch.tensor(case.lengths, dtype=torch.int32).repeat_interleave(case.queries)
    rows, (heads_q, heads) = len(lengths), case.heads
    tiles, parts = (-(-max(case.lengths) // each) for each in (3, 7))
    read, seen = (torch.randn(rows, heads, heads_q // heads, n, generator=generator) for n in (tiles, parts))
    read[torch.arange(tiles) * 3 >= lengths[:, None, None, None].expand_as(read)] = -torch.inf
    seen[torch.arange(parts) * 7 >= lengths[:, None, None, None].expand_as(seen)] = -torch.inf
    values = 7.0 * torch.randn(rows, heads, parts, case.dim_v, generator=generator)
    last = torch.randn(rows, heads, case.dim_v, generator=generator) if case.queries > 1 else None
    # as attention has it: rows may be further apart than heads say
    o = torch.randn(rows, heads_q + 1, case.dim_v, generator=generator)[:, :heads_q]
    lse = torch.randn(rows, heads_q, generator=generator) + 3.0
    o[lengths == 0], lse[lengths == 0] = 0.0, -torch.inf
    lse = lse.to(torch.promote_types(dtype, torch.float32))
    return Call(
        o.to(device, dtype), lse.to(device), read.to(device), (seen + 1.0).to(device), values.to(device),
        lengths.to(device), case.select.keys, None if last is None else last.to(device),
    )  # fmt: skip


def check(call: Call, impl: str) -> None:
    """Results are those of the specification within float32's roundings, where nothing is added those of the call. Sums
    of as many exponentials as there are tiles, or parts, are off by so many roundings at most, and their logarithms by
    as much, and by what their numbers are rounded by.
    """
    (o, lse), (want_o, want_lse) = ADD_REST(call, impl), ADD_REST(call, "reference")
    same = want_lse == call.lse
    assert o.dtype == call.o.dtype
    assert lse.dtype == call.lse.dtype
    assert torch.equal(lse[same], call.lse[same])
    assert torch.equal(o[same], call.o[same])
    logs = float(max(x.nan_to_num(neginf=0.0).abs().max() for x in (call.read, call.seen, call.lse)))
    off = 2.0**-23 * (call.read.shape[3] + call.seen.shape[3] + 8.0 + 4.0 * logs)
    torch.testing.assert_close(lse, want_lse, rtol=2.0**-22, atol=off)
    unit = max(2.0**-22, torch.finfo(o.dtype).eps)
    largest = max(float(call.o.abs().max()), float(want_o.abs().max()), 1.0)
    torch.testing.assert_close(o.double(), want_o.double(), rtol=unit, atol=off * largest)


def _variant(group: int, tiles: int, last: bool = False) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        dim, _ = pages(width)
        read, seen = torch.zeros(3, 2, group, tiles), torch.zeros(3, 2, group, tiles // 8)
        values, lengths = torch.zeros(3, 2, tiles // 8, dim), torch.zeros(3, dtype=torch.int32)
        o, lse = torch.zeros(3, 2 * group, dim, dtype=dtype), torch.zeros(3, 2 * group)
        return ADD_REST, Call(o, lse, read, seen, values, lengths, 8, values[:, :, 0].contiguous() if last else None)

    return make


VARIANTS = {"group of 4": _variant(4, 256), "one": _variant(1, 256, last=True), "many": _variant(8, 4096, last=True)}
