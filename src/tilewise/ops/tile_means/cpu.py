"""Means of tiles in PyTorch, all tiles of a sequence at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.tile_means.problem import Call, parts
from tilewise.schedule.selection import SHORTEST

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills mean, and similarity and variance where they are wanted."""
    for x in results.values():
        x.zero_()
    for x, *into in parts(call, list(results.values()), call.x):
        if not x.shape[0]:
            continue
        found = dict(zip(results, into, strict=True))
        x = x.to(call.wide)
        count = _counts(x, call.block)
        mean = _tiles(x, call.block).sum(1) / count
        found["mean"].copy_(mean.transpose(0, 1))
        if call.similarity:
            length = x.norm(dim=-1, keepdim=True)
            unit = _tiles(x / length.masked_fill_(length < SHORTEST, torch.inf), call.block).sum(1) / count
            found["similarity"].copy_(unit.square_().sum(-1).T)
        if call.variance:
            away = x - mean.repeat_interleave(call.block, 0)[: x.shape[0]]
            found["variance"].copy_((_tiles(away.square_(), call.block).sum(1) / count).transpose(0, 1))


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dx."""
    by_tile = [incoming[0], *([kept["mean"], incoming[-1]] if call.variance else [])]
    for dx, x, dmean, *more in parts(call, by_tile, gradients["x"], kept["x"]):
        if not x.shape[0]:
            continue
        count = _counts(x, call.block)

        def of_rows(of_tiles: torch.Tensor, rows: int = x.shape[0]) -> torch.Tensor:
            return of_tiles.transpose(0, 1).repeat_interleave(call.block, 0)[:rows]

        slope = of_rows(dmean / count.squeeze(-1).T[..., None])
        if more:
            mean, dvariance = more
            slope = slope + (x.to(call.wide) - of_rows(mean)) * of_rows(2 * dvariance / count.squeeze(-1).T[..., None])
        dx.copy_(slope)


def _tiles(x: torch.Tensor, block: int) -> torch.Tensor:
    """(seqlen, heads, dim) -> (tiles, block, heads, dim), zeros behind the last row."""
    tiles = -(-x.shape[0] // block)
    short = tiles * block - x.shape[0]
    if short:
        x = torch.cat([x, x.new_zeros(short, *x.shape[1:])])
    return x.reshape(tiles, block, *x.shape[1:])


def _counts(x: torch.Tensor, block: int) -> torch.Tensor:
    """Rows of each tile, (tiles, 1, 1)."""
    starts = torch.arange(0, x.shape[0], block, device=x.device)
    return (x.shape[0] - starts).clamp(max=block)[:, None, None]
