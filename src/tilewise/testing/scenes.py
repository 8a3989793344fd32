"""Three kinds of heads by which selections of tiles are told apart.

Tokens of a tile lie around a centre. "topics": a centre of its own for each tile; "near": centres that wander, so that
tiles beside each other are alike; "sink": as "near", and one key of a tile without a direction that all queries want.
"""

from __future__ import annotations

import torch

SCENES = ("topics", "near", "sink")


def scene(
    kind: str, *, alike: float = 1.0, tokens: int = 1024, tile: int = 64, dim: int = 32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v (1, tokens, 1, dim), float32; centres have numbers of size `alike`, tokens 0.6 around them."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(tokens // tile, dim, generator=g)
    if kind != "topics":
        step = torch.randn(tokens // tile, dim, generator=g)
        for n in range(1, len(centres)):
            centres[n] = 0.8 * centres[n - 1] + 0.6 * step[n]
    around = alike * centres.repeat_interleave(tile, 0)
    q, k, v = (0.6 * torch.randn(tokens, dim, generator=g) + around for _ in range(3))
    if kind == "sink":
        wanted = tokens // 3 // tile * tile
        k[wanted : wanted + tile] = 0.6 * torch.randn(tile, dim, generator=g)
        wish = torch.nn.functional.normalize(torch.randn(dim, generator=g), dim=0)
        q += 4.0 * wish
        k[wanted + tile // 2] = 12.0 * wish
    return q[None, :, None], k[None, :, None], v[None, :, None]
