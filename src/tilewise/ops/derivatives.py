"""Derivatives of derivatives: a backward by kernels, whose own derivative goes through PyTorch's operations.

What a kernel does autograd cannot look into. An operation's formula, written in PyTorch's operations (`composed`), says
the same again: autograd differentiates it as often as it is asked to, and vmap and forward mode pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.core.tensors import batched, no_derivative

Found = Sequence[torch.Tensor | None]
Backward = Callable[..., Found]  # gradients, from what came in and what was kept, None where there is none


def gradients(
    outputs: Found, inputs: Sequence[torch.Tensor], incoming: Found, create_graph: bool, zeros: bool = True
) -> Found:
    """Gradients of `inputs` by autograd; 0, or None, where an input has no part in the outputs."""
    pairs = [(o, g) for o, g in zip(outputs, incoming, strict=False) if o is not None and g is not None]
    pairs = [(o, g.to(o.dtype)) for o, g in pairs if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) if zeros else None for x in inputs]
    return torch.autograd.grad(
        [o for o, _ in pairs],
        list(inputs),
        [g for _, g in pairs],
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=zeros,
    )


def run_backward(operation: str, first: Backward, composed: Backward | None, tensors: Found, count: int) -> Found:
    """first(*tensors), of which the first `count` came in and the others were kept.

    Where its own derivative may be asked for (create_graph=True) that is the derivative of `composed`, which also takes
    the place of `first` where what came in is batched. Without a `composed`, or where it raises UnsupportedError, these
    are errors.
    """
    tensors = [*(x if x is None else x.resolve_neg() for x in tensors[:count]), *tensors[count:]]
    if batched(tensors[:count]):
        if composed is None:
            raise no_derivative(operation, "batched gradients")
        return composed(*tensors)
    if not torch.is_grad_enabled():
        return first(*tensors)
    found: Found = _Twice.apply(operation, first, composed, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Twice(torch.autograd.Function):
    """A backward that is connected to all that it is made of: to what came in, and to what was kept."""

    @staticmethod
    def forward(
        ctx: Any, operation: str, first: Backward, composed: Backward | None, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.save_for_backward(*tensors)
        ctx.operation, ctx.composed = operation, composed
        ctx.set_materialize_grads(False)
        return tuple(first(*tensors))

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.composed is None:
            raise no_derivative(ctx.operation, "a second derivative", second=True)
        create_graph = torch.is_grad_enabled()
        wanted = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            # views of their own: of what one is made of another, no gradient goes through both
            tensors = [x.view_as(x) if yes else x for x, yes in zip(ctx.saved_tensors, wanted, strict=True)]
            outputs = ctx.composed(*tensors)
            inputs = [x for x, yes in zip(tensors, wanted, strict=True) if yes]
            found = iter(gradients(outputs, inputs, incoming, create_graph, zeros=False))
        return None, None, None, *(next(found) if yes else None for yes in wanted)
