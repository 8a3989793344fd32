"""Attention: one operation, its arguments, and who computes it.

A call is checked and collected (`problem`), matched to an implementation (`table`), and run through PyTorch's autograd
or as a custom operator (`torch_op`), or planned once for several (`planned`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tilewise.core.flags import check_flags
from tilewise.core.keywords import catches_unknown, refuse_unknown
from tilewise.core.tensors import transformed
from tilewise.formula.formula import Mask, Score
from tilewise.layouts import Dense, Packed, Paged
from tilewise.ops.attention import composed
from tilewise.ops.attention.choice import Selected
from tilewise.ops.attention.explanation import Explanation as Explanation
from tilewise.ops.attention.explanation import not_preferred, of_another_device, refused
from tilewise.ops.attention.lengths import reads
from tilewise.ops.attention.paged_rows import PagedRows, rows_of_call
from tilewise.ops.attention.paged_rows import reads as reads_of_pages
from tilewise.ops.attention.planned import AttentionPlan, check_kept, refuse_gradients
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


@catches_unknown
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
    **unknown: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, with the log-sum-exp of each query's scores: what `tilewise.merge` needs.

    Args:
        q, k, v: as `attention` takes them.
        mask, score, sink, layout, scale, dropout, seed, deterministic, batch_invariant, quantize, select, impl: as
            `attention` takes them.

    Returns:
        (o, lse). o is the result of `attention`. lse is the natural logarithm of the softmax's denominator: float32
        (float64 for float64 input), (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q); -inf for a query
        that sees no key. Both are differentiable.

    Raises:
        InputError, FormulaError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Example:
        >>> o, lse = tw.attention_with_lse(q, k, v, mask=tw.causal)
        >>> lse.shape
        torch.Size([2, 4, 100])
    """
    if unknown:
        refuse_unknown("attention_with_lse", unknown)
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


@catches_unknown
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
    **unknown: NoReturn,
) -> torch.Tensor:
    """Attention, forward and backward: softmax(score(scale * q k^T) where mask) v.

    The scores are computed tile by tile: no tensor of seqlen_q x seqlen_k is made. Differentiable in q, k, v, sink and
    in the tensors that a score captures.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16, bfloat16 or float32 (float64 on the CPU); unit stride in
            head_dim.
        k: (batch, seqlen_k, num_heads_kv, head_dim), dtype and device of q. num_heads_kv divides num_heads_q: query
            head h reads head h // (num_heads_q // num_heads_kv).
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), likewise.
        mask: which pairs of query and key are visible: a Mask (`tilewise.causal & tilewise.window(1024)`) or a function
            (b, h, i, j) -> bool. j is the key's index, i the query's index + seqlen_k - seqlen_q: the last query has
            the position of the last key. None is all pairs.
        score: a function of the scaled score s: a Score (`tilewise.softcap(30.0)`) or a function
            (s, b, h, i, j) -> float. Tensors that it captures get gradients. None leaves s as it is.
        sink: (num_heads_q,), one logit for each query head that joins the softmax's denominator and has no value;
            differentiable. None is no sink.
        layout: `tilewise.Packed(cu_seqlens_q, cu_seqlens_k)` for sequences of different lengths in tensors
            (total, heads, dim); `tilewise.Paged(block_table, seqlens_k)` for a KV cache, with k and v in pages
            (num_pages, page_size, num_heads_kv, dim). Pages may be quantized: both `tilewise.quant.Encoded`, or k a
            `tilewise.quant.ByChannel` beside an Encoded v. None is dense.
        scale: factor of q k^T; None is head_dim ** -0.5.
        dropout: probability, in [0, 1), that a weight is set to 0; the others are divided by 1 - dropout.
        seed: fixes the dropout: an integer, or an int64 tensor of one element on the device of q. None draws one from
            PyTorch's generator.
        deterministic: if True, use only implementations that give the same bits in every run.
        batch_invariant: if True, a request's bits depend neither on the other requests of its batch, nor on its place
            among them, nor on the page size; on a GPU only for `Paged` layouts. Keys are then split at multiples of
            2,048, and tiles have four queries, which is slower for many queries. Partial results take memory in
            proportion to the width of `block_table`.
        quantize: a scheme (`tilewise.Sage2()`, `tilewise.FP8(...)`): q, k and v are quantized in the call, in any
            dtype but float64, under any mask, score and sink. Gradients pass straight through the rounding; they are
            those of exact attention over the dequantized tensors. Weights are quantized too, relative to their row's
            running maximum or to the tile's maximum; without gradients, lse may have their rounding. Keys in pages are
            copied into packed sequences first, which pays for prompts, not for decoding. Or the result of
            `tilewise.quantize_qkv` for these q, k and v, which several calls can use, without gradients. If that was
            made with `rope=`, give q and k before rotation.
        select: which tiles of keys are computed (block-sparse attention): a `tilewise.Select`, one of its parts
            (`tilewise.Sparge(...)`, a Mask), or the result of `tilewise.select_tiles`. `far=` of a Select says what
            replaces the other tiles. The selection is a constant in the backward. Keys in pages are copied into packed
            sequences first. For decoding over pages: `tilewise.TopPages(...)` or `tilewise.SparQ(...)`, with
            `layout=tilewise.Paged(..., summaries=...)`, no gradients, and no mask or score of positions but `causal`.
        impl: name of an implementation, for example "reference"; `tilewise.why` lists them. None takes the first one
            that can run the call.

    Returns:
        o: (batch, seqlen_q, num_heads_q, head_dim_v), packed (total_q, num_heads_q, head_dim_v), dtype of q. A query
        that sees no key, or whose visible scores are all -inf, gives 0. `attention_with_lse` returns the log-sum-exp
        as well.

    Raises:
        InputError, FormulaError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call. That includes second
            derivatives, `torch.func` and forward mode of more than 2**24 scores (batch x heads x queries x keys) or of
            `quantize=`: these run in PyTorch's operations, in float64, with all scores at once (up to 1.3 GB).

    On a GPU, float32 products of first derivatives follow `torch.set_float32_matmul_precision`.

    Source: Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024;
    Dong et al., "FlexAttention", 2024 (formulas); Zhang et al., "SageAttention2", 2024 (quantized attention).

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal & tw.window(64), score=tw.softcap(30.0))
        >>> o.shape
        torch.Size([2, 100, 4, 16])
    """
    if unknown:
        refuse_unknown("attention", unknown)
    return attention_with_lse(
        q, k, v, mask=mask, score=score, sink=sink, layout=layout, scale=scale, dropout=dropout, seed=seed,
        deterministic=deterministic, batch_invariant=batch_invariant, quantize=quantize, select=select, impl=impl,
    )[0]  # fmt: skip


