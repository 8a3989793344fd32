"""Queries and keys turned by PyTorch's own operations, which autograd differentiates as often as it is asked to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.derivatives import gradients
from tilewise.ops.rope.problem import Call
from tilewise.rotary import Rope, rotated

Tensors = dict[str, torch.Tensor]


def forward(call: Call) -> tuple[torch.Tensor, ...]:
    """q, and k where there is one."""
    return tuple(_turned(call, x) for x in call.given.values())


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], wanted: Sequence[str]) -> Tensors:
    """dq and dk, or all of dqkv: by autograd, at any queries and keys, since turning is linear in them."""
    create_graph = torch.is_grad_enabled()
    found: Tensors = {}
    with torch.enable_grad():
        for name, do in zip("qkv", incoming, strict=False):
            if name == "v" or name in wanted or "qkv" in wanted:
                x = torch.zeros(do.shape, dtype=do.dtype, device=do.device, requires_grad=True)
                turned = x.view_as(x) if name == "v" else _turned(call, x)
                (dx,) = gradients((turned,), (x,), (do,), create_graph)
                assert dx is not None
                found[name] = dx
        return {"qkv": torch.cat(list(found.values()), -2)} if "qkv" in wanted else found


def _turned(call: Call, x: torch.Tensor) -> torch.Tensor:
    rope = Rope(call.cos, call.sin, call.positions.flatten(), call.interleaved)
    return rotated(x.reshape(-1, *x.shape[-2:]), rope).to(x.dtype).view(x.shape)
