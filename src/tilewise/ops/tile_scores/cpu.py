"""Scores of pairs of tiles in PyTorch."""

from __future__ import annotations

import functools

import torch

from tilewise.ops.tile_scores.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills scores, and similarities where they are wanted."""
    (batch, heads_kv), dim = call.k_sums.shape[:2], call.k_sums.shape[-1]
    of_q, of_k = (_means(x, call, side) for side, x in enumerate((call.q_sums, call.k_sums)))
    grouped = of_q.reshape(batch * heads_kv, -1, dim)
    with torch.autocast(grouped.device.type, enabled=False):
        s = torch.bmm(grouped, of_k.flatten(0, 1).transpose(-1, -2)).mul_(call.scale)
    results["scores"].copy_(s.view(results["scores"].shape))
    for side, units in enumerate((call.q_units, call.k_units)):
        if units is not None:
            results["similar_q" if side == 0 else "similar_k"].copy_(_means(units, call, side).square().sum(-1))


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
