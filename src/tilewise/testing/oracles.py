"""Dense attention in plain PyTorch: in float64 the truth, in the problem's dtype what a user would write by hand.

Nothing here traces a formula or shares code with an implementation, the dropout bits excepted (`tilewise.core.philox`,
which has tests of its own against the published vectors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.core.philox import keep_mask
from tilewise.testing.inputs import SEED, Inputs


@dataclass
class Dense:
    """One batch of dense attention with everything that it computed on the way."""

    o: torch.Tensor  # (batch, seqlen_q, heads, head_dim_v)
    lse: torch.Tensor  # (batch, heads, seqlen_q)
    raw: torch.Tensor  # (batch, heads, seqlen_q, seqlen_k): scaled dot products
    final: torch.Tensor  # after the score formula, before the mask
    visible: torch.Tensor
    keep: torch.Tensor  # what dropout multiplies weights by


def dense(inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int = 0) -> Dense:
    """softmax(score(scale q k^T) where mask) v with every score in memory, rounded as PyTorch's operators round.

    Matmuls and scores are in the dtype of q, the softmax in float32 (float64 for float64), its weights rounded to the
    dtype of v, as models spell it in eager mode. q, k, v are (batch, seqlen, heads, dim); `first` is the batch index
    of the first element.
    """
    case, device = inputs.case, q.device
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(case.group, 2).transpose(1, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    raw = torch.matmul(q.transpose(1, 2), k.transpose(-1, -2)) * scale
    b = torch.arange(first, first + batch, device=device)[:, None, None, None]
    h = torch.arange(case.heads_q, device=device)[:, None, None]
    i = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)
    final = raw if inputs.score is None else inputs.score.plain(raw, b, h, i, j)
    visible = torch.ones((), dtype=torch.bool, device=device)
    if inputs.mask is not None:
        visible = inputs.mask.plain(b, h, i, j)
    visible = visible.expand(final.shape)
    s = torch.where(visible, final.to(wide), -torch.inf)
    if inputs.sink is not None:
        s = torch.cat([s, inputs.sink.to(wide)[:, None, None].expand(*s.shape[:-1], 1)], -1)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = torch.where(empty, 0.0, s)
    p = torch.where(empty, 0.0, torch.softmax(s, -1))[..., :seqlen_k].to(v.dtype)
    if s.shape[-1]:
        lse = torch.where(empty[..., 0], -torch.inf, torch.logsumexp(s, -1))
    else:
        lse = s.new_full(s.shape[:-1], -torch.inf)
    keep = torch.ones((), dtype=v.dtype, device=device)
    if case.dropout:
        kept = keep_mask(SEED, case.dropout, b * case.heads_q + h, i, j)
        keep = kept.to(v.dtype) / (1.0 - case.dropout)
    return Dense(torch.matmul(p * keep, v).transpose(1, 2), lse, raw, final, visible, keep)


def parts(inputs: Inputs) -> list[tuple[Dense, slice, slice]]:
    """Dense results with the rows of q and k that they speak for: one, or one for each packed sequence."""
    case = inputs.case
    if case.packed is None:
        return [(dense(inputs, inputs.q, inputs.k, inputs.v), slice(None), slice(None))]
    found = []
    start_q = start_k = 0
    for b, (len_q, len_k) in enumerate(case.packed):
        rows, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        one = dense(inputs, inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys], b)
        found.append((one, rows, keys))
        start_q, start_k = start_q + len_q, start_k + len_k
    return found


def joined(inputs: Inputs, found: list[tuple[Dense, slice, slice]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) in the case's layout."""
    if inputs.case.packed is None:
        return found[0][0].o, found[0][0].lse
    return torch.cat([one.o[0] for one, _, _ in found]), torch.cat([one.lse[0] for one, _, _ in found], 1)


def gradients(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of every leaf by autograd, for the upstream gradients of `inputs`."""
    leaves = inputs.leaves()
    outputs, upstream = [o], [inputs.do.to(o.dtype)]
    if inputs.dlse is not None:
        outputs, upstream = [o, lse], [*upstream, inputs.dlse.to(lse.dtype)]
    found = torch.autograd.grad(
        outputs, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return dict(zip(leaves, found, strict=True))
