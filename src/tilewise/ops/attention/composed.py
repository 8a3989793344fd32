"""Attention in PyTorch's own operations: the specification, for second derivatives, vmap and forward mode. All scores
are there at once, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewise.core.errors import UnsupportedError
from tilewise.core.tensors import no_derivative
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.reference import ROW as REFERENCE
from tilewise.ops.derivatives import Found, gradients, run_backward

_reference = REFERENCE.function("attention_reference")  # found now: torch.compile traces no import
MOST_SCORES = 2**24  # 128 MiB in float64, of which autograd keeps some ten


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) for tensors that a transform sees; raises UnsupportedError for codes, and for too many scores."""
    if call.scheme is not None or call.skip is not None:
        raise no_derivative("quantize" if call.scheme else "select")
    if call.dropout and torch.compiler.is_compiling():
        raise no_derivative("dropout", "a transform of torch.func inside a compiled region")
    return _composed(call)


def _composed(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    count = _scores(call)
    if count > MOST_SCORES:
        raise UnsupportedError(
            "attention",
            got=f"{count:,} scores under second derivatives, vmap, torch.func or forward mode",
            expected=f"at most {MOST_SCORES:,} (batch x heads x queries x keys), held all at once in float64",
            hint="first derivatives of any size come from .backward() and torch.autograd.grad",
        )
    o, lse = _reference(call)
    return o.to(call.q.dtype), lse.to(torch.float64 if call.q.dtype == torch.float64 else torch.float32)


def _scores(call: Call) -> int:
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return call.batch * call.num_heads_q * call.rows_q * call.rows_k
    lengths = ([b - a for a, b in itertools.pairwise(cu.tolist())] for cu in (call.cu_seqlens_q, call.cu_seqlens_k))
    return call.num_heads_q * int(sum(m * n for m, n in zip(*lengths, strict=True)))


def with_inputs(call: Call, inputs: Sequence[Any]) -> Call:
    """The call with these for q, k, v, sink and what its score captures."""
    q, k, v, sink, *captured = inputs
    score = None if call.score is None else call.score._replace(tensors=tuple(captured))
    return replace(call, q=q, k=k, v=v, sink=sink, score=score)


def differentiable(
    first: Callable[..., Found], call: Call, do: torch.Tensor | None, dlse: torch.Tensor | None, inputs: Sequence[Any]
) -> Found:
    """Gradients of `inputs` (q, k, v, sink, what the score captures), which `first` computes, differentiable again."""

    def by_operations(do: torch.Tensor | None, dlse: torch.Tensor | None, *inputs: Any) -> Found:
        if call.scheme is not None:
            raise no_derivative("quantize", "a second derivative, or batched gradients", second=True)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            views = [x.view_as(x) if x is not None and x.requires_grad else x for x in inputs]
            wanted = [x for x in views if x is not None and x.requires_grad]
            outputs = _composed(with_inputs(call, views))
            found = iter(gradients(outputs, wanted, (do, dlse), create_graph))
        return [next(found) if x is not None and x.requires_grad else None for x in views]

    return run_backward("attention", first, by_operations, [do, dlse, *inputs], 2)
