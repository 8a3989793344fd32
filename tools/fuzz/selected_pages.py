"""Cases of decoding that reads some pages of a cache, or some tokens: what is read is found once more, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import tilewise as tw
from tools.fuzz import placed as places
from tools.fuzz.attention import CAUSAL, Problem, problem
from tools.fuzz.case import UNIT, Case, Tensors, largest
from tools.fuzz.draw import HALVES, Draw
from tools.fuzz.formulas import Change, Formula

DTYPES = (*HALVES, *HALVES, torch.float32)
NEAR = 2.0**-16  # how near to each other, of what they are sums of, two scores are for which either may be taken
ALL = 10**6
CAP: Change = lambda c, s, b, h, i, j: 5.0 * torch.tanh(s / 5.0)  # noqa: E731
SUMMARIES = ("least", "largest", "k_mean", "v_mean")


def selected_pages(draw: Draw) -> Case:
    """TopPages, by bounds or by means, without the pages that are not read or with their means."""
    first, local, more = draw.one((0, 0, 1, 2)), draw.one((1, 1, 2)), draw.one((0, 1, 2, 3, 5, 9, ALL))
    by, far = draw.kernel(("bounds", "mean")), draw.kernel(("drop", "summary"))
    select = tw.TopPages(first + local + more, first, local, by, far)
    steps = (("5 tanh(s / 5)", CAP),) if draw.kernel_chance(0.3) else ()
    return _case(draw, select, Formula(draw.kernel((None, CAUSAL)), steps), 0)


def selected_tokens(draw: Draw) -> Case:
    """SparQ, with the mean of all values for the tokens that are not read or without."""
    keys, bits = draw.one((1, 2, 5, 9, 40, ALL)), draw.kernel((8, 4))
    local = draw.one((None, None, 1, min(keys, 4)))
    select = tw.SparQ(draw.kernel((1, 3, 8)), keys, local, draw.chance(0.7))
    return _case(draw, select, Formula(draw.kernel((None, CAUSAL)), ()), bits)


def _case(draw: Draw, select: tw.TopPages | tw.SparQ, found: Formula, bits: int) -> Case:
    """A case of few queries for each request, whose pages have summaries, with columns of so many bits."""
    dtype, sizes = draw.kernel(DTYPES), places.heads(draw)
    if isinstance(select, tw.SparQ):
        sizes = replace(sizes, dim=max(8, -(-sizes.dim // 4) * 4))
    placed = places.paged(draw, sizes, dtype, few=True, alike=True)
    bits = 8 if placed.page_size % 2 and bits else bits
    made = problem(draw, sizes, dtype, placed, found=found)
    assert isinstance(placed.layout, tw.Paged)
    most = max(1, *(len(table) for table in placed.tables))
    table = draw.ints([page for own in placed.tables for page in (*own, *[0] * (most - len(own)))])
    layout = replace(placed.layout, block_table=table.view(len(placed.tables), most))
    made.inputs |= {f"of {name}": x for name, x in _summarized(made.inputs, made, layout, bits).tensors.items()}
    used = sorted({page for own in placed.tables for page in own})
    sure = _sure(made, select)

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        kept = _summarized(x, made, layout, bits)
        given = arguments | {"layout": replace(layout, summaries=kept), "select": select}
        o, lse = tw.attention_with_lse(x["q"], x["k"], x["v"], **given)
        return {"o": o, "lse": lse, **{name: kept.tensors[name][used] for name in SUMMARIES}}

    def plain(x: Tensors) -> Tensors:
        parts = [_row(x, made, select, at) for at in _rows(made)]
        o, lse = _laid_out(made, [o for o, _ in parts]), _laid_out(made, [lse[:, None] for _, lse in parts])[..., 0]
        lse = lse.transpose(-1, -2).contiguous()
        return {"o": o, "lse": lse, **_by_page(x, made, used)}

    return made.case(
        library=lambda x, arguments: _of_sure(library(x, arguments), made, sure),
        plain=lambda x: _of_sure(plain(x), made, sure),
        floor=lambda name, truth: _floor(made, name, truth),
        exact=("least", "largest"),
        text=f"{select} {f'columns of {bits} bits ' if bits else ''}{made.text}",
    )


def _floor(made: Problem, name: str, truth: Tensors) -> float:
    """Means are rounded where they are kept, and so is a result before another is added to it."""
    if name in ("k_mean", "v_mean", "least", "largest"):
        return 0.0
    keys = largest(made.inputs["of k_mean"]) * largest(made.inputs["q"]) * made.sizes.dim**0.5 * abs(made.rules.scale)
    return UNIT[made.dtype] * (4 * (1 + largest(truth[name])) + (keys if name == "lse" else 0.0))


def _summarized(x: Tensors, made: Problem, layout: tw.Paged, bits: int) -> tw.PageSummaries:
    """Of all tokens, as new ones."""
    kept = tw.PageSummaries.of(x["k"], x["v"], bits or None)
    new = [k for _, k in made.placed.lengths]
    tw.summarize_pages(x["k"], x["v"], kept, replace(layout, cu_seqlens_q=made.draw.sums(new)), sum(new))
    return kept


def _by_page(x: Tensors, made: Problem, used: list[int]) -> Tensors:
    """Summaries of pages that are used, once more."""
    size = made.placed.page_size
    counts = {
        page: min(size, keys - n * size)
        for table, (_, keys) in zip(made.placed.tables, made.placed.lengths, strict=True)
        for n, page in enumerate(table)
    }
    found: dict[str, list[torch.Tensor]] = {name: [] for name in SUMMARIES}
    for page in used:
        k, v = (x[name][page, : counts[page]] for name in "kv")
        for name, one in zip(SUMMARIES, (k.amin(0), k.amax(0), k.mean(0), v.mean(0)), strict=True):
            found[name].append(one)
    nothing = {name: x["v" if name == "v_mean" else "k"][:0, 0] for name in SUMMARIES}
    return {name: torch.stack(parts) if parts else nothing[name] for name, parts in found.items()}


# rows ----------------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A query: where it lies in q as rows, its request, and how many of that one's tokens it sees."""

    place: int
    request: int
    seen: int


