"""The specification: one pair of dimensions of one token after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.rope.problem import Call, parts

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills q and k."""
    for name, x in call.given.items():
        _turn(call, x, results[name], 1.0)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dq and dk, or all of dqkv."""
    for name, do, into in parts(call, incoming, gradients):
        if name == "v":
            into.copy_(do)
        else:
            _turn(call, do, into, -1.0)


def _turn(call: Call, x: torch.Tensor, into: torch.Tensor, sign: float) -> None:
    """x by angles times `sign`; products are rounded to float32 (of float64 to float64) before they are added."""
    wide, half = torch.promote_types(x.dtype, torch.float32), call.cos.shape[1]
    for at in torch.cartesian_prod(*(torch.arange(n) for n in call.positions.shape)).view(-1, call.positions.ndim):
        token = tuple(at.tolist())
        row = call.positions[token]
        cos, sin, heads = call.cos[row].to(wide), sign * call.sin[row].to(wide), x[token].to(wide)
        turned = heads.clone()
        for n in range(half):
            first, second = (2 * n, 2 * n + 1) if call.interleaved else (n, n + half)
            a, b = heads[:, first], heads[:, second]
            turned[:, first] = a * cos[n] - b * sin[n]
            turned[:, second] = b * cos[n] + a * sin[n]
        into[token] = turned.to(into.dtype)
