"""Attention of a step of decoding over selected pages, or tokens, of a KV cache.

A selection for each query and head of keys is attention over pages that exists: one head of a pool in pages is itself a
pool of pages of one head, whose pages lie where a page and a head of the pool do (`one_head`), and so is each token of
one. Each query and head of keys becomes a request of its own, with a table of what is read. What stands for the rest is
added to the result: of pages a second state, over their means as pages of one token, which is merged; of tokens the
mean of all values, by the share of weights that was not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.formula.formula import Mask, Score, as_score, mask, score
from tilewise.formula.library import causal
from tilewise.formula.walk import postorder
from tilewise.layouts import Paged, PageSummaries, in_int32
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.merge import merge
from tilewise.ops.page_choice.problem import Call as PageChoice
from tilewise.ops.page_choice.table import CHOOSE_PAGES
from tilewise.ops.page_summaries import check_summaries
from tilewise.ops.query_parts.problem import Call as Queries
from tilewise.ops.query_parts.table import PART_QUERIES
from tilewise.ops.token_choice.problem import Call as TokenChoice
from tilewise.ops.token_choice.table import CHOOSE_TOKENS
from tilewise.ops.token_rest.problem import Call as TokenRest
from tilewise.ops.token_rest.table import ADD_REST
from tilewise.ops.token_scores.problem import Call as Prediction
from tilewise.ops.token_scores.problem import total_of
from tilewise.ops.token_scores.table import SCORE_TOKENS
from tilewise.schedule.page_selection import SparQ, TopPages

State = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[Call, str | None], State]
OfPages = TopPages | SparQ
_REFUSED = ("dropout", "seed", "deterministic", "batch_invariant", "quantize")


@dataclass(frozen=True, eq=False)
class _Step:
    """Queries (rows, num_heads_q, dim) that select: row t of request `request[t]`, or t where that is None, which sees
    its first `lengths[t]` tokens.
    """

    rows: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    summaries: PageSummaries
    request: torch.Tensor | None
    lengths: torch.Tensor
    scale: float
    score: Score | None
    whole: torch.Tensor | None = None  # tokens of requests, where a row may see fewer

    @property
    def size(self) -> int:
        return self.k.shape[1]

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.rows.shape[1] // self.heads

    def own_table(self) -> torch.Tensor:
        """The table with a row for each row of queries."""
        return self.table if self.request is None else self.table[self.request.long()]

    def over(self, pools: tuple[torch.Tensor, ...], tables: torch.Tensor, tokens: torch.Tensor) -> Call:
        """The call over what tables (rows, heads, n) name in pools of one head, of which tokens (rows, heads) are."""
        q = self.rows.reshape(tokens.numel(), 1, self.group, self.rows.shape[-1])
        layout = Paged(tables.flatten(0, 1), tokens.flatten())
        return make_call(q, *pools, layout=layout, scale=self.scale, score=self.score)


Rest = Callable[[Run, State], State]  # the state (rows, heads) of what is read, and what stands for the rest added


def attend_pages(
    run: Run, q: torch.Tensor, k: Any, v: Any, select: OfPages, impl: str | None, **arguments: Any
) -> State:
    """(o, lse), where `run` gives those of a call without a selection; `impl` is of that over what is read."""
    near, rest = _calls(q, k, v, select, arguments)
    rows, heads = q[..., 0, 0].numel(), q.shape[-2]
    o, lse = run(near, impl)
    o, lse = o.reshape(rows, heads, o.shape[-1]), lse.reshape(rows, heads)
    if rest is not None:
        o, lse = rest(run, (o, lse))
    sink = arguments.get("sink")
    if sink is not None:
        more = torch.logaddexp(lse, sink.detach().to(lse.dtype))
        o, lse = (o.float() * torch.exp(lse - more).nan_to_num(0.0)[..., None]).to(o.dtype), more
    lse = lse.T  # (heads, rows)
    if q.ndim == 4:
        lse = lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1)
    return o.view(*q.shape[:-1], o.shape[-1]), lse.contiguous()


def narrowed_to_pages(q: torch.Tensor, k: Any, v: Any, select: OfPages, arguments: dict[str, Any]) -> Call:
    """The call over what is read."""
    return _calls(q, k, v, select, arguments)[0]


def _calls(q: torch.Tensor, k: Any, v: Any, select: OfPages, arguments: dict[str, Any]) -> tuple[Call, Rest | None]:
    """The call over what is read, and who adds what stands for the rest."""
    layout, scored = _checked(q, k, v, select, arguments)
    given: dict[str, Any] = {name: arguments.get(name) for name in ("mask", "scale", "sink")}
    call = make_call(q, k, v, layout=layout, **given)
    if call.wants_grad:
        hint = "call it inside torch.no_grad()"
        raise InputError("select", got=f"{select!r}, and gradients", expected="no gradients over pages", hint=hint)
    table = layout.pages.table
    request, lengths = _requests(layout, q, of_tokens=arguments.get("mask") is not None)
    assert layout.summaries is not None
    rows = q.detach().reshape(-1, *q.shape[-2:])
    whole = None if request is None or arguments.get("mask") is None else layout.seqlens_k
    step = _Step(rows, k, v, table, layout.summaries, request, lengths, call.scale, scored, whole)
    return _pages(step, select) if isinstance(select, TopPages) else _tokens(step, select)


# pages ---------------------------------------------------------------------------------------------------------------


def _pages(step: _Step, select: TopPages) -> tuple[Call, Rest | None]:
    pools, by_page, _, by_head = one_head(step.k, step.v)
    means, summaries = select.by == "mean", step.summaries
    ends = (summaries.k_mean, summaries.k_mean) if means else (summaries.least, summaries.largest)
    choice = PageChoice(
        step.rows, *ends, step.table, step.request, step.lengths, means, step.size, select.first, select.local,
        min(select.pages, step.table.shape[1]), by_page, by_head,
    )  # fmt: skip
    tables, tokens, kept, _ = CHOOSE_PAGES(choice)
    near = step.over(pools, tables, tokens)
    if select.far == "drop":
        return near, None

    def rest(run: Run, state: State) -> State:
        o, lse = state
        o, lse = merge((o[:, None], lse[..., None]), run(_of_means(step, kept), None), dtype=o.dtype)
        return o[:, 0], lse[..., 0]

    return near, rest


def _of_means(step: _Step, kept: torch.Tensor) -> Call:
    """The call over one key for each whole page that is not read."""
    group, size, scored = step.group, step.size, step.score
    hidden: Mask = mask(lambda b, h, i, j: torch.logical_not(kept[b, h // group, j]), "pages that are not read")

    def counted(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (s if scored is None else scored.expr) + math.log(size)

    pages = Paged(step.own_table(), (step.lengths + (size - 1)) // size)
    k, v = step.summaries.k_mean[:, None], step.summaries.v_mean[:, None]
    return make_call(
        step.rows[:, None],
        k,
        v,
        layout=pages,
        scale=step.scale,
        mask=hidden,
        score=score(counted, "pages by their means"),
    )


# tokens --------------------------------------------------------------------------------------------------------------


def _tokens(step: _Step, select: SparQ) -> tuple[Call, Rest | None]:
    pools, by_page, by_token, by_head = one_head(step.k, step.v, of_tokens=True)
    rows = step.rows
    dims, parts = PART_QUERIES(Queries(rows, step.heads, select.rank, step.scale))
    assert step.summaries.columns is not None
    prediction = Prediction(
        parts, dims, step.summaries.columns, step.summaries.least,
        step.summaries.largest, step.table, step.request, step.lengths, step.size,
    )  # fmt: skip
    scores, total, lse_of_runs, sample = SCORE_TOKENS(prediction)
    total = total_of(scores, total)
    stands = select.compensate and step.whole is not None
    counted, last = _last_page(step) if stands else (None, None)
    choice = TokenChoice(
        scores, total, lse_of_runs, sample, step.table, step.request, step.lengths,
        step.summaries.v_mean if select.compensate else None, step.size, min(select.keys, total.shape[-1]),
        select.newest, by_page, by_token, by_head, counted,
    )  # fmt: skip
    tables, tokens, read, seen, values = CHOOSE_TOKENS(choice)
    near = step.over(pools, tables, tokens)
    if not select.compensate:
        return near, None

    def rest(run: Run, state: State) -> State:
        o, lse = ADD_REST(TokenRest(*state, read, seen, values, step.lengths, choice.width, last))
        return o, lse

    return near, rest


def _last_page(step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    """(How many tokens each row sees of pages whose means hold no others, int32; the sum of the values of the rest that
    it sees, those of its last page, float32 (rows, num_heads_kv, dim_v))
    """
    assert step.whole is not None
    assert step.request is not None
    request, size = step.request.long(), step.size
    counted = torch.where(step.lengths == step.whole[request], step.lengths, step.lengths // size * size)
    token = counted[:, None] + torch.arange(size, dtype=torch.int32, device=counted.device)
    seen = token < step.lengths[:, None]
    place = (counted // size).clamp(max=max(step.table.shape[1] - 1, 0)).long()
    page = torch.where(seen[:, 0], step.table[request, place], 0)
    values = torch.where(seen[..., None, None], step.v[page.long()].float(), 0.0)
    return counted, values.sum(1)


# what both need ------------------------------------------------------------------------------------------------------


def one_head(*pools: torch.Tensor, of_tokens: bool = False) -> tuple[tuple[torch.Tensor, ...], int, int, int]:
    """(Pools of pages as pools of pages of one head, how many of these a page is from the next, a token from the next,
    and a head from the next): page p and head h are page p * by_page + h * by_head. With `of_tokens` pages of one head
    are of one token each, and a token n of that page lies n * by_token further.
    """
    views = []
    steps: set[tuple[int, int, int]] = set()
    for x in pools:
        pages, size, heads, dim = x.shape
        # what there is one of may have any stride
        of_page, of_token, of_head, _ = (step if n > 1 else 0 for n, step in zip(x.shape, x.stride(), strict=True))
        unit = _divisor(_divisor(of_page, of_head), of_token if of_tokens else 0) or 1
        by_page, by_token, by_head = of_page // unit, of_token // unit if of_tokens else 0, of_head // unit
        steps.add((by_page, by_token, by_head))
        last = (pages - 1) * by_page + (size - 1) * by_token + (heads - 1) * by_head
        shape = (last + 1 if pages else 0, 1 if of_tokens else size, 1, dim)
        views.append(x.as_strided(shape, (unit, x.stride(1), unit, x.stride(3))))
        if last >= 2**31:
            raise InputError(
                "v" if views[1:] else "k",
                got=f"pages of strides {x.stride()}",
                expected="strides of pages and heads that are multiples of one stride, fewer than 2**31 of it in all",
                hint="a pool of PagePool",
            )
    if len(steps) > 1:
        raise InputError(
            "v",
            got=f"pages of strides {pools[1].stride()}, keys of {pools[0].stride()}",
            expected="strides of heads as the keys have them",
            hint="a pool of PagePool, or dense tensors of one order",
        )
    return tuple(views), *steps.pop()


def _divisor(a: int, b: int) -> int:
    """`math.gcd`, also of a compiler's symbols."""
    while b:
        a, b = b, a % b
    return a