def _rows(made: Problem) -> Iterator[_Row]:
    place = 0
    for request, (queries, keys) in enumerate(made.placed.lengths):
        for n in range(queries):
            yield _Row(place, request, keys - (queries - 1 - n if made.formula.part else 0))
            place += 1


def _laid_out(made: Problem, rows: list[torch.Tensor]) -> torch.Tensor:
    """Results (heads, dim) of all rows, as q lies."""
    q = made.inputs["q"]
    dim = rows[0].shape[-1] if rows else made.sizes.dim_v
    found = torch.stack(rows) if rows else q.new_zeros(0, made.sizes.q, dim)
    return found.view(*q.shape[:-1], dim)


def _of_sure(results: Tensors, made: Problem, sure: torch.Tensor) -> Tensors:
    """Nothing of rows and heads of which it is not sure what they read; their lse is that of nothing."""
    each = sure.repeat_interleave(made.sizes.group, 1).view(*made.inputs["q"].shape[:-1])
    o, lse = torch.where(each[..., None], results["o"], 0.0), torch.where(each.transpose(-1, -2), results["lse"], 0.0)
    return results | {"o": o, "lse": lse}


def _sure(made: Problem, select: tw.TopPages | tw.SparQ) -> torch.Tensor:
    """Bool (rows, heads of keys): whether what is read depends on no rounding."""
    found = [
        [_read(made.inputs, made, select, at, head).sure for head in range(made.sizes.kv)] for at in _rows(made)
    ]  # fmt: skip
    return torch.tensor(found, dtype=torch.bool, device=made.draw.device).view(len(found), made.sizes.kv)


class _Read(NamedTuple):
    """Which tokens that a row sees are read, or pages; the predicted weight of these, and whether that is sure."""

    tokens: torch.Tensor
    pages: torch.Tensor
    share: torch.Tensor
    sure: bool


