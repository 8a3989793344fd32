"""The specification, in float64, one row after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.norm.problem import Call
from tilewise.quant.codes import encode

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills o or codes and scale, x where there is a residual, and stats where there is an o."""
    if call.residual is not None:
        results["x"].copy_(call.x + call.residual)
    width = call.x.shape[-1]
    normed = results.get("x", call.x).reshape(-1, width)
    weight, bias = _weight(call), _zeros(call) if call.bias is None else call.bias.double()
    for row in range(len(normed)):
        x = normed[row].double()
        mean = x.mean() if call.centred else x.new_zeros(())
        rstd = ((x - mean).square().mean() + call.eps) ** -0.5
        o = (x - mean) * rstd * weight + bias
        if call.quantize is None:
            results["o"].view(-1, width)[row] = o
            results["stats"].view(-1, len(normed))[:, row] = torch.stack([mean, rstd][not call.centred :])
        else:
            encoded = encode(o, call.quantize)
            results["codes"].view(-1, width)[row] = encoded.data
            results["scale"].view(-1)[row] = encoded.scale


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills those of dx, dweight and dbias that are there."""
    width = call.x.shape[-1]
    normed, all_do = call.x.reshape(-1, width), incoming[0].reshape(-1, width)
    stats = kept["stats"].view(-1, len(normed)).double()
    weight, dweight, dbias = _weight(call), _zeros(call), _zeros(call)
    for row in range(len(normed)):
        x, do, rstd = normed[row].double(), all_do[row].double(), stats[-1, row]
        x_hat = (x - stats[0, row] if call.centred else x) * rstd
        dweight += do * x_hat
        dbias += do
        if "x" in gradients:
            g = do * weight
            dx = g - x_hat * (g * x_hat).mean()
            dx = (dx - g.mean() if call.centred else dx) * rstd
            for ds in incoming[1:]:
                dx = dx + ds.reshape(-1, width)[row].double()
            gradients["x"].view(-1, width)[row] = dx
    for name, total in (("weight", dweight), ("bias", dbias)):
        if name in gradients:
            gradients[name].copy_(total)


def _zeros(call: Call) -> torch.Tensor:
    return torch.zeros(call.x.shape[-1], dtype=torch.float64, device=call.x.device)


def _weight(call: Call) -> torch.Tensor:
    return _zeros(call) + 1.0 if call.weight is None else call.weight.double() + call.offset
