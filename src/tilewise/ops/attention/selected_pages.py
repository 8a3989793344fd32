"""Attention of a step of decoding over selected pages of a KV cache.

A selection for each query and head of keys is attention over pages that exists: one head of a pool in pages is itself a
pool of pages of one head, whose pages lie where a page and a head of the pool do (`one_head`). Each query and head of
keys becomes a request of its own, with a table of the pages that are read. What stands for the others is a second call,
over their means as pages of one token, whose result is merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.formula.formula import Mask, Score, as_score, mask, score
from tilewise.formula.library import causal
from tilewise.formula.walk import postorder
from tilewise.layouts import Paged
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.merge import merge
from tilewise.ops.page_choice.problem import Call as Choice
from tilewise.ops.page_choice.table import CHOOSE_PAGES
from tilewise.ops.page_summaries import check_summaries
from tilewise.schedule.page_selection import TopPages

State = tuple[torch.Tensor, torch.Tensor]
_REFUSED = ("dropout", "seed", "deterministic", "batch_invariant", "quantize")


def attend_pages(
    run: Callable[[Call, str | None], State], q: torch.Tensor, k: Any, v: Any, select: TopPages, impl: str | None,
    **arguments: Any,
) -> State:  # fmt: skip
    """(o, lse), where `run` gives those of a call without a selection."""
    near, rest = _calls(q, k, v, select, arguments)
    rows, heads = q[..., 0, 0].numel(), q.shape[-2]
    o, lse = (x.reshape(rows, heads, -1) for x in run(near, impl))
    if rest is not None:
        of_rest = run(rest, impl)
        o, lse = merge((o, lse[..., 0].T.contiguous()), (of_rest[0][:, 0], of_rest[1][..., 0].T.contiguous()))
        lse = lse.T[..., None]
    sink = arguments.get("sink")
    if sink is not None:
        more = torch.logaddexp(lse, sink.detach().to(lse.dtype)[:, None])
        o, lse = (o.float() * torch.exp(lse - more).nan_to_num(0.0)).to(o.dtype), more
    lse = lse[..., 0].T  # (heads, rows)
    if q.ndim == 4:
        lse = lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1)
    return o.view(*q.shape[:-1], -1), lse.contiguous()


def narrowed_to_pages(q: torch.Tensor, k: Any, v: Any, select: TopPages, arguments: dict[str, Any]) -> Call:
    """The call over the pages that are read."""
    return _calls(q, k, v, select, arguments)[0]


def _calls(q: torch.Tensor, k: Any, v: Any, select: TopPages, arguments: dict[str, Any]) -> tuple[Call, Call | None]:
    """The calls over the pages that are read, and over what stands for the others."""
    layout, scored = _checked(q, k, v, arguments)
    call = make_call(q, k, v, layout=layout, mask=arguments.get("mask"), scale=arguments.get("scale"))
    if call.wants_grad:
        hint = "call it inside torch.no_grad()"
        raise InputError("select", got=f"{select!r}, and gradients", expected="no gradients over pages", hint=hint)
    rows = q.reshape(-1, *q.shape[-2:])
    request, lengths = _requests(layout, q, of_tokens=arguments.get("mask") is not None)
    (k_one, v_one), by_page, by_head = one_head(k, v)
    means, summaries = select.by == "mean", layout.summaries
    assert summaries is not None
    ends = (summaries.k_mean, summaries.k_mean) if means else (summaries.least, summaries.largest)
    table = layout.pages.table
    choice = Choice(
        rows.detach(), *ends, table, request, lengths, means, k.shape[1], select.first, select.local,
        min(select.pages, table.shape[1]), by_page, by_head,
    )  # fmt: skip
    tables, tokens, kept, _ = CHOOSE_PAGES(choice)
    near = make_call(
        rows.reshape(tokens.numel(), 1, -1, rows.shape[-1]), k_one, v_one,
        layout=Paged(tables.flatten(0, 1), tokens.flatten()), scale=call.scale, score=scored,
    )  # fmt: skip
    if select.far == "drop":
        return near, None
    return near, _of_the_rest(rows, kept, k.shape[1], layout, request, lengths, call.scale, scored)


def one_head(*pools: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int, int]:
    """(Pools of pages as pools of pages of one head, how many of these a page is from the next, and a head from the
    next): page p and head h are page p * by_page + h * by_head.
    """
    views = []
    steps: set[tuple[int, int]] = set()
    for x in pools:
        of_page, of_token, of_head, of_dim = x.stride()
        pages, size, heads, dim = x.shape
        unit = math.gcd(of_page, of_head) or 1
        by_page, by_head = of_page // unit, of_head // unit
        steps.add((by_page, by_head))
        count = max(0, (pages - 1) * by_page + (heads - 1) * by_head + 1) if pages else 0
        views.append(x.as_strided((count, size, 1, dim), (unit, of_token, unit, of_dim)))
    if len(steps) > 1:
        raise InputError(
            "v",
            got=f"pages of strides {pools[1].stride()}, keys of {pools[0].stride()}",
            expected="pages whose heads lie as those of the keys",
            hint="a pool of PagePool, or dense tensors of one order",
        )
    return tuple(views), by_page, by_head


def _of_the_rest(
    rows: torch.Tensor, kept: torch.Tensor, size: int, layout: Paged, request: torch.Tensor | None,
    lengths: torch.Tensor, scale: float, scored: Score | None,
) -> Call:  # fmt: skip
    """The call over one key for each whole page that is not read."""
    summaries = layout.summaries
    assert summaries is not None
    group = rows.shape[1] // kept.shape[1]
    hidden: Mask = mask(lambda b, h, i, j: ~kept[b, h // group, j], "pages that are not read")

    def counted(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (s if scored is None else scored.expr) + math.log(size)

    table = layout.pages.table
    pages = Paged(table if request is None else table[request.long()], (lengths + (size - 1)) // size)
    k, v = summaries.k_mean[:, None], summaries.v_mean[:, None]
    return make_call(rows[:, None], k, v, layout=pages, scale=scale, mask=hidden, score=score(counted))


def _requests(layout: Paged, q: torch.Tensor, of_tokens: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(The request of each row of queries, None where each has one, how many of its tokens that row sees), int32;
    `of_tokens` where a query does not see later ones.
    """
    seqlens, starts = layout.seqlens_k, layout.cu_seqlens_q
    if starts is None and q.shape[1] == 1:
        return None, seqlens
    if starts is None:
        starts = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32, device=q.device)
    row = torch.arange(q.shape[0] if q.ndim == 3 else q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    request = torch.searchsorted(starts[1:], row, right=True, out_int32=True)
    lengths = seqlens[request.long()]
    if of_tokens:
        lengths = (lengths - (starts[1:][request.long()] - 1 - row)).clamp(min=0)
    return request, lengths.to(torch.int32)


def _checked(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> tuple[Paged, Score | None]:
    """The layout, and the score formula; raises InputError for what a selection of pages does not go with."""
    layout = arguments.get("layout")
    if not isinstance(layout, Paged) or layout.summaries is None:
        raise InputError(
            "layout",
            got="no summaries of pages",
            expected="tilewise.Paged(block_table, seqlens_k, summaries=...)",
            hint="pages are selected by what tilewise.summarize_pages keeps of them",
        )
    for name in _REFUSED:
        if arguments.get(name):
            raise InputError(name, got=repr(arguments[name]), expected="none over selected pages", hint="leave it out")
    if isinstance(layout.block_table, tuple):
        hint = "rows of one width, for requests of any length"
        raise InputError("layout block_table", got="a pair", expected="a matrix", hint=hint)
    if arguments.get("mask") not in (None, causal):
        hint = "tokens of selected pages have no positions"
        raise InputError("mask", got=repr(arguments["mask"]), expected="None or tilewise.causal", hint=hint)
    check_summaries(k, v, layout.summaries)
    scored = None if arguments.get("score") is None else as_score(arguments["score"])
    symbols = set() if scored is None else {x.value for x in postorder([scored.expr]) if x.op == "sym"}
    if symbols - {"s"}:
        hint = "tokens of selected pages have no positions; tilewise.softcap has none, either"
        raise InputError("score", got=repr(scored), expected="a score of the score alone", hint=hint)
    return replace(layout, share_prefixes=False), scored
