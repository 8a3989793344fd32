"""Norms in PyTorch: statistics of all rows at once, in float32 or wider."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.norm.problem import Call
from tilewise.quant.codes import encode

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills o or codes and scale, x where there is a residual, and stats where there is an o."""
    x = call.x
    if call.residual is not None:
        x = torch.add(x, call.residual, out=results["x"])
    x = x.to(call.wide)
    stats = []
    if call.centred:
        stats.append(x.mean(-1))
        x = x - stats[0][..., None]
    stats.append(torch.rsqrt(x.square().mean(-1) + call.eps))
    o = x * stats[-1][..., None]
    if call.weight is not None:
        o = o * _scaling(call)
    if call.bias is not None:
        o = o + call.bias
    if call.quantize is None:
        results["o"].copy_(o)
        results["stats"].copy_(torch.stack(stats))
    else:
        encoded = encode(o, call.quantize)
        results["codes"].copy_(encoded.data)
        results["scale"].copy_(encoded.scale)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills those of dx, dweight and dbias that are there."""
    do, *ds = (x.to(call.wide) for x in incoming)
    rstd = kept["stats"][-1][..., None]
    x_hat = kept["x"].to(call.wide)
    if call.centred:
        x_hat = x_hat - kept["stats"][0][..., None]
    x_hat = x_hat * rstd
    if "x" in gradients:
        g = do if call.weight is None else do * _scaling(call)
        dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
        if call.centred:
            dx = dx - g.mean(-1, keepdim=True)
        gradients["x"].copy_(sum(ds, start=dx * rstd))
    if "weight" in gradients:
        gradients["weight"].copy_((do * x_hat).reshape(-1, do.shape[-1]).sum(0))
    if "bias" in gradients:
        gradients["bias"].copy_(do.reshape(-1, do.shape[-1]).sum(0))


def _scaling(call: Call) -> torch.Tensor:
    assert call.weight is not None
    return call.weight.to(call.wide) + call.offset
