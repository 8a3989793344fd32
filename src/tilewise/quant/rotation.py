"""A rotation that spreads a channel's outliers over all channels, so that few codes are spent on them."""

from __future__ import annotations

import functools
import math

import torch

from tilewise.core.errors import InputError


def rotate(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Rotate heads by random signs, a Hadamard matrix and 1 / sqrt(head_dim), which spreads outliers over channels.

    Products of rotated queries with rotated keys are those of the queries with the keys. So queries that meet rotated
    keys in a cache are rotated with the same seed, after rotary embedding.

    Args:
        x: (..., head_dim), floating point; head_dim is a power of 2. Computed in float32.
        seed: of the signs.

    Returns:
        A tensor of the shape and dtype of x.

    Raises:
        InputError: head_dim is no power of 2.

    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.

    Example:
        >>> a, b = q[0, 0], k[0, 0]
        >>> torch.allclose(tw.quant.rotate(a) @ tw.quant.rotate(b).T, a @ b.T, atol=1e-4)
        True
    """
    head_dim = x.shape[-1]
    if head_dim & (head_dim - 1) or not head_dim:
        raise InputError("x", got=f"head_dim {head_dim}", expected="a power of 2", hint="leave such heads unrotated")
    return (x.float() @ matrix(head_dim, seed, x.device)).to(x.dtype)


@functools.lru_cache(maxsize=64)
def matrix(head_dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """What `rotate` multiplies by: diag(signs) H / sqrt(head_dim), float32, for a power of 2."""
    hadamard = torch.ones(1, 1)
    while len(hadamard) < head_dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = 2.0 * torch.randint(0, 2, (head_dim, 1), generator=torch.Generator().manual_seed(seed)) - 1.0
    return (signs * hadamard / math.sqrt(head_dim)).to(device)
