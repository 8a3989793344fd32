"""Philox4x32-10 counters for dropout, in PyTorch: the same bits as the GPU kernels.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).

A score's fate depends on (seed, batch, head, query, key) only: the counter is (key // 4, query, batch * heads + head,
0) and the word is key % 4. No tile size, device or launch enters.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)


def _multiply(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 without overflow."""
    low_half, high_half = a & 0xFFFF, a >> 16
    low, high = low_half * factor, high_half * factor
    total = (low >> 16) + (high & _MASK)
    return ((high >> 32) << 16) + (total >> 16) & _MASK, (a * factor) & _MASK


def philox(seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor) -> list[torch.Tensor]:
    """Four words of 32 random bits (as int64) for counters (c0, c1, c2, 0), which broadcast."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    # 32 bits, as on the GPU: a query before the first key has a negative position; the first rounds broadcast them
    c0, c1, c2 = c0.long() & _MASK, c1.long() & _MASK, c2.long() & _MASK
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEYS[0]) & _MASK, (k1 + _KEYS[1]) & _MASK
    return [c0, c1, c2, c3]


def keep_mask(seed: int, dropout: float, row: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Boolean tensor: which scores survive dropout with probability `dropout`.

    Args:
        row: batch * num_heads_q + head; i: query position; j: key position, the last dimension; they broadcast.
    """
    first = int(j.reshape(-1)[0]) // 4 if j.numel() else 0
    last = int(j.reshape(-1)[-1]) // 4 if j.numel() else -1
    groups = torch.arange(first, last + 1, device=j.device)
    words = torch.stack(philox(seed, groups, i, row), dim=-1).flatten(-2)
    return words[..., j.reshape(-1) - 4 * first] >= threshold(dropout)


def threshold(dropout: float) -> int:
    """Scores whose word is below this are dropped; the probability is rounded to float32, as it travels to kernels."""
    rounded = float(torch.tensor(dropout, dtype=torch.float32, device="cpu"))
    return int(min(rounded * 2.0**32, 4294967040.0))
