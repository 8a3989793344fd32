"""Attention as PyTorch sees it: an autograd function in eager mode, a custom operator inside torch.compile.

Both lead to the same two functions, `run_forward` and `run_backward`, which pick the implementation's code by its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewise.core.dispatch import Row
from tilewise.core.tensors import batched
from tilewise.formula.structure import Bound, parse
from tilewise.layouts import LengthBounds, Pages
from tilewise.ops.attention.composed import differentiable
from tilewise.ops.attention.gradient import Gradients, captured_buffers, sink_gradient
from tilewise.ops.attention.problem import Call, check_values, signature_of
from tilewise.ops.attention.table import ROWS
from tilewise.ops.forward_mode import refuse_forward_mode
from tilewise.quant.codes import BY_DTYPE
from tilewise.quant.schemes import parse_scheme

_BY_NAME = {row.name: row for row in ROWS}


def is_empty(call: Call) -> bool:
    """Whether there is no query, or no key."""
    return call.q.numel() == 0 or call.rows_k == 0 or call.v.numel() == 0


def run_forward(row: Row[Call], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse); calls without a query or a key need no kernel."""
    if is_empty(call):
        o, lse = call.new_output().zero_(), call.new_lse().fill_(-torch.inf)
        if call.sink is not None:
            lse.copy_(call.sink.detach().to(lse.dtype).view((-1, 1)).expand_as(lse))
        return o, lse
    result: tuple[torch.Tensor, torch.Tensor] = row.function(row.forward)(call)
    return result


