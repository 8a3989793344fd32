"""Means of tiles in PyTorch's own operations, which autograd differentiates as often as it is asked to."""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.tile_means.problem import Call, names
from tilewise.schedule.selection import SHORTEST


def forward(call: Call) -> tuple[torch.Tensor, ...]:
    """Mean, and similarity and variance where they are wanted."""
    x, tiles = call.x.to(call.wide), call.tiles
    slot = _slots(call).to(x.device)
    if call.cu_seqlens is None:
        tiles, x = tiles * x.shape[0], x.flatten(0, 1)
    count = torch.bincount(slot, minlength=tiles).clamp(min=1)[:, None, None]

    def mean_of(rows: torch.Tensor) -> torch.Tensor:
        return (
            torch.zeros((tiles, *rows.shape[1:]), dtype=rows.dtype, device=rows.device).index_add(0, slot, rows) / count
        )

    mean = mean_of(x)
    found = {"mean": mean}
    if call.similarity:
        with torch.no_grad():
            length = x.norm(dim=-1, keepdim=True)
            unit = x / length.masked_fill(length < SHORTEST, torch.inf)
            found["similarity"] = mean_of(unit).square().sum(-1)
    if call.variance:
        found["variance"] = mean_of((x - mean[slot]).square())
    return tuple(_by_head(call, found[name]) for name in names(call))


def _slots(call: Call) -> torch.Tensor:
    """The tile of each row; reads packed lengths on the host."""
    if call.cu_seqlens is None:
        batch, rows = call.x.shape[:2]
        return (torch.arange(rows) // call.block + torch.arange(batch)[:, None] * call.tiles).flatten()
    ends = call.cu_seqlens.tolist()
    parts = [
        torch.arange(b - a) // call.block + a // call.block + n for n, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _by_head(call: Call, x: torch.Tensor) -> torch.Tensor:
    """(tiles of all sequences, heads, ...) with heads before tiles."""
    return (
        x.transpose(0, 1)
        if call.cu_seqlens is not None
        else x.reshape(call.x.shape[0], call.tiles, *x.shape[1:]).transpose(1, 2)
    )
