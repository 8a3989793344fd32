"""Gated linear units in PyTorch, in float32 (float64 for float64)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from tilewise.ops.glu.problem import Call, Tensors, halves_of

aten = torch.ops.aten


def _active(call: Call, gate: torch.Tensor) -> torch.Tensor:
    if call.activation == "silu":
        return F.silu(gate)
    if call.activation == "relu":
        return F.relu(gate)
    return F.gelu(gate, approximate=_approximate(call))


def _into_gate(call: Call, gradient: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """Fills `out` with the gradient of the activation's input; by PyTorch's own functions, since autograd does not look
    into a custom operator.
    """
    if call.activation == "silu":
        aten.silu_backward.grad_input(gradient, gate, grad_input=out)
    elif call.activation == "relu":
        aten.threshold_backward.grad_input(gradient, gate, 0, grad_input=out)
    else:
        aten.gelu_backward.grad_input(gradient, gate, approximate=_approximate(call), grad_input=out)


def _approximate(call: Call) -> str:
    return "tanh" if call.activation == "gelu_tanh" else "none"


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    gate, up = (_wide(x) for x in call.halves)
    torch.mul(_active(call, gate), up, out=results["o"])


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradients that are wanted."""
    gate, up = (_wide(x) for x in call.halves)
    do = _wide(incoming[0])
    dgate, dup = into_halves(call, gradients)
    if dgate is not None:
        _into_gate(call, do * up, gate, dgate)
    if dup is not None:
        torch.mul(do, _active(call, gate), out=dup)


def into_halves(call: Call, gradients: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the gradients of gate and of up go."""
    if call.up is None:
        return halves_of(gradients["gate"], None)
    return gradients.get("gate"), gradients.get("up")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