def _requests(layout: Paged, q: torch.Tensor, of_tokens: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(The request of each row of queries, None where each has one, how many of its tokens that row sees), int32;
    `of_tokens` where a query does not see later ones.
    """
    seqlens, starts = layout.seqlens_k, layout.cu_seqlens_q
    if starts is None and q.shape[1] == 1:
        return None, seqlens
    if starts is None:
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    row = torch.arange(q.shape[0] if q.ndim == 3 else q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    request = torch.searchsorted(starts[1:], row, right=True, out_int32=True)
    lengths = seqlens[request.long()]
    if of_tokens:
        lengths = (lengths - (starts[1:][request.long()] - 1 - row)).clamp(min=0)
    return request, lengths.to(torch.int32)


def _checked(q: Any, k: Any, v: Any, select: OfPages, arguments: dict[str, Any]) -> tuple[Paged, Score | None]:
    """The layout, and the score formula; raises InputError for what a selection of pages does not go with."""
    layout = arguments.get("layout")
    if not isinstance(layout, Paged) or layout.summaries is None:
        raise InputError(
            "layout",
            got="no summaries of pages",
            expected="tilewise.Paged(block_table, seqlens_k, summaries=...)",
            hint="pages are selected by what tilewise.summarize_pages keeps of them",
        )
    check_flags(**{name: arguments[name] for name in ("deterministic", "batch_invariant") if name in arguments})
    for name in _REFUSED:
        if arguments.get(name):
            raise InputError(name, got=shown(arguments[name]), expected="none over selected pages", hint="leave it out")
    if isinstance(layout.block_table, tuple):
        hint = "rows of one width, for requests of any length"
        raise InputError("layout block_table", got="a pair", expected="a matrix", hint=hint)
    if arguments.get("mask") not in (None, causal):
        hint = "tokens of selected pages have no positions"
        raise InputError("mask", got=shown(arguments["mask"]), expected="None or tilewise.causal", hint=hint)
    check_summaries(k, v, layout.summaries)
    scored = None if arguments.get("score") is None else as_score(arguments["score"])
    symbols = set() if scored is None else {x.value for x in postorder([scored.expr]) if x.op == "sym"}
    if symbols - {"s"}:
        hint = "tokens of selected pages have no positions; tilewise.softcap reads none"
        raise InputError("score", got=shown(scored), expected="a score formula that reads s alone", hint=hint)
    if isinstance(select, SparQ):
        if scored is not None:
            raise InputError(
                "score", got=shown(scored), expected="None", hint="SparQ predicts scores without a formula"
            )
        if layout.summaries.columns is None:
            hint = "KVCache(summaries=True, columns=8), or PageSummaries.of(k_pages, v_pages, columns=8)"
            raise InputError("layout summaries", got="no columns", expected="columns, for SparQ", hint=hint)
        if select.rank > k.shape[3]:
            got, expected = f"{select.rank}", f"at most head_dim={k.shape[3]}"
            raise InputError("SparQ rank", got=got, expected=expected, hint="a number of dimensions")
    return replace(in_int32(layout), share_prefixes=False), scored
