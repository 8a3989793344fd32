"""Packed sequences of which some are short, or have no queries or no keys, and formulas of tensors no longer than the
longest that has both.
"""

from __future__ import annotations

import itertools

import torch

from tilewise.formula.formula import Mask, Score, mask, score
from tilewise.layouts import Packed

Lengths = tuple[tuple[int, int], ...]  # queries and keys of each sequence
LENGTHS: tuple[Lengths, ...] = (
    ((255, 255), (191, 191)),
    ((64, 64), (128, 128)),
    ((130, 130), (0, 0), (3, 130)),
    ((7, 0), (130, 140), (0, 150), (140, 140)),
)


def packed(lengths: Lengths) -> Packed:
    """Their layout."""
    sides = zip(*lengths, strict=True)
    return Packed(*(torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32) for side in sides))


def rows(lengths: Lengths, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v, (total, 2, 16)."""
    generator = torch.Generator().manual_seed(1)
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    return [torch.randn(n, 2, 16, generator=generator, dtype=torch.float64).to(dtype) for n in (queries, keys, keys)]


def captured(lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 (positions,) and float32 (batch, positions)."""
    most = max(keys for queries, keys in lengths if queries and keys)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2, (most,), generator=generator, dtype=torch.int32)
    return ids, torch.randn(len(lengths), most, generator=generator)


def formulas(
    lengths: Lengths, only: int | None = None, tensors: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[Mask, Score]:
    """A mask and a score that read them by query and by key; of sequence `only`, as the sole one."""
    ids, level = captured(lengths) if tensors is None else tensors
    level = level if only is None else level[only : only + 1]
    seen = mask(lambda b, h, i, j: (ids[i] == ids[j]) | (j < i - 20))
    return seen, score(lambda s, b, h, i, j: s + level[b, j] - level[b, i] * ids[i])
