"""Queries and keys turned in PyTorch, all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.rope.problem import Call, parts
from tilewise.rotary import Rope, rotated

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills q and k."""
    for name, x in call.given.items():
        _turn(call, x, results[name], back=False)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dq and dk, or all of dqkv."""
    for name, do, into in parts(call, incoming, gradients):
        if name == "v":
            into.copy_(do)
        else:
            _turn(call, do, into, back=True)


def _turn(call: Call, x: torch.Tensor, into: torch.Tensor, back: bool) -> None:
    rope = Rope(call.cos, call.sin, call.positions.flatten(), call.interleaved)
    into.copy_(rotated(x.flatten(0, -3), rope, back).view(into.shape))
