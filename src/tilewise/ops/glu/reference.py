"""The specification: float64, one row after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewise.ops.glu.problem import Call, Tensors

_C, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715  # of the approximation by tanh


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    gate, up = call.halves
    for g, u, o in _rows(gate, up, results["o"]):
        o.copy_(_activation(call.activation, g.double())[0] * u.double())


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradients that are wanted."""
    gate, up = call.halves
    dgate, dup = (torch.empty(gate.shape, dtype=torch.float64, device=gate.device) for _ in range(2))
    for g, u, do, dg, du in _rows(gate, up, incoming[0], dgate, dup):
        active, slope = _activation(call.activation, g.double())
        d = do.double() * u.double()
        dg.copy_(torch.where(g <= 0.0, 0.0, d) if call.activation == "relu" else d * slope)
        du.copy_(do.double() * active)
    found = {"gate": torch.cat((dgate, dup), -1)} if call.up is None else {"gate": dgate, "up": dup}
    for name, target in gradients.items():
        target.copy_(found[name])


def _rows(*tensors: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    return zip(*(x.reshape(-1, x.shape[-1]) if not x.is_contiguous() else x.view(-1, x.shape[-1]) for x in tensors),
               strict=True)  # fmt: skip


def _activation(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, derivative)"""
    if name == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    if name == "gelu":
        phi = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
        return x * phi, phi + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    if name == "gelu_tanh":
        t = torch.tanh(_C * (x + _CUBIC * x**3))
        return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _C * (1.0 + 3.0 * _CUBIC * x * x)
    return torch.where(x <= 0.0, 0.0, x), torch.where(x <= 0.0, 0.0, 1.0)