def run_backward(
    row: Row[Call], call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Gradients of every input that takes one."""
    assert row.backward is not None
    if is_empty(call):
        delta = torch.zeros_like(lse) if dlse is None else -dlse
        dq, dk, dv = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
        return Gradients(dq, dk, dv, sink_gradient(call, lse, delta), captured_buffers(call))
    result: Gradients = row.function(row.backward)(call, o, lse, do, dlse)
    return result


# eager -------------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, row: Row[Call], call: Call, q: Any, k: Any, v: Any, sink: Any, *captured: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = run_forward(row, call)
        masking = call.mask.tensors if call.mask is not None else ()
        packing = (call.cu_seqlens_q, call.cu_seqlens_k, call.seed)
        ctx.save_for_backward(o, lse, q, k, v, sink, *captured, *masking, *packing)
        call.q = call.k = call.v = None  # type: ignore[assignment]  # autograd alone keeps what is large
        ctx.row, ctx.call, ctx.strides = row, call, (q.stride(), k.stride(), v.stride())
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        o, lse, q, k, v, sink, *more = ctx.saved_tensors  # raises if one was changed in place since
        call, captured = ctx.call, more[: len(ctx.call.grad_captured)]
        if (q.stride(), k.stride(), v.stride()) != ctx.strides:  # hooks of saved tensors may give others
            signature = signature_of(q, k, v, call.mask, call.score, call.packed, call.pages, call.scales)
            call = replace(call, signature=signature)

        def first(
            do: torch.Tensor | None, dlse: torch.Tensor | None, q: Any, k: Any, v: Any, *_: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, ...]:
            with torch.no_grad():
                do = torch.zeros_like(o) if do is None else do
                grads = run_backward(ctx.row, replace(call, q=q, k=k, v=v), o, lse, _unit_stride(do), dlse)
            return grads.dq, grads.dk, grads.dv, grads.dsink, *grads.captured

        if not torch.is_grad_enabled() and not batched((do, dlse)):
            return None, None, *first(do, dlse, q, k, v)
        return None, None, *differentiable(first, call, do, dlse, (q, k, v, sink, *captured))


def _unit_stride(do: torch.Tensor) -> torch.Tensor:
    do = do.resolve_neg()  # kernels read memory as it lies
    return do if do.stride(-1) == 1 or do.shape[-1] <= 1 else do.contiguous()


def eager(row: Row[Call], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse), connected to autograd where an input takes a gradient."""
    if not call.wants_grad:
        return run_forward(row, call)
    captured = call.score.tensors if call.score is not None else ()
    result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(
        row, call, call.q, call.k, call.v, call.sink, *captured
    )  # type: ignore[no-untyped-call]
    return result


# compiled ----------------------------------------------------------------------------------------------------------

Tensors = list[torch.Tensor]


def _bound(text: str, tensors: Sequence[torch.Tensor], numbers: dict[str, Iterator[Any]]) -> Bound | None:
    """A formula with as many of the numbers of each kind as it has."""
    if not text:
        return None
    kinds = parse(text).number_kinds
    return Bound(text, tuple(tensors), tuple(next(numbers[kind]) for kind in kinds))


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    mask_text: str,
    mask_tensors: Tensors,
    score_text: str,
    score_tensors: Tensors,
    floats: list[float],
    integers: list[int],
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    pages: Tensors,
    seed: torch.Tensor | None,
    scale: float,
    dropout: float,
    flags: str,
    scheme: str,
    skip: torch.Tensor | None,
    impl: str,
    *,
    symbolic: bool = False,
) -> Call:
    wants, deterministic, grad_sink, batch_invariant, share_prefixes, *grad_captured = (c == "1" for c in flags)
    numbers = {"float": iter(floats), "int": iter(integers[:-3])}
    rows_q, rows_k, same = integers[-3:]
    bounds = LengthBounds(None if rows_q < 0 else rows_q, None if rows_k < 0 else rows_k, bool(same))
    mask, score = _bound(mask_text, mask_tensors, numbers), _bound(score_text, score_tensors, numbers)
    scales = None
    if pages and k.dtype in BY_DTYPE:  # theirs are the last two, or of keys by channel the last five
        count = 2 if len(pages) < 7 else 5
        pages, scales = pages[:-count], tuple(pages[-count:])
    paged = Pages(pages[0], pages[2] if len(pages) > 2 else None, pages[1]) if pages else None
    return Call(
        q,
        k,
        v,
        sink,
        mask,
        score,
        cu_seqlens_q,
        cu_seqlens_k,
        scale,
        dropout,
        seed,
        deterministic,
        wants,
        grad_sink,
        tuple(grad_captured),
        None if symbolic else signature_of(q, k, v, mask, score, cu_seqlens_q is not None, paged, scales),
        paged,
        batch_invariant,
        scales=scales,
        share_prefixes=share_prefixes,
        scheme=parse_scheme(scheme) if scheme else None,
        bounds=bounds,
        skip=skip,
    )


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, str mask_text, Tensor[] mask_tensors, str score_text, "
    "Tensor[] score_tensors, float[] floats, SymInt[] integers, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor[] pages, Tensor? seed, float scale, float dropout, str flags, str scheme, Tensor? skip, str impl"
)


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(*args)
    check_values(call)  # nothing had a value when torch.compile saw the arguments
    o, lse = run_forward(_BY_NAME[args[-1]], call)
    return o.contiguous(), lse.contiguous()


def _backward(do: torch.Tensor, dlse: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor, *args: Any) -> Tensors:
    call = _call(*args)
    grads = run_backward(_BY_NAME[args[-1]], call, o, lse, _unit_stride(do), dlse)
    found = [grads.dq, grads.dk, grads.dv, grads.dsink, *grads.captured]
    return [g.contiguous() for g in found if g is not None]


