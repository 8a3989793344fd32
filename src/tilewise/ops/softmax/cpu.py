"""Softmax in PyTorch, with rows that keep nothing set to what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.softmax.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    s = call.x.to(call.wide) / call.temperature
    if call.mask is not None:
        s = s.masked_fill(~call.mask, -torch.inf)
    nothing = (s == -torch.inf).all(-1, keepdim=True)
    o = torch.log_softmax(s, -1) if call.log else torch.softmax(s, -1)
    results["o"].copy_(o.masked_fill(nothing, -torch.inf if call.log else 0.0))


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dx."""
    o, do = kept["o"].to(call.wide), incoming[0].to(call.wide)
    if call.log:
        constant = o == -torch.inf
        do = do.masked_fill(constant, 0.0)
        dx = do - torch.exp(o) * do.sum(-1, keepdim=True)
    else:
        dx = o * (do - (o * do).sum(-1, keepdim=True))
    gradients["x"].copy_(dx / call.temperature)
