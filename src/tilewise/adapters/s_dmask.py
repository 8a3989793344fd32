"""S_dmask: the attention probabilities that `return_attn_probs` asks for, every one of them in memory."""

from __future__ import annotations

import numbers
from itertools import pairwise
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import InputError, shown
from tilewise.core.philox import keep_mask
from tilewise.layouts import Packed


def extent(name: str, value: Any) -> int:
    """A length given as an integer or a tensor of one."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()
    if not one and (not isinstance(value, (int, numbers.Integral)) or isinstance(value, bool)):
        hint = "the longest sequence; only S_dmask needs it"
        raise InputError(name, got=shown(value), expected="an integer, or an integer tensor of one element", hint=hint)
    return int(value)


def gathered(k: torch.Tensor, block_table: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Keys out of their pages, packed."""
    tables = [row[: -(-n // k.shape[1])].long() for row, n in zip(block_table, lengths, strict=True)]
    return torch.cat([k[row].flatten(0, 1)[:n] for row, n in zip(tables, lengths, strict=True)])


def probabilities(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: Packed | None,
    mask: tw.Mask | None,
    score: tw.Score | None,
    scale: float,
    dropout: tuple[float, torch.Tensor | None],
    max_seqlens: tuple[int, int],
) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k) from (q, k, lse), negative where `dropout` (probability, seed) drops."""
    q, k, lse = tensors
    if layout is None:
        parts = [(b, q[b], k[b], lse[b]) for b in range(q.shape[0])]
        extents = (q.shape[1], k.shape[1])
    else:
        cu_q, cu_k = layout.cu_seqlens_q.tolist(), layout.keys.tolist()
        rows = [slice(a, b) for a, b in pairwise(cu_q)]
        keys = [slice(a, b) for a, b in pairwise(cu_k)]
        parts = [(b, q[r], k[c], lse[:, r]) for b, (r, c) in enumerate(zip(rows, keys, strict=True))]
        extents = max_seqlens
        longest = tuple(max((b - a for a, b in pairwise(ends)), default=0) for ends in (cu_q, cu_k))
        for name, got, least in zip(("max_seqlen_q", "max_seqlen_k"), extents, longest, strict=True):
            if got < least:
                hint = "max(lengths); only S_dmask needs it"
                raise InputError(name, got=got, expected=f"at least {least}, the longest sequence", hint=hint)
    heads = q.shape[-2]
    result = torch.zeros(len(parts), heads, *extents, dtype=q.dtype, device=q.device)
    for b, q_b, k_b, lse_b in parts:
        seqlen_q, seqlen_k = q_b.shape[0], k_b.shape[0]
        if not seqlen_q or not seqlen_k:
            continue
        h = torch.arange(heads, device=q.device)[:, None, None]
        i = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)[:, None]
        j = torch.arange(seqlen_k, device=q.device)
        batch = torch.tensor(b, device=q.device)
        wide = lse.dtype
        k_b = k_b.repeat_interleave(heads // k_b.shape[1], 1)
        s = torch.einsum("ihd,jhd->hij", q_b.to(wide), k_b.to(wide)) * scale
        s = s if score is None else score.evaluate(dtype=wide, s=s, b=batch, h=h, i=i, j=j)
        p = torch.exp(s - lse_b[..., None])
        visible = torch.tensor(True, device=q.device) if mask is None else mask.evaluate(b=batch, h=h, i=i, j=j)
        p = torch.where(visible & (lse_b[..., None] != -torch.inf), p, 0.0)
        if dropout[1] is not None:
            keep = keep_mask(int(dropout[1]), dropout[0], b * heads + h, i, j)
            p = torch.where(keep, p, -p)
        result[b, :, :seqlen_q, :seqlen_k] = p.to(q.dtype)
    return result
