"""Queries' largest dimensions in PyTorch."""

from __future__ import annotations

import torch

from tilewise.ops.query_parts.problem import Call


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    grouped = call.q.float().view(call.q.shape[0], call.heads, call.group, call.q.shape[2])
    sizes = grouped.abs()
    sums = sizes.sum(2)
    sums = torch.where(sums.isfinite(), sums, torch.inf)
    dims = torch.argsort(sums, dim=-1, descending=True, stable=True)[..., : call.rank].sort().values
    part = grouped.gather(3, dims[:, :, None].expand(-1, -1, call.group, -1))
    warmer = torch.sqrt(sizes.sum(-1, keepdim=True) / part.abs().sum(-1, keepdim=True).clamp(min=1e-30))
    results["dims"].copy_(dims)
    results["parts"].copy_(part * (call.scale * warmer))
