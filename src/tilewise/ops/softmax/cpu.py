"""Softmax in PyTorch: its own kernels, and then rows that keep nothing set to what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.softmax.problem import Call

Tensors = dict[str, torch.Tensor]
aten = torch.ops.aten


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    s = call.x.to(call.wide)
    if call.temperature != 1.0:
        s = s / call.temperature
    if call.mask is not None:
        s = s.masked_fill(~call.mask, -torch.inf)
    o = results["o"] if call.out_dtype == call.wide else torch.empty_like(s)
    (torch.log_softmax if call.log else torch.softmax)(s, -1, out=o)
    if o[..., 0].isnan().any():  # as PyTorch has all of a row that keeps nothing
        o.masked_fill_((s == -torch.inf).all(-1, keepdim=True), -torch.inf if call.log else 0.0)
    if o is not results["o"]:
        results["o"].copy_(o)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dx."""
    o, do = kept["o"].to(call.wide), incoming[0].to(call.wide)
    if call.log:
        do = do.masked_fill(o == -torch.inf, 0.0)
    slopes = aten._log_softmax_backward_data if call.log else aten._softmax_backward_data
    dx = gradients["x"] if call.in_dtype == call.wide else torch.empty_like(o)
    slopes.out(do, o, -1, call.wide, **{"out" if call.log else "grad_input": dx})
    if call.temperature != 1.0:
        dx /= call.temperature
    if dx is not gradients["x"]:
        gradients["x"].copy_(dx)
