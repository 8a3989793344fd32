"""The weights of attention by tile: the share of its softmax that each tile of queries gives to each tile of keys."""

from __future__ import annotations

import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.formula.walk import symbols

MOST_SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}  # of float32 at once


def tile_masses(
    q: torch.Tensor,
    k: torch.Tensor,
    of_q: torch.Tensor,
    of_k: torch.Tensor,
    *,
    mask: tw.Mask | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Shares of the weights, by one pass over all scores in float32.

    Args:
        q, k: (batch, seqlen, heads, dim), as `tilewise.attention` takes them.
        of_q: int64 (seqlen_q,), the tile of each query, counted from 0; -1 leaves a query out.
        of_k: int64 (seqlen_k,), the tile of each key.
        mask, scale: as `tilewise.attention` takes them.

    Returns:
        float32 (batch, num_heads_q, tiles_q, tiles_k): the sum of a query's weights over the keys of a tile, averaged
        over the queries of a tile. Rows sum to 1, minus the share of queries that see no key.

    Raises:
        InputError: an index does not have one entry for each token.

    Example:
        >>> from tilewise.explain.masses import tile_masses
        >>> tile_of = torch.arange(100) // 50
        >>> tile_masses(q, k, tile_of, tile_of, mask=tw.causal)[0, 0, 0].tolist()
        [1.0, 0.0]
    """
    for name, x, index in (("of_q", q, of_q), ("of_k", k, of_k)):
        if index.shape != x.shape[1:2]:
            got, expected = f"shape {tuple(index.shape)}", f"({x.shape[1]},), a tile for each token"
            raise InputError(name, got=got, expected=expected, hint="torch.arange(seqlen) // 128")
    (batch, seqlen_q, heads, dim), seqlen_k, device = q.shape, k.shape[1], q.device
    group = heads // k.shape[2]
    of_q, of_k = of_q.to(device), of_k.to(device)
    tiles_q, tiles_k = (int(x.max()) + 1 if x.numel() else 0 for x in (of_q, of_k))
    found = torch.zeros(batch, heads, tiles_q, tiles_k, device=device)
    scale = dim**-0.5 if scale is None else scale
    used = set() if mask is None else symbols(mask.structure.root)
    rows = (of_q >= 0).nonzero()[:, 0]
    for some in torch.split(rows, max(1, MOST_SCORES[device.type] // max(1, seqlen_k))):
        seen: dict[tuple[int, int], torch.Tensor] = {}
        for b in range(batch):
            for h in range(heads):
                s = k[b, :, h // group].float() @ (q[b, some, h].float().T * scale)  # (seqlen_k, queries)
                if mask is not None:
                    at = (b if "b" in used else 0, h if "h" in used else 0)
                    if at not in seen:
                        seen = {at: _seen(mask, *at, some + (seqlen_k - seqlen_q), seqlen_k)}
                    s.masked_fill_(~seen[at], -torch.inf)
                weights = torch.softmax(s, 0).nan_to_num_(0.0)
                sums = weights.new_zeros(tiles_k, len(some)).index_add_(0, of_k, weights)
                found[b, h].index_add_(0, of_q[some], sums.T)
    counts = torch.bincount(of_q[rows], minlength=tiles_q).clamp(min=1)
    return found.div_(counts[:, None])


def _seen(mask: tw.Mask, b: int, h: int, places: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """Whether keys are seen by queries at these places, bool (seqlen_k, queries)."""
    device = places.device
    of_b, of_h = (torch.tensor(x, device=device) for x in (b, h))
    keys = torch.arange(seqlen_k, device=device)[:, None]
    return mask.evaluate(b=of_b, h=of_h, i=places, j=keys).expand(seqlen_k, len(places))
