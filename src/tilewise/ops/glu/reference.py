"""The specification, in float64, one row after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewise.ops.glu.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    gate, up, o = (_rows(x, call.width) for x in (*call.halves(), results["o"]))
    for row in range(len(o)):
        o[row] = _activated(gate[row].double(), call.activation)[0] * up[row].double()


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dgate and dup, or the packed gradient of both."""
    gate, up, do = (_rows(x, call.width) for x in (*call.halves(), incoming[0]))
    dgate, dup = (None if x is None else _rows(x, call.width) for x in call.gradients_of_halves(gradients))
    for row in range(len(do)):
        value, slope = _activated(gate[row].double(), call.activation)
        if dgate is not None:
            d = do[row].double() * up[row].double()
            dgate[row] = torch.where(slope == 0.0, 0.0, d) if call.activation == "relu" else d * slope
        if dup is not None:
            dup[row] = do[row].double() * value


def _activated(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation and its derivative."""
    if activation == "relu":
        return torch.where(x < 0.0, 0.0, x), torch.where(x <= 0.0, 0.0, 1.0)
    if activation == "silu":
        part = torch.sigmoid(x)
        return x * part, part + x * part * (1.0 - part)
    if activation == "gelu":
        part = (1.0 + torch.erf(x / math.sqrt(2.0))) / 2.0
        return x * part, part + x * torch.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi)
    scale = math.sqrt(2.0 / math.pi)
    y = scale * (x + 0.044715 * x**3)
    part = (1.0 + torch.tanh(y)) / 2.0
    return x * part, part + x * scale * (1.0 + 3 * 0.044715 * x * x) / torch.cosh(y) ** 2 / 2.0


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """(rows, width); a view of what is written to, which has one stride from row to row."""
    return x.reshape(-1, width)
