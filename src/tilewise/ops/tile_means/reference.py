"""The specification, in float64, one tile after another."""

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
        found = dict(zip(results, into, strict=True))
        for tile in range(-(-x.shape[0] // call.block)):
            rows = x[tile * call.block : (tile + 1) * call.block].double()
            mean = rows.mean(0)
            found["mean"][:, tile] = mean
            if call.similarity:
                length = rows.norm(dim=-1, keepdim=True)
                cosines = torch.einsum("ihd,jhd->hij", *[rows / torch.where(length < SHORTEST, torch.inf, length)] * 2)
                found["similarity"][:, tile] = cosines.mean((1, 2))
            if call.variance:
                found["variance"][:, tile] = ((rows - mean) ** 2).mean(0)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills dx."""
    by_tile = [incoming[0], *([incoming[-1]] if call.variance else [])]
    for dx, x, dmean, *dvariance in parts(call, by_tile, gradients["x"], kept["x"]):
        for tile in range(-(-x.shape[0] // call.block)):
            rows = slice(tile * call.block, (tile + 1) * call.block)
            values = x[rows].double()
            slope = dmean[:, tile].double().expand_as(values)
            if dvariance:
                slope = slope + 2 * (values - values.mean(0)) * dvariance[0][:, tile].double()
            dx[rows] = (slope / values.shape[0]).to(dx.dtype)