@catches_unknown
def plan(
    q: torch.Tensor,
    k: torch.Tensor | Encoded | ByChannel,
    v: torch.Tensor | Encoded,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: torch.Tensor | None = None,
    layout: Dense | Packed | Paged | None = None,
    scale: float | None = None,
    batch_invariant: bool = False,
    impl: str | None = None,
    **unknown: NoReturn,
) -> AttentionPlan:
    """Plan attention once for all layers of a model: `plan(q, k, v, ...).run(q, k, v)` is `attention(q, k, v, ...)`.

    For a `Paged` layout on a GPU, the division of work among programs follows from the batch's lengths: it is computed
    once, and kept with the memory that it needs. A run of `triton_paged` or `hopper_decode` launches one kernel, or
    two where prefixes may be shared, and allocates only its results. A run of any other implementation (`hopper_mixed`,
    those of the CPU) is a plain call. Plans are not differentiable. In a region of `torch.compile` each run plans anew.

    Args:
        q, k, v, sink: examples: runs take tensors of the same shapes, strides, dtypes and device. The keys may be
            written after the plan is made.
        mask, score, layout, scale, batch_invariant: as `attention` takes them, and fixed. The layout's tensors are
            int32 (int64 raises InputError), since runs and updates read them again. They may change in place, also in a
            CUDA graph: pages at any time, unless prefixes are shared; after a change of lengths, or of pages of shared
            prefixes, call `update` or plan anew.
        impl: name of an implementation; None takes the first one that can run the call.

    Returns:
        An `AttentionPlan`.

    Raises:
        InputError, FormulaError: an argument is wrong.
        UnsupportedError: as `attention` raises it, or a tensor requires a gradient.

    Source: Ye et al., "FlashInfer", 2025.

    Example:
        >>> planned = tw.plan(q, k, v, mask=tw.causal)
        >>> layers = [planned.run(q, k, v) for _ in range(2)]
    """
    if unknown:
        refuse_unknown("plan", unknown)
    if isinstance(layout, (Packed, Paged)):
        check_kept(layout)
    call = make_call(
        q, k, v, mask=mask, score=score, sink=sink, layout=layout, scale=scale, batch_invariant=batch_invariant
    )
    refuse_gradients(call.wants_grad)
    return AttentionPlan(call, choose(call, impl))


_ARGUMENTS = tuple(attention.__kwdefaults__ or ())


def why(
    q: torch.Tensor,
    k: torch.Tensor | Encoded | ByChannel,
    v: torch.Tensor | Encoded,
    *,
    impl: str | None = None,
    all: bool = False,
    **arguments: Any,
) -> Explanation:
    """Which implementation `attention` would run for these arguments, and why not the others. Nothing is computed.

    Args:
        q, k, v: as `attention` takes them.
        impl: as `attention` takes it.
        all: if True, the text lists every implementation. Otherwise it has the one that runs, those preferred to it
            that cannot run the call, those that could run it as well, and a count of the rest.
        arguments: any other argument of `attention`, by name.

    Returns:
        An `Explanation`; print it.

    Raises:
        InputError, FormulaError: as `attention` raises them; also for an unknown argument or implementation.

    Example:
        >>> found = tw.why(q, k, v, mask=tw.causal, score=tw.softcap(30.0))
        >>> found.chosen
        'cpu_tiled'
    """
    check_flags(all=all)
    unknown = {name: x for name, x in arguments.items() if name not in _ARGUMENTS}
    if unknown:
        refuse_unknown("why", unknown, ("q", "k", "v", *_ARGUMENTS, "all"))
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
            verdict = refused(unmet)
        elif deferred is not None:
            verdict = not_preferred(row, deferred)
        elif impl is not None:
            verdict = f"can run this call, but impl={impl!r} was named"
        else:
            verdict = f"can run this call; {chosen} comes first"
        rows.append((row.name, row.summary, verdict))
    read = [*(reads_of_pages(layout) if in_rows is not None and isinstance(layout, Paged) else []), *reads(call)]
    elsewhere = frozenset(row.name for row in ROWS if of_another_device(row, call))
    waits, device = tuple(read) if call.q.is_cuda else (), call.q.device.type
    return Explanation(chosen, tuple(rows), waits, elsewhere, device, impl, all)
