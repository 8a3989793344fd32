"""Attention: one operation, its arguments, and who computes it.

A call is checked and collected (`problem`), matched to an implementation (`table`), and run through PyTorch's autograd
or as a custom operator (`torch_op`), or planned once for several (`planned`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.tensors import transformed
from tilewise.formula.formula import Mask, Score
from tilewise.layouts import Dense, Packed, Paged
from tilewise.ops.attention import composed
from tilewise.ops.attention.choice import Selected
from tilewise.ops.attention.lengths import reads
from tilewise.ops.attention.paged_rows import PagedRows, rows_of_call
from tilewise.ops.attention.paged_rows import reads as reads_of_pages
from tilewise.ops.attention.planned import AttentionPlan, refuse_gradients
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.selected import attend, narrowed
from tilewise.ops.attention.selected_pages import attend_pages, narrowed_to_pages
from tilewise.ops.attention.sharing import remark
from tilewise.ops.attention.table import ROWS, choose, named
from tilewise.ops.attention.torch_op import compiled, eager
from tilewise.quant import ByChannel, Encoded, Quantized
from tilewise.quant.schemes import Scheme
from tilewise.schedule.page_selection import SparQ, TopPages
from tilewise.schedule.selection import Prediction, Select

MaskLike = Mask | Callable[..., Any] | None
ScoreLike = Score | Callable[..., Any] | None
SelectLike = Select | Selected | Prediction | Mask | TopPages | SparQ | None


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor | Encoded | ByChannel,
    v: torch.Tensor | Encoded,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: torch.Tensor | None = None,
    layout: Dense | Packed | Paged | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    quantize: Scheme | Quantized | None = None,
    select: SelectLike = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention`, with the log-sum-exp of each row's scores.

    Returns:
        o as `attention` gives it, and lse: float32 (float64 for float64 input), natural logarithm, (batch,
        num_heads_q, seqlen_q), packed (num_heads_q, total_q); -inf for a row that sees no key. Both are differentiable.
    """
    arguments: dict[str, Any] = {
        "mask": mask, "score": score, "sink": sink, "layout": layout, "scale": scale, "dropout": dropout, "seed": seed,
        "deterministic": deterministic, "batch_invariant": batch_invariant, "quantize": quantize,
    }  # fmt: skip
    rows = _in_rows(q, k, v, select, arguments)
    if rows is not None:
        q, k, v, arguments["layout"] = rows.q, rows.k, rows.v, rows.layout
    if select is None:
        found = _run(make_call(q, k, v, **arguments), impl)
    elif isinstance(select, (TopPages, SparQ)):
        found = attend_pages(_run, q, k, v, select, impl, **arguments)
    else:
        found = attend(_run, q, k, v, select, impl, **arguments)
    return found if rows is None else rows.results(*found)


def _in_rows(q: Any, k: Any, v: Any, select: SelectLike, arguments: dict[str, Any]) -> PagedRows | None:
    """The rows of keys in pages, for what has no kernel over pages."""
    layout = arguments.get("layout")
    if not isinstance(layout, Paged) or isinstance(select, (TopPages, SparQ)):
        return None
    if select is None and arguments.get("quantize") is None:
        return None
    rows: PagedRows = rows_of_call(q, k, v, layout)
    return rows