attention_forward = torch.library.custom_op(
    "tilewise::attention_forward", _forward, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
attention_backward = torch.library.custom_op(
    "tilewise::attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dlse, Tensor o, Tensor lse, {_SCHEMA}) -> Tensor[]",
)


@attention_forward.register_fake
def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(*args, symbolic=True)
    return call.new_output(), call.new_lse()


@attention_backward.register_fake
def _backward_fake(do: torch.Tensor, dlse: Any, o: torch.Tensor, lse: torch.Tensor, *args: Any) -> Tensors:
    call = _call(*args, symbolic=True)
    shapes = [call.q, call.k, call.v, *([call.sink] if call.grad_sink and call.sink is not None else [])]
    if call.score is not None:
        shapes += [t for t, wanted in zip(call.score.tensors, call.grad_captured, strict=True) if wanted]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in shapes]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sink, _, mask_tensors, _, score_tensors, floats, integers, cu_q, cu_k, pages, seed, *_ = inputs
    ctx.save_for_backward(q, k, v, sink, cu_q, cu_k, seed, *output, *mask_tensors, *score_tensors, *pages)
    ctx.plain = [x for x in inputs if isinstance(x, (str, float))]
    ctx.numbers = (floats, integers)
    ctx.num_mask, ctx.num_score = len(mask_tensors), len(score_tensors)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, sink, cu_q, cu_k, seed, o, lse, *captured = ctx.saved_tensors
    mask_tensors, captured = captured[: ctx.num_mask], captured[ctx.num_mask :]
    score_tensors, pages = captured[: ctx.num_score], captured[ctx.num_score :]
    mask_text, score_text, scale, dropout, flags, scheme, impl = ctx.plain
    o, lse = o.detach(), lse.detach()

    def arguments(inputs: Sequence[Any]) -> tuple[Any, ...]:
        q, k, v, sink, *score_tensors = inputs
        return (
            q, k, v, sink, mask_text, mask_tensors, score_text, score_tensors, *ctx.numbers, cu_q, cu_k, pages, seed,
            scale, dropout, flags, scheme, None, impl,
        )  # fmt: skip

    def first(do: torch.Tensor | None, dlse: torch.Tensor | None, *inputs: Any) -> list[torch.Tensor | None]:
        do = torch.zeros_like(o) if do is None else do
        dq, dk, dv, *rest = attention_backward(do, dlse, o, lse, *arguments(inputs))
        dsink = rest.pop(0) if flags[2] == "1" else None
        return [dq, dk, dv, dsink, *(rest.pop(0) if wanted == "1" else None for wanted in flags[5:])]

    inputs = (q, k, v, sink, *score_tensors)
    if torch.is_grad_enabled() or batched((do, dlse)):
        dq, dk, dv, dsink, *dscore = differentiable(first, _call(*arguments(inputs), symbolic=True), do, dlse, inputs)
    else:
        dq, dk, dv, dsink, *dscore = first(do, dlse, *inputs)
    none_mask = [None] * len(mask_tensors)
    # PyTorch takes an empty list of numbers for a list of no tensors and wants one back
    no_numbers: list[list[Any] | None] = [None if numbers else [] for numbers in ctx.numbers]
    formulas = (None, none_mask, None, dscore, *no_numbers)
    return dq, dk, dv, dsink, *formulas, None, None, [None] * len(pages), None, None, None, None, None, None, None


attention_forward.register_autograd(_autograd, setup_context=_setup_context)
refuse_forward_mode("attention", attention_forward, attention_backward)


def operator_arguments(row: Row[Call], call: Call) -> tuple[Any, ...]:
    """What `tilewise::attention_forward` takes for a call."""
    mask, score = call.mask or Bound("", (), ()), call.score or Bound("", (), ())
    flags = (
        call.wants_grad, call.deterministic, call.grad_sink, call.batch_invariant, call.share_prefixes,
        *call.grad_captured,
    )  # fmt: skip
    numbers = (*mask.numbers, *score.numbers)
    integers = [n for n in numbers if isinstance(n, (int, torch.SymInt))]  # apart: a float has 53 bits
    floats = [n for n in numbers if not isinstance(n, (int, torch.SymInt))]
    rows_q, rows_k, same = call.bounds
    integers += [-1 if rows_q is None else rows_q, -1 if rows_k is None else rows_k, int(same)]
    pages = () if call.pages is None else (call.pages.table, call.pages.seqlens, call.pages.first)
    return (
        call.q, call.k, call.v, call.sink, mask.text, list(mask.tensors), score.text, list(score.tensors),
        floats, integers, call.cu_seqlens_q, call.cu_seqlens_k,
        [x for x in (*pages, *(call.scales or ())) if x is not None], call.seed, call.scale, call.dropout,
        "".join("1" if flag else "0" for flag in flags), call.scheme.text if call.scheme else "", call.skip, row.name,
    )  # fmt: skip


def compiled(row: Row[Call], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) through the custom operator, which torch.compile keeps whole."""
    result: tuple[torch.Tensor, torch.Tensor] = attention_forward(*operator_arguments(row, call))
    return result
