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


def _into_gate(call: Call, gradient: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The gradient of the activation's input; by PyTorch's own functions, since autograd sees no custom operator's
    inside.
    """
    found: torch.Tensor
    if call.activation == "silu":
        found = aten.silu_backward(gradient, gate)
    elif call.activation == "relu":
        found = aten.threshold_backward(gradient, gate, 0)
    else:
        found = aten.gelu_backward(gradient, gate, approximate=_approximate(call))
    return found


def _approximate(call: Call) -> str:
    return "tanh" if call.activation == "gelu_tanh" else "none"


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    gate, up = (_wide(x) for x in call.halves)
    results["o"].copy_(_active(call, gate) * up)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradients that are wanted."""
    gate, up = (_wide(x) for x in call.halves)
    do = _wide(incoming[0])
    dgate, dup = into_halves(call, gradients)
    if dgate is not None:
        dgate.copy_(_into_gate(call, do * up, gate))
    if dup is not None:
        dup.copy_(do * _active(call, gate))


def into_halves(call: Call, gradients: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the gradients of gate and of up go."""
    if call.up is None:
        return halves_of(gradients["gate"], None)
    return gradients.get("gate"), gradients.get("up")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