def _run(call: Call, impl: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    row = choose(call, impl)
    if call.signature is not None:
        return eager(row, call)
    return composed.forward(call) if transformed(call.tensors) else compiled(row, call)


def attention(
    q: torch.Tensor,
    k: torch.Tensor | Encoded | ByChannel,
    v: torch.Tensor | Encoded,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: torch.Tensor | None = None,
    layout: Dense | Packed | Paged | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    quantize: Scheme | Quantized | None = None,
    select: SelectLike = None,
    impl: str | None = None,
) -> torch.Tensor:
    """softmax(score(scale * q k^T) where mask) v, forward and backward, without a seqlen_q x seqlen_k tensor.

    Method: FlashAttention (Dao et al. 2022), FlashAttention-2 (Dao 2023); formulas as in FlexAttention (Dong et al.
    2024).

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16, bfloat16 or float32 (float64 on the CPU); unit stride in
            head_dim.
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads_kv divides num_heads_q, and query head h reads head
            h // (num_heads_q // num_heads_kv).
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        mask: which pairs may meet: a Mask (`tilewise.causal & tilewise.window(1024)`) or a function (b, h, i, j) ->
            bool. Position i is the query's place on the key axis: the last query stands at the last key.
        score: what becomes of a scaled score: a Score (`tilewise.softcap(30.0)`) or a function (s, b, h, i, j) ->
            float. Tensors that it captures take gradients.
        sink: (num_heads_q,) logits that join the softmax's denominator and carry no value; differentiable.
        layout: `tilewise.Packed(cu_seqlens_q, cu_seqlens_k)` for tensors (total, heads, dim);
            `tilewise.Paged(block_table, seqlens_k)` for k and v in pages (num_pages, page_size, num_heads_kv, dim),
            which may both be `tilewise.quant.Encoded`, of any dtype of q, or k a `tilewise.quant.ByChannel` beside it;
            None is dense.
        scale: factor of q k^T; default head_dim ** -0.5.
        dropout: probability in [0, 1) with which a weight is dropped; the rest are scaled by 1 / (1 - dropout).
        seed: integer, or int64 tensor of one element on the device of q, that fixes the dropout mask; drawn from
            PyTorch's generator when None.
        deterministic: refuse anything whose bits could differ between runs.
        batch_invariant: give a request the same bits whatever shares its batch, wherever in the batch it stands, and
            whatever the page size; on a GPU, over pages alone. Keys are then divided at multiples of 2,048 and nowhere
            else, and tiles are of four queries, so that many queries take longer. Partial results take memory that
            grows with the tokens that one request's pages can hold: `block_table` should be no wider than it must.
        quantize: a scheme (`tilewise.Sage2()`, `tilewise.FP8(...)`): q, k and v become codes of few bits, which are
            multiplied (Zhang et al., "SageAttention2", 2024; Shah et al., "FlashAttention-3", 2024), in any dtype but
            float64, under any mask, score and sink. Weights become codes, too, relative to the largest of their row so
            far, or of those in one tile; without a gradient to come, implementations may sum these, and lse has their
            rounding. Gradients go straight through the rounding: those of exact attention over the numbers that codes
            stand for. Keys in pages are first copied into rows of packed sequences: worth it for prompts, not for
            single queries. Or codes that `tilewise.quantize_qkv` made of q, k and v: to use them again, or with
            `rope=`, which q and k that are given here then have not met; without gradients.
        select: which tiles of keys are computed: a `tilewise.Select` or one of its parts (`tilewise.Sparge(...)`, a
            Mask), or what `tilewise.select_tiles` has found. A mask says which pairs may meet, a selection which of
            those matter, by tiles; `far=` of a Select says what stands for the rest. Keys in pages are copied, too.
            Gradients are those of what is computed: which tiles are taken is a constant. Over pages
            `tilewise.TopPages(...)` or `tilewise.SparQ(...)`, with `layout=tilewise.Paged(..., summaries=...)`: which
            pages, or tokens, a query reads; without gradients, and no formula that looks at positions but `causal`.
        impl: name of an implementation (`tilewise.why` lists them); None picks the first that can.

    Returns:
        (batch, seqlen_q, num_heads_q, head_dim_v), or (total_q, num_heads_q, head_dim_v) when packed; a query that
        sees no key, or whose every visible score is -inf, gives 0.

    Differentiable. Second derivatives, `torch.func` (vmap, grad, jvp, ...), batched gradients and forward mode go
    through PyTorch's operations, in float64 and with all scores at once: some 1.3 GB at the most, which is 2**24 scores
    (batch x heads x queries x keys). More, or `quantize=`, is an UnsupportedError then. On a GPU float32 products of
    first derivatives follow `torch.set_float32_matmul_precision`.

    Raises:
        InputError, FormulaError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
    """
    return attention_with_lse(
        q, k, v, mask=mask, score=score, sink=sink, layout=layout, scale=scale, dropout=dropout, seed=seed,
        deterministic=deterministic, batch_invariant=batch_invariant, quantize=quantize, select=select, impl=impl,
    )[0]  # fmt: skip


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: torch.Tensor | None = None,
    layout: Dense | Packed | Paged | None = None,
    scale: float | None = None,
    batch_invariant: bool = False,
    impl: str | None = None,
) -> AttentionPlan:
    """Plan attention once, for all layers of a model: `plan(q, k, v, ...).run(q, k, v)` is `attention(q, k, v, ...)`.

    What implementations of the paged layout work out on the GPU for a batch's lengths (who does which tile) is then
    made once, and kept with the memory that they need: a run launches one kernel, or where prefixes may be shared two,
    and allocates its results alone. Where there is nothing to plan, a run is a plain call. Not differentiable. In a
    region of `torch.compile` runs plan anew.

    Args:
        q, k, v, sink: examples: runs take tensors of the same shapes, strides, dtypes and device. Keys that do not
            lie there yet may be written between plan and run.
        mask, score, layout, scale, batch_invariant: as `attention` takes them, and fixed. What the layout's tensors
            hold may change in place: pages at any time, unless prefixes are shared; after lengths have changed, and
            then pages too, call `update` or plan anew. Both may be captured in a CUDA graph.
        impl: name of an implementation; None picks the first that can.

    Raises:
        InputError, FormulaError: an argument is wrong.
        UnsupportedError: as `attention` raises it, or a gradient is wanted.
    """
    call = make_call(
        q, k, v, mask=mask, score=score, sink=sink, layout=layout, scale=scale, batch_invariant=batch_invariant
    )
    refuse_gradients(call.wants_grad)
    return AttentionPlan(call, choose(call, impl))


