"""Cases of attention over selected pages, an oracle that reads them one by one, and what must hold on any device."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.testing.budgets import FACTOR, ORDER


@dataclass(frozen=True)
class PagesCase:
    """Requests of some lengths, each with `queries` new tokens; pages lie in `order`, unused slots hold NaN."""

    name: str
    select: tw.TopPages | tw.SparQ
    lengths: tuple[int, ...] = (37, 5, 0, 64, 16)
    queries: int = 1
    page_size: int = 8
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    dim_v: int = 16
    order: str = "NHD"
    packed: bool = False
    causal: bool = True
    cap: float | None = None
    sink: bool = False

    def __repr__(self) -> str:
        return self.name


CASES = [
    PagesCase("bounds", tw.TopPages(3)),
    PagesCase("means", tw.TopPages(3, by="mean")),
    PagesCase("summary", tw.TopPages(3, far="summary")),
    PagesCase("hnd", tw.TopPages(4, first=0, local=2, far="summary"), order="HND"),
    PagesCase("all", tw.TopPages(64)),
    PagesCase("one_page", tw.TopPages(1, first=0)),
    PagesCase("ones", tw.TopPages(5, first=2, local=2), page_size=1, lengths=(9, 3, 20)),
    PagesCase("large_pages", tw.TopPages(2, first=0), lengths=(260, 130, 500), page_size=64),
    PagesCase("drafts", tw.TopPages(3, far="summary"), queries=3, lengths=(37, 9, 64, 24)),
    PagesCase("drafts_packed", tw.TopPages(3), queries=3, packed=True, lengths=(37, 9, 64, 24)),
    PagesCase("uncut", tw.TopPages(3), queries=2, causal=False, lengths=(37, 9, 64)),
    PagesCase("one_head", tw.TopPages(2, first=0), heads=(1, 1)),
    PagesCase("multi_query", tw.TopPages(3, far="summary"), heads=(6, 1), dim=24, dim_v=40),
    PagesCase("capped", tw.TopPages(3, far="summary"), cap=5.0, sink=True),
]
SPARQ = [
    PagesCase("sparq", tw.SparQ(8, 12)),
    PagesCase("sparq_without_mean", tw.SparQ(4, 12, local=2, compensate=False)),
    PagesCase("sparq_hnd", tw.SparQ(16, 7), order="HND"),
    PagesCase("sparq_all", tw.SparQ(3, 500)),
    PagesCase("sparq_odd_pages", tw.SparQ(5, 9), page_size=5, lengths=(37, 5, 0, 64)),
    PagesCase("sparq_ones", tw.SparQ(5, 4), page_size=1, lengths=(9, 3, 20)),
    PagesCase("sparq_drafts", tw.SparQ(8, 10), queries=2, packed=True, lengths=(37, 9, 64, 24)),
    PagesCase("sparq_long_pages", tw.SparQ(7, 20), queries=2, lengths=(70, 33), page_size=32, heads=(2, 2)),
    PagesCase("sparq_multi_query", tw.SparQ(6, 20, local=3), heads=(6, 1), dim=24, dim_v=40, sink=True),
]
BY_NAME = {case.name: case for case in [*CASES, *SPARQ]}


def make_inputs(case: PagesCase, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """q, k, v and layout, with summaries made of them."""
    generator = torch.Generator().manual_seed(len(case.name))
    size, (heads, heads_kv) = case.page_size, case.heads
    counts = [-(-n // size) for n in case.lengths]
    total = sum(counts) + 2
    order = torch.randperm(total, generator=generator).tolist()
    table = torch.full((len(counts), max(counts) + 1), total - 1, dtype=torch.int32)
    pools = []
    for width in (case.dim, case.dim_v):
        page = (size, heads_kv) if case.order == "NHD" else (heads_kv, size)
        pool = torch.randn(total, *page, width, generator=generator) + torch.randn(
            total, 1, 1, width, generator=generator
        )
        pools.append(pool if case.order == "NHD" else pool.transpose(1, 2))
    start = 0
    for r, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
        table[r, :count] = torch.tensor(order[start : start + count], dtype=torch.int32)
        start += count
        if length % size:
            for pool in pools:
                pool[table[r, count - 1], length % size :] = torch.nan
    q = torch.randn(len(counts), case.queries, heads, case.dim, generator=generator)
    k, v = (x.to(device, dtype) for x in pools)
    seqlens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=device) * case.queries
    summaries = tw.PageSummaries.of(k, v, columns_of(case))
    whole = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    tw.summarize_pages(k, v, summaries, tw.Paged(table.to(device), seqlens, whole), sum(case.lengths))
    layout = tw.Paged(table.to(device), seqlens, starts if case.packed else None, summaries=summaries)
    q = q.to(device, dtype)
    given: dict[str, Any] = {"layout": layout, "mask": tw.causal if case.causal else None}
    given |= {} if case.cap is None else {"score": tw.softcap(case.cap)}
    given |= {"sink": torch.linspace(-1, 1, heads, device=device)} if case.sink else {}
    return {"q": q.flatten(0, 1) if case.packed else q, "k": k, "v": v, **given}


def columns_of(case: PagesCase) -> int | None:
    """The bits of a case's columns: 8, 4 where pages are of an even size, or none."""
    if case.dim % 4:
        return None
    return 8 if case.page_size % 2 or case.queries % 2 else 4


