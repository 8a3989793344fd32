"""The specification, in float64, one tile after another."""

from __future__ import annotations

import torch

from tilewise.ops.tile_scores.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills scores, and similarities where they are wanted."""
    group = call.q_sums.shape[1] // call.k_sums.shape[1]
    of_q, of_k = (_means(x, call, side) for side, x in enumerate((call.q_sums, call.k_sums)))
    results["scores"].copy_(of_q @ of_k.repeat_interleave(group, 1).transpose(-1, -2) * call.scale)
    for side, (name, units) in enumerate((("similar_q", call.q_units), ("similar_k", call.k_units))):
        if units is not None:
            results[name].copy_(_means(units, call, side).square().sum(-1))


def _means(sums: torch.Tensor, call: Call, side: int) -> torch.Tensor:
    """(batch, heads, tiles, dim) of a side's tiles."""
    tiles = []
    for tile in range(call.tiles[side]):
        blocks = sums[:, :, tile * call.each[side] : (tile + 1) * call.each[side]].double()
        count = min(call.block[side], call.rows[side] - tile * call.block[side])
        tiles.append(blocks.sum(2) / count)
    return torch.stack(tiles, 2)
