"""By the operations that it stands for, one after another: for pages that no kernel of its own writes."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.ops.kv_write.table import choose
from tilewise.ops.kv_write.torch_op import run
from tilewise.ops.norm import rms_norm
from tilewise.ops.qkv_prologue.problem import Call
from tilewise.ops.rope import rope as rotate


def forward(call: Call) -> torch.Tensor:
    """Writes keys and values; returns queries."""
    q, write = call.q, call.write
    if call.norms is not None:
        q, k = (_normed(x, weight, call.eps) for x, weight in zip((q, write.k), call.norms, strict=True))
        write = replace(write, k=k)
    run(choose(write, None), write)
    assert call.write.rope is not None
    turned = rotate(q, rope=call.write.rope)
    assert isinstance(turned, torch.Tensor)
    return turned


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    found = rms_norm(x, weight, eps=eps)
    assert isinstance(found, torch.Tensor)
    return found
