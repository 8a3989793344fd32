"""Scores of pairs of tiles in PyTorch."""

from __future__ import annotations

import functools

import torch

from tilewise.ops.tile_scores.problem import Call, scores_of_means

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills scores, and similarities where they are wanted."""
    of_q, of_k = (_means(x, call, side) for side, x in enumerate((call.q_sums, call.k_sums)))
    results["scores"].copy_(scores_of_means(of_q, of_k, call.scale))
    for side, (name, units) in enumerate((("similar_q", call.q_units), ("similar_k", call.k_units))):
        if units is not None:
            results[name].copy_(_means(units, call, side).square().sum(-1))


def _means(sums: torch.Tensor, call: Call, side: int) -> torch.Tensor:
    """(batch, heads, tiles, dim) of a side's tiles."""
    each, tiles = call.each[side], call.tiles[side]
    if each > 1:
        short = tiles * each - sums.shape[2]
        whole = torch.nn.functional.pad(sums, (0, 0, 0, short)) if short else sums
        sums = whole.view(*sums.shape[:2], tiles, each, sums.shape[3]).sum(3)
    return sums * _inverse_counts(call.rows[side], call.block[side], sums.device)


@functools.lru_cache(maxsize=256)
def _inverse_counts(rows: int, block: int, device: torch.device) -> torch.Tensor:
    """One over the rows of each tile, (tiles, 1)."""
    counts = torch.full((-(-rows // block), 1), float(block))
    counts[-1:] = rows - (counts.shape[0] - 1) * block
    return (1.0 / counts).to(device)
