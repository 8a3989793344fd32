"""Three kinds of queries, keys and values by which errors of few bits are told apart.

"gaussian" is normal; "biased" has some channels far from 0, as keys of trained models do; "outliers" has one number in
a thousand ten times as wide (Shah et al., "FlashAttention-3", 2024).
"""

from __future__ import annotations

import torch

KINDS = ("gaussian", "biased", "outliers")


def drawn(
    kind: str, seed: int, *, tokens: int = 4096, dim: int = 128, rotated: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one head, (tokens, dim) each, float32 that holds float16's numbers.

    The same for a seed whatever the kind, as far as they are drawn: "biased" follows "gaussian", "outliers" follows
    both. `rotated` draws `dim` signs first, as the model did that the tables of errors come from.
    """
    g = torch.Generator().manual_seed(seed)
    if rotated:
        torch.randint(0, 2, (dim,), generator=g)
    for name in KINDS[: KINDS.index(kind) + 1]:
        q, k, v = (torch.randn(tokens, dim, generator=g) for _ in range(3))
        if name == "biased":
            bias = torch.zeros(2, dim)
            for x, size in zip(bias, (8, 6), strict=True):
                x[torch.randperm(dim, generator=g)[:8]] = torch.randn(8, generator=g) * size
            k, q, v = k + bias[0], q + bias[1], v + torch.randn(dim, generator=g)
        if name == "outliers":
            q, k, v = (
                x + torch.randn(x.shape, generator=g) * 10 * (torch.rand(x.shape, generator=g) < 1e-3)
                for x in (q, k, v)
            )
    return q.half().float(), k.half().float(), v.half().float()


def heads(
    kind: str, count: int, *, tokens: int = 4096, dim: int = 128, rotated: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v (1, tokens, count, dim), a head a seed, from 0 on."""
    made = zip(*(drawn(kind, n, tokens=tokens, dim=dim, rotated=rotated) for n in range(count)), strict=True)
    q, k, v = (torch.stack(x, 1)[None] for x in made)
    return q, k, v
