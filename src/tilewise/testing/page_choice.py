"""Choices of pages against their specification, on any device, and what the compile tier compiles of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.page_choice.problem import FORCED, Call
from tilewise.ops.page_choice.table import CHOOSE_PAGES
from tilewise.testing.page_selection import PagesCase, make_inputs
from tilewise.testing.page_summaries import pages


def make_call(case: PagesCase, dtype: torch.dtype, device: str = "cpu") -> Call:
    """The call of a case, whose rows see all of their requests."""
    given = make_inputs(case, dtype, device)
    layout, rows = given["layout"], given["q"].reshape(-1, *given["q"].shape[-2:])
    request = torch.arange(len(case.lengths), dtype=torch.int32, device=device).repeat_interleave(case.queries)
    lengths, select = layout.seqlens_k[request.long()], case.select
    assert isinstance(select, tw.TopPages)
    means = select.by == "mean"
    least, largest = (getattr(layout.summaries, "k_mean" if means else name) for name in ("least", "largest"))
    return Call(
        rows, least, largest, layout.block_table, None if case.queries == 1 else request, lengths, means,
        case.page_size, select.first, select.local, min(select.pages, layout.block_table.shape[1]), 3, 2,
    )  # fmt: skip


def make_ties(width: int, device: str = "cpu") -> Call:
    """A call over many pages of which many score alike, some of them zero, of either sign, or no number."""
    generator = torch.Generator().manual_seed(width)
    ends = (2.0 * torch.randn(400, 2, 1, generator=generator)).round().repeat(1, 1, 16)
    ends[::57], ends[1::58] = torch.nan, -torch.inf
    q = torch.tensor([1.0, -1.0, 0.0, 3e-45, 1e38])[:, None, None].expand(5, 2, 16)
    table = torch.stack([torch.randperm(400, generator=generator)[:301] for _ in range(5)]).to(torch.int32)
    lengths = torch.tensor([601, 300, 33, 0, 2], dtype=torch.int32)
    q, ends, table, lengths = (x.contiguous().to(device) for x in (q, ends, table, lengths))
    return Call(q, ends, ends, table, None, lengths, True, 2, 1, 1, width, 1, 400)


def check_ties(width: int, impl: str, other: str, device: str = "cpu") -> None:
    """Of `make_ties` one implementation gives what the specification says, and the bits of another on a CPU."""
    call = make_ties(width, device)
    check(call, impl)
    for a, b in zip(CHOOSE_PAGES(call, impl), CHOOSE_PAGES(make_ties(width), other), strict=True):
        assert torch.equal(a.cpu(), b)


def check(call: Call, impl: str) -> None:
    """Scores are those of the specification, within what float32 sums in another order are off by, and what is read is
    what a stable sort by these scores gives.
    """
    tables, tokens, kept, scores = CHOOSE_PAGES(call, impl)
    want = CHOOSE_PAGES(call, "reference")[3]
    assert torch.equal(scores.isinf(), want.isinf())
    assert torch.equal(scores == FORCED, want == FORCED)
    largest = max(float(x.float().nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in (call.q, call.least, call.largest))
    off = torch.where(scores == want, 0.0, scores - want).abs()
    assert not off.numel() or float(off.max()) <= call.q.shape[2] ** 2 * 2.0**-24 * largest**2
    for row, length in enumerate(call.lengths.tolist()):
        request = row if call.request is None else int(call.request[row])
        count = -(-length // call.page_size)
        for head in range(call.heads):
            best = torch.argsort(scores[row, head, : max(0, count - 1)], descending=True, stable=True)
            best = best[: call.width - 1] if call.by_score else best[: call.width - 1].sort().values
            read = [*best.tolist(), *range(count)[-1:]]
            assert kept[row, head].nonzero().flatten().tolist() == sorted(read)
            pages = [int(call.table[request, n]) * call.by_page + head * call.by_head for n in read]
            assert tables[row, head].tolist() == pages + [0] * (call.width - len(read))
            held = sum(min(call.page_size, length - n * call.page_size) for n in read)
            assert int(tokens[row, head]) == held


def _variant(means: bool, group: int, count: int = 40) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        dim, size = pages(width)
        ends, numbers = torch.zeros(10, 2, dim, dtype=dtype), torch.zeros(3, dtype=torch.int32)
        q, table = torch.zeros(3, 2 * group, dim, dtype=dtype), torch.zeros(3, count, dtype=torch.int32)
        request = None if means else numbers.clone()
        return CHOOSE_PAGES, Call(q, ends, ends.clone(), table, request, numbers, means, size, 1, 1, 8, 1, 1)

    return make


VARIANTS = {
    "bounds": _variant(False, 1),
    "bounds of a group": _variant(False, 8),
    "means": _variant(True, 4),
    "many pages": _variant(True, 4, 4096),
}
