"""Softmax in PyTorch's own operations, which autograd differentiates as often as it is asked to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.softmax.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call) -> tuple[torch.Tensor]:
    """o"""
    s = call.x.to(call.wide) / call.temperature
    if call.mask is not None:
        s = s.masked_fill(~call.mask, -torch.inf)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)  # a row of -inf has no finite derivative
    o = torch.log_softmax(s, -1) if call.log else torch.softmax(s, -1)
    return (o.masked_fill(empty, -torch.inf if call.log else 0.0).to(call.out_dtype),)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], wanted: Sequence[str]) -> Tensors:
    """dx, from o alone, which is all that is kept."""
    o, do = kept["o"].to(call.wide), incoming[0].to(call.wide)
    if call.log:
        do = do.masked_fill(o == -torch.inf, 0.0)
        dx = do - torch.exp(o) * do.sum(-1, keepdim=True)
    else:
        dx = o * (do - (o * do).sum(-1, keepdim=True))
    return {"x": (dx / call.temperature).to(call.in_dtype)} if "x" in wanted else {}
