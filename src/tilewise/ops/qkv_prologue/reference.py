"""The specification: one head of one token after another."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.ops.kv_write.reference import turned, write
from tilewise.ops.qkv_prologue.problem import Call


def forward(call: Call) -> torch.Tensor:
    """Writes keys and values; returns queries."""
    rope = call.write.rope
    assert rope is not None
    both = [call.q.float(), call.write.k.float()]
    if call.norms is not None:
        both = [_normed(x, weight.float(), call.eps) for x, weight in zip(both, call.norms, strict=True)]
    q, k = (torch.stack([turned(heads, rope, token) for token, heads in enumerate(x)]) for x in both)
    write(replace(call.write, k=k, rope=None))
    return q.to(call.q.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = [[head / torch.sqrt((head * head).mean() + eps) * weight for head in heads] for heads in x]
    return torch.stack([torch.stack(heads) for heads in rows])
