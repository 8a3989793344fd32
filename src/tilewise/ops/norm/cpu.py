"""Norms in PyTorch, all rows at once, in float32 or wider. PyTorch's own layer norm is faster, but takes x and its mean
apart before it subtracts them, so that they cancel where the mean is large.
"""

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
    x, weight, bias = x.to(call.wide), _scaling(call), _wide(call, call.bias)
    encoded = call.quantize is not None
    stats = x.new_empty(1 + call.centred, *x.shape[:-1]) if encoded else results["stats"]
    if call.centred:
        x = x - torch.mean(x, -1, keepdim=True, out=stats[0, ..., None])
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(call.eps), out=stats[-1, ..., None])
    direct = not encoded and call.dtype == call.wide
    o = torch.mul(x, inverse, out=results["o"]) if direct else x * inverse
    o = o if weight is None else o.mul_(weight)
    o = o if bias is None else o.add_(bias)
    if call.quantize is not None:
        codes = encode(o, call.quantize)
        results["codes"].copy_(codes.data)
        results["scale"].copy_(codes.scale)
    elif not direct:
        results["o"].copy_(o)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills those of dx, dweight and dbias that are there."""
    do, *ds = (x.to(call.wide) for x in incoming)
    x_hat, stats, weight = kept["x"].to(call.wide), kept["stats"][..., None], _scaling(call)
    x_hat = (x_hat - stats[0]).mul_(stats[1]) if call.centred else x_hat * stats[0]
    if "x" in gradients:
        g = do if weight is None else do * weight
        dx = torch.addcmul(g, x_hat, (g * x_hat).mean(-1, keepdim=True), value=-1.0)
        if call.centred:
            dx -= g.mean(-1, keepdim=True)
        gradients["x"].copy_(sum(ds, start=dx.mul_(stats[-1])))
    if "weight" in gradients:
        gradients["weight"].copy_(x_hat.mul_(do).reshape(-1, do.shape[-1]).sum(0))
    if "bias" in gradients:
        gradients["bias"].copy_(do.reshape(-1, do.shape[-1]).sum(0))


def _scaling(call: Call) -> torch.Tensor | None:
    """What rows are multiplied by."""
    weight = _wide(call, call.weight)
    return weight if weight is None or call.offset == 0.0 else weight + call.offset


def _wide(call: Call, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(call.wide)