def _row(x: Tensors, made: Problem, select: tw.TopPages | tw.SparQ, at: _Row) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one query, all heads."""
    heads = [_head(x, made, select, at, head) for head in range(made.sizes.kv)]
    return torch.cat([o for o, _ in heads]), torch.cat([lse for _, lse in heads])


def _head(
    x: Tensors, made: Problem, select: tw.TopPages | tw.SparQ, at: _Row, head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x["q"].dtype == torch.float64 else torch.float32
    heads = slice(head * made.sizes.group, (head + 1) * made.sizes.group)
    q = x["q"].flatten(0, -3)[at.place, heads]
    o, lse = q.new_zeros(len(q), made.sizes.dim_v), q.new_full((len(q),), -torch.inf, dtype=wide)
    if at.seen > 0:
        read, table = _read(made.inputs, made, select, at, head), _table(made, at)
        k, v = (x[name][table, :, head].flatten(0, 1)[: at.seen] for name in "kv")
        keys, values, bias = k[read.tokens], v[read.tokens], [0.0] * int(read.tokens.sum())
        if isinstance(select, tw.TopPages) and select.far == "summary":
            rest = [x[f"of {name}"][table, head][~read.pages] for name in ("k_mean", "v_mean")]
            keys, values = torch.cat([keys, rest[0]]), torch.cat([values, rest[1]])
            bias += [math.log(made.placed.page_size)] * len(rest[0])
        s = q @ keys.T * made.rules.scale
        s = s if made.rules.change is None else made.rules.change({}, s, 0, 0, 0, 0)
        s = s + torch.tensor(bias, dtype=s.dtype, device=s.device)
        o, lse = torch.softmax(s, -1) @ values, s.to(wide).logsumexp(-1)
        if isinstance(select, tw.SparQ) and select.compensate:
            share = read.share.to(wide)
            o = (share[:, None] * o + (1 - share)[:, None] * v.to(wide).mean(0)).to(q.dtype)
            lse = lse - share.log()
    if "sink" in x:
        sink = x["sink"][heads].to(wide)
        more = torch.logaddexp(lse, sink)
        o, lse = (o * torch.exp(lse - more).nan_to_num(0.0)[:, None]).to(q.dtype), more
    return o, lse


def _table(made: Problem, at: _Row) -> torch.Tensor:
    """The pages that a row sees."""
    count = -(-at.seen // made.placed.page_size)
    return torch.tensor(made.placed.tables[at.request][:count], dtype=torch.int64, device=made.draw.device)


# what is read --------------------------------------------------------------------------------------------------------


def _read(x: Tensors, made: Problem, select: tw.TopPages | tw.SparQ, at: _Row, head: int) -> _Read:
    """What a row reads of one head of keys."""
    size, table = made.placed.page_size, _table(made, at)
    heads = slice(head * made.sizes.group, (head + 1) * made.sizes.group)
    q = x["q"].flatten(0, -3)[at.place, heads].double()
    if at.seen <= 0:
        nothing = torch.zeros(0, dtype=torch.bool, device=q.device)
        return _Read(nothing, nothing, q.new_zeros(len(q)), True)
    if isinstance(select, tw.SparQ):
        return _tokens_read(x, made, select, q, table, head, at.seen)
    names = ("k_mean", "k_mean") if select.by == "mean" else ("least", "largest")
    least, most = (x[f"of {name}"][table, head].double() for name in names)
    scores = torch.maximum(q[:, None] * least, q[:, None] * most).sum(-1).amax(0)
    close = NEAR * float((q.abs()[:, None] * torch.maximum(least.abs(), most.abs())).sum(-1).max())
    place = torch.arange(len(table), device=q.device)
    newest = place >= len(table) - select.local
    scores = torch.where((place < select.first) | newest, torch.inf, scores)
    pages, sure = _best(scores, select.pages, close)
    return _Read(pages.repeat_interleave(size)[: at.seen], pages, q.new_ones(len(q)), sure)


def _tokens_read(
    x: Tensors, made: Problem, select: tw.SparQ, q: torch.Tensor, table: torch.Tensor, head: int, seen: int
) -> _Read:
    """By the largest dimensions of queries, and what columns stand for there."""
    codes = x["of columns"][table, head]  # (pages, dim, bytes)
    bits = codes.shape[-1] * 8 // made.placed.page_size
    codes = codes if bits == 8 else torch.cat([codes & 15, codes >> 4], -1)
    least, most = (x[f"of {name}"][table, head].double()[..., None] for name in ("least", "largest"))
    keys = (least + codes * (most - least) / (2**bits - 1)).transpose(1, 2).flatten(0, 1)[:seen]
    sums = q.abs().sum(0)
    dims, sure = _best(sums, select.rank, NEAR * float(sums.max()))
    part = q[:, dims]
    warmer = (q.abs().sum(-1) / part.abs().sum(-1)).sqrt()
    part = part * (warmer * made.rules.scale)[:, None]
    s = part @ keys[:, dims].T
    close = NEAR * float((part.abs() @ keys[:, dims].abs().T).sum(0).max())
    newest = torch.arange(seen, device=q.device) >= seen - select.newest
    tokens, sure_too = _best(torch.where(newest, torch.inf, s.sum(0)), select.keys, close)
    share = torch.exp(s[:, tokens].logsumexp(-1) - s.logsumexp(-1))
    return _Read(tokens, tokens[:0], share, sure and sure_too)


def _best(scores: torch.Tensor, count: int, close: float) -> tuple[torch.Tensor, bool]:
    """(Which of some scores are the `count` largest, of equal ones the first; whether no other is as large, nearly)."""
    order = torch.argsort(scores, descending=True, stable=True)
    taken = torch.zeros_like(scores, dtype=torch.bool)
    taken[order[:count]] = True
    if count >= len(scores):
        return taken, True
    last, next_one = float(scores[order[count - 1]]), float(scores[order[count]])
    return taken, last - next_one > close if math.isfinite(last) else math.isfinite(next_one)
