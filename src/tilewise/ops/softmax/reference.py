"""The specification, in float64, one row after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.softmax.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    o = results["o"].flatten(0, -2) if call.x.ndim > 1 else results["o"][None]
    x = call.x.reshape(o.shape)
    mask = None if call.mask is None else call.mask.reshape(o.shape)
    for row in range(len(o)):
        s = x[row].double() / call.temperature
        if mask is not None:
            s = torch.where(mask[row], s, -torch.inf)
        if (s == -torch.inf).all():
            o[row] = -torch.inf if call.log else 0.0
        else:
            o[row] = torch.log_softmax(s, 0) if call.log else torch.softmax(s, 0)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dx."""
    dx = gradients["x"].flatten(0, -2) if gradients["x"].ndim > 1 else gradients["x"][None]
    all_o, all_do = kept["o"].reshape(dx.shape), incoming[0].reshape(dx.shape)
    for row in range(len(dx)):
        o, do = all_o[row].double(), all_do[row].double()
        if call.log:
            do = torch.where(o == -torch.inf, 0.0, do)
            ds = do - torch.exp(o) * do.sum()
        else:
            ds = o * (do - (o * do).sum())
        dx[row] = ds / call.temperature