def keys_of(summaries: tw.PageSummaries, page: int, size: int) -> torch.Tensor:
    """The keys of a page that its columns stand for, float64 (page_size, heads, dim)."""
    assert summaries.columns is not None
    codes = summaries.columns[page]
    bits = codes.shape[-1] * 8 // size
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    least, largest = (x[page].double() for x in (summaries.least, summaries.largest))
    keys: torch.Tensor = least[..., None] + codes * ((largest - least) / (2**bits - 1))[..., None]
    return keys.permute(2, 0, 1)


def chosen(select: tw.TopPages, q: torch.Tensor, least: torch.Tensor, largest: torch.Tensor) -> list[int]:
    """The pages that a group's queries (group, dim) read, of those with these ends (pages, dim), in float64."""
    count = least.shape[0]
    scores = torch.maximum(q[:, None] * least, q[:, None] * largest).sum(-1).amax(0)
    forced = [n for n in range(count) if n < select.first or n >= count - select.local]
    rest = sorted(set(range(count)) - set(forced), key=lambda n: (-float(scores[n]), n))
    # where first and local alone are too many the first ones are read
    return sorted((forced + rest)[: select.pages])


def predicted(select: tw.SparQ, q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tokens that a group's queries (group, dim) read, of those whose columns stand for keys (tokens, dim), the
    share of the predicted weights that these have, for each query), in float64.
    """
    dims = q.abs().sum(0).topk(select.rank).indices
    part = q[:, dims]
    warmer = torch.sqrt(q.abs().sum(-1) / part.abs().sum(-1))
    s = (part * warmer[:, None] * q.shape[-1] ** -0.5) @ keys[:, dims].T
    total = s.sum(0)
    total[max(0, len(keys) - select.newest) :] = torch.inf
    read = total.topk(min(select.keys, len(keys))).indices.sort().values
    return read, torch.exp(s[:, read].logsumexp(-1) - s.logsumexp(-1))


def oracle(case: PagesCase, given: dict[str, Any], compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of each row of queries, one head after another, in float64 or as plain PyTorch has them; what is read is
    found in float64.
    """
    layout, size, select = given["layout"], case.page_size, case.select
    group = case.heads[0] // case.heads[1]
    rows = given["q"].reshape(-1, *given["q"].shape[-2:])
    o = torch.zeros(*rows.shape[:2], case.dim_v, dtype=compute, device=rows.device)
    lse = torch.full(rows.shape[:2], -torch.inf, dtype=compute, device=rows.device)
    for row, head in itertools.product(range(rows.shape[0]), range(case.heads[1])):
        r, n = divmod(row, case.queries)
        length = case.lengths[r] - (case.queries - 1 - n if case.causal else 0)
        if length <= 0:
            continue
        table = layout.block_table[r, : -(-length // size)].long()
        k, v = (given[name][table, :, head].flatten(0, 1)[:length] for name in "kv")
        heads = slice(head * group, (head + 1) * group)
        of_pages = {name: x[table, head] for name, x in layout.summaries.tensors.items()}
        tokens = torch.zeros(length, dtype=torch.bool, device=rows.device)
        share = None
        if isinstance(select, tw.SparQ):
            stood_for = torch.cat([keys_of(layout.summaries, int(page), size)[:, head] for page in table])[:length]
            read, share = predicted(select, rows[row, heads].double(), stood_for)
            tokens[read] = True
        else:
            names = ("k_mean", "k_mean") if select.by == "mean" else ("least", "largest")
            pages = chosen(select, rows[row, heads].double(), *(of_pages[name].double() for name in names))
            inside = torch.zeros(len(table), dtype=torch.bool, device=rows.device)
            inside[pages] = True
            tokens = inside.repeat_interleave(size)[:length]
        q, keys, values = (x.to(compute) for x in (rows[row, heads], k[tokens], v[tokens]))
        bias = q.new_zeros(len(keys))
        if isinstance(select, tw.TopPages) and select.far == "summary":
            means = [of_pages[name][~inside].to(compute) for name in ("k_mean", "v_mean")]
            keys, values = torch.cat([keys, means[0]]), torch.cat([values, means[1]])
            bias = torch.cat([bias, bias.new_full((len(means[0]),), math.log(size))])
        s = q @ keys.T * case.dim**-0.5
        s = (s if case.cap is None else case.cap * torch.tanh(s / case.cap)) + bias
        found, total = torch.softmax(s, -1) @ values, torch.logsumexp(s, -1)
        if isinstance(select, tw.SparQ) and select.compensate:
            assert share is not None
            counts = (length - size * torch.arange(len(table), device=rows.device)).clamp(max=size)
            # a page's mean knows later tokens, too
            last = length // size * size if length < case.lengths[r] else length
            counts = torch.where(size * torch.arange(len(table), device=rows.device) < last, counts, 0)
            mean = counts.double() @ of_pages["v_mean"].double() + v[last:].double().sum(0)
            mean = (mean / length).to(compute)
            share = share.to(compute)
            found, total = share[:, None] * found + (1 - share)[:, None] * mean, total - share.log()
        if case.sink:
            more = torch.logaddexp(total, given["sink"][heads].to(compute))
            found, total = found * torch.exp(total - more)[:, None], more
        o[row, heads], lse[row, heads] = found, total
    if case.sink:
        seen = lse > -torch.inf
        lse = torch.where(seen, lse, given["sink"].to(compute))
    return o, lse


def check(case: PagesCase, dtype: torch.dtype, impl: str | None = None, device: str = "cpu") -> None:
    """Results are those of the oracle within twice plain PyTorch's error and what float32 sums in another order are off
    by; a result that is rounded before it is merged is off by that, too.
    """
    given = make_inputs(case, dtype, device)
    o, lse = tw.attention_with_lse(**given, select=case.select, impl=impl)
    want, plain = oracle(case, given, torch.float64), oracle(case, given, dtype)
    assert o.shape == (*given["q"].shape[:-1], case.dim_v)
    assert lse.shape == ((*given["q"].shape[:1], case.heads[0], case.queries) if o.ndim == 4 else o.shape[1::-1])
    rows = lse.transpose(1, 2).flatten(0, 1) if o.ndim == 4 else lse.T
    scores = float(want[1][want[1].isfinite()].abs().max()) + 1.0
    order = ORDER * 2.0**-24 * (1.0 + scores)
    for name, got, exact, rough in (
        ("o", o.reshape(want[0].shape), want[0], plain[0]),
        ("lse", rows, want[1], plain[1]),
    ):
        unit = torch.finfo(dtype).eps if name == "o" else 2.0**-23
        same = got.double() == exact  # infinities, too
        off = torch.where(same, 0.0, got.double() - exact).abs().max()
        by_hand = torch.where(rough == exact, 0.0, rough.double() - exact).abs().max()
        largest = max(1.0, float(exact[exact.isfinite()].abs().max()))
        roundings = 1.0 if isinstance(case.select, tw.TopPages) and case.select.far == "drop" else 2.0
        allowed = FACTOR * float(by_hand) + (order + roundings * unit) * largest
        assert float(off) <= allowed, f"{name} off by {float(off)}, allowed {allowed}"
