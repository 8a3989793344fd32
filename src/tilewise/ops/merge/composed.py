"""Merging in PyTorch's own operations, which autograd differentiates as often as it is asked to."""

from __future__ import annotations

import torch

from tilewise.ops.merge.problem import Call, lse_view, o_view


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse)"""
    if call.indptr is not None:
        return _ragged(call, call.indptr)
    lse = torch.cat([lse_view(x, call.form) for x in call.lse])  # (states, batch, heads, seqlen)
    o = torch.cat([o_view(x.to(call.wide), call.form) for x in call.o])
    shift = _shift(lse.detach().amax(0))
    weights = torch.exp(lse - shift)
    total = weights.sum(0)
    share = (weights / total.masked_fill(total == 0.0, 1.0)).transpose(2, 3)[..., None]
    unseen = (lse == -torch.inf).transpose(2, 3)[..., None]
    merged = (o.masked_fill(unseen, 0.0) * share).sum(0)
    new_o, new_lse = call.new_output(), call.new_lse()
    return merged.reshape(new_o.shape).to(call.dtype), _log(shift, total).reshape(new_lse.shape)


def _ragged(call: Call, indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse, o = call.lse[0].t(), call.o[0].to(call.wide)
    rows = indptr.shape[0] - 1
    row = torch.repeat_interleave(torch.arange(rows, device=lse.device), indptr.long().diff())
    top = torch.full((rows, lse.shape[1]), -torch.inf, dtype=lse.dtype, device=lse.device)
    shift = _shift(top.scatter_reduce(0, row[:, None].expand_as(lse), lse.detach(), "amax"))
    weights = torch.exp(lse - shift[row])
    total = torch.zeros_like(top).index_add(0, row, weights)
    share = weights / total.masked_fill(total == 0.0, 1.0)[row]
    parts = o.masked_fill((lse == -torch.inf)[..., None], 0.0) * share[..., None]
    merged = torch.zeros((rows, *o.shape[1:]), dtype=o.dtype, device=o.device).index_add(0, row, parts)
    return merged.to(call.dtype), _log(shift, total).t()


def _shift(top: torch.Tensor) -> torch.Tensor:
    """What is taken out of the exponents: the largest lse, or 0 where that is infinite."""
    return top.masked_fill(top.isinf(), 0.0)


def _log(shift: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp; -inf, without a gradient, where no state is seen."""
    nothing = total == 0.0
    return (shift + torch.log(total.masked_fill(nothing, 1.0))).masked_fill(nothing, -torch.inf)