_ARGUMENTS = tuple(attention.__kwdefaults__ or ())


@dataclass(frozen=True)
class Explanation:
    """Which implementation a call runs on, and why the others do not: rows of (name, summary, verdict).

    `waits` says what each call reads on the host before it launches, which waits for the GPU, and what spares it.
    """

    chosen: str | None
    rows: tuple[tuple[str, str, str], ...]
    waits: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        verdicts = [
            f"{'>' if name == self.chosen else ' '} {name:<{width}}  {verdict}" for name, _, verdict in self.rows
        ]
        return "\n".join([*verdicts, *(f"each call waits for the GPU and reads {what}" for what in self.waits)])


def why(
    q: torch.Tensor,
    k: torch.Tensor | Encoded | ByChannel,
    v: torch.Tensor | Encoded,
    *,
    impl: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Which implementation `attention` would run for these arguments (the same as its own), and why not the others.

    Raises InputError or FormulaError as `attention` does, and InputError for an `impl` that does not exist.
    """
    unknown = [name for name in arguments if name not in _ARGUMENTS]
    if unknown:
        expected = f"arguments of tilewise.attention: {', '.join(_ARGUMENTS)}"
        raise InputError(f"why {unknown[0]}", got=shown(arguments[unknown[0]]), expected=expected, hint="by keyword")
    select = arguments.pop("select", None)
    in_rows, layout = _in_rows(q, k, v, select, arguments), arguments.get("layout")
    if in_rows is not None:
        q, k, v, arguments["layout"] = in_rows.q, in_rows.k, in_rows.v, in_rows.layout
    if isinstance(select, (TopPages, SparQ)):
        call = narrowed_to_pages(q, k, v, select, arguments)
    else:
        call = make_call(q, k, v, **arguments) if select is None else narrowed(q, k, v, select, arguments)
    if impl is not None:
        named(impl)
    chosen = None
    rows = []
    for row in ROWS:
        unmet = row.first_unmet(call)
        deferred = row.deferred(call) if unmet is None and impl is None else None
        wanted = row.name == impl if impl is not None else deferred is None
        if unmet is None and wanted and chosen is None:
            chosen, verdict = row.name, f"chosen: {row.summary}{remark(call, row.name)}"
        elif unmet is not None:
            verdict = unmet
        elif deferred is not None:
            verdict = f"can run this, but {deferred}"
        elif impl is not None:
            verdict = f"can run this, but impl={impl!r} was named"
        else:
            verdict = f"can run this; {chosen} comes first"
        rows.append((row.name, row.summary, verdict))
    read = [*(reads_of_pages(layout) if in_rows is not None and isinstance(layout, Paged) else []), *reads(call)]
    return Explanation(chosen, tuple(rows), tuple(read) if call.q.is_cuda else ())
