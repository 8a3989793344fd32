"""Gumbel noise in PyTorch: Philox over whole tensors of counters, whose four words are those of four tokens."""

from __future__ import annotations

import torch

from tilewise.core.philox import _KEYS, _MASK, _MULTIPLIERS
from tilewise.ops.sampling.problem import DOMAIN


def words(seeds: torch.Tensor, positions: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The random bits of tokens 4 g to 4 g + 3, int64 (..., 4), for int64 tensors that broadcast: those of
    `core.philox`, with fewer and wider operations. A product of 32 bits by 32 wraps into the 64 bits of its own.
    """
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    shape = (seeds + positions + groups).shape
    c0, c1, c2, c3, low0, low1 = torch.empty((6, *shape), dtype=torch.int64)
    for counter, value in ((c0, groups), (c1, positions & _MASK)):
        counter.copy_(value)
    c2.fill_(DOMAIN)
    c3.zero_()
    for _ in range(10):
        torch.mul(c0, _MULTIPLIERS[0], out=low0)
        torch.mul(c2, _MULTIPLIERS[1], out=low1)
        torch.bitwise_right_shift(low1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(low0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3, low0, low1 = low1, low0, c3, c1  # whose upper bits are cleared where they are used
        k0, k1 = (k0 + _KEYS[0]) & _MASK, (k1 + _KEYS[1]) & _MASK
    return torch.stack((c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)), -1)


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) of the uniform numbers u that 32 random bits make, float32; 1 - u is what is exact."""
    distance = words.to(torch.float32).mul_(2.0**-32).add_(2.0**-33).clamp_(max=1.0 - 2.0**-24)
    return distance.neg_().log1p_().neg_().log_().neg_()
