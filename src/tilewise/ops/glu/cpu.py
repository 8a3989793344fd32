"""Gated linear units in PyTorch, by its activations and their derivatives, in float32 or wider."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.glu.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    gate, up = (x.to(call.wide) for x in call.halves())
    results["o"].copy_(_activated(gate, call.activation) * up)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dgate and dup, or the packed gradient of both."""
    gate, up = (x.to(call.wide) for x in call.halves())
    do = incoming[0].to(call.wide)
    dgate, dup = call.gradients_of_halves(gradients)
    if dgate is not None:
        dgate.copy_(_before(do * up, gate, call.activation))
    if dup is not None:
        dup.copy_(do * _activated(gate, call.activation))


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "relu":
        return torch.relu(x)
    return torch.nn.functional.gelu(x, approximate=_APPROXIMATE[activation])


def _before(d: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient of x, from that of the activation of x."""
    found: torch.Tensor
    if activation == "silu":
        found = torch.ops.aten.silu_backward(d, x)
    elif activation == "relu":
        found = torch.ops.aten.threshold_backward(d, x, 0)
    else:
        found = torch.ops.aten.gelu_backward(d, x, approximate=_APPROXIMATE[activation])
    return found


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
