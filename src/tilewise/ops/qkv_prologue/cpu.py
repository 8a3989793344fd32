"""In PyTorch: queries and keys as one tensor, in float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.ops.kv_write.cpu import write
from tilewise.ops.qkv_prologue.problem import Call
from tilewise.rotary import rotated


def forward(call: Call) -> torch.Tensor:
    """Writes keys and values; returns queries."""
    heads, x = call.q.shape[1], call.qk.float()
    if call.norms is not None:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * norm.square_().div_(x.shape[-1]).add_(call.eps).rsqrt_()
        x[:, :heads] *= call.norms[0]
        x[:, heads:] *= call.norms[1]
    assert call.write.rope is not None
    x = rotated(x, call.write.rope)
    # encoded as they are, else rounded where they are written
    write(replace(call.write, k=x[:, heads:], rope=None))
    return x[:, :heads].to(call.q.dtype)
