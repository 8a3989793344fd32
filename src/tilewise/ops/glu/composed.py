"""Gated linear units in PyTorch's own operations, which autograd differentiates as often as it is asked to."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tilewise.ops.glu.problem import Call


def forward(call: Call) -> tuple[torch.Tensor]:
    """o"""
    gate, up = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in call.halves)
    if call.activation == "silu":
        active = F.silu(gate)
    elif call.activation == "relu":
        active = F.relu(gate)
    else:
        active = F.gelu(gate, approximate="tanh" if call.activation == "gelu_tanh" else "none")
    return ((active * up).to(call.gate.dtype),)
