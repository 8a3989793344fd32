"""Norms in PyTorch, in float32 or wider: its own layer norm, and root mean squares of all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.norm.problem import Call
from tilewise.quant.codes import encode

Tensors = dict[str, torch.Tensor]
aten = torch.ops.aten


def forward(call: Call, results: Tensors) -> None:
    """Fills o or codes and scale, x where there is a residual, and stats where there is an o."""
    x = call.x
    if call.residual is not None:
        x = torch.add(x, call.residual, out=results["x"])
    x, weight, bias = x.to(call.wide), _scaling(call), _wide(call, call.bias)
    width = x.shape[-1]
    if call.centred:
        o, *stats = aten.native_layer_norm(x, (width,), weight, bias, call.eps)
    else:
        stats = [torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / width + call.eps)]
        o = x * stats[0]
        o = o if weight is None else o.mul_(weight)
        o = o if bias is None else o.add_(bias)
    if call.quantize is None:
        results["o"].copy_(o)
        results["stats"].copy_(torch.stack([x[..., 0] for x in stats]))
    else:
        encoded = encode(o, call.quantize)
        results["codes"].copy_(encoded.data)
        results["scale"].copy_(encoded.scale)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills those of dx, dweight and dbias that are there."""
    do, *ds = (x.to(call.wide) for x in incoming)
    x, stats, weight = kept["x"].to(call.wide), kept["stats"][..., None], _scaling(call)
    found: Tensors = {}
    if call.centred:
        wanted = [name in gradients for name in ("x", "weight", "bias")]
        bias = _wide(call, call.bias)
        made = aten.native_layer_norm_backward(do, x, x.shape[-1:], *stats, weight, bias, wanted)
        found = dict(zip(("x", "weight", "bias"), made, strict=True))
    else:
        x_hat = x * stats[0]
        if "x" in gradients:
            g = do if weight is None else do * weight
            found["x"] = torch.addcmul(g, x_hat, (g * x_hat).mean(-1, keepdim=True), value=-1.0).mul_(stats[0])
        if "weight" in gradients:
            found["weight"] = x_hat.mul_(do).reshape(-1, do.shape[-1]).sum(0)
        if "bias" in gradients:
            found["bias"] = do.reshape(-1, do.shape[-1]).sum(0)
    for name, gradient in gradients.items():
        gradient.copy_(sum(ds, start=found[name]) if name == "x" else found[name])


def _scaling(call: Call) -> torch.Tensor | None:
    """What rows are multiplied by."""
    weight = _wide(call, call.weight)
    return weight if weight is None or call.offset == 0.0 else weight + call.offset


def _wide(call: Call, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(call.wide)
