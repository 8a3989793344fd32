"""Merging in PyTorch: weights from all lse at once, then one state after another is added to the sums.

The largest lse is taken out of the exponents where it is finite, so weights do not overflow. A state with lse -inf is
unseen: its weight is 0 and its o is not used, NaN or not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.ops.merge.problem import Call, lse_view, o_view

Tensors = list[torch.Tensor]


class Weights(NamedTuple):
    """Of every state (first dimension), which are unseen, and the log-sum-exp of their rows."""

    weights: torch.Tensor
    unseen: torch.Tensor
    lse: torch.Tensor


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse)"""
    if call.indptr is not None:
        return _ragged_forward(call, call.indptr)
    merged, lse = call.new_output(), call.new_lse()
    weights, unseen, total = _weights(call)
    lse.copy_(total.view(lse.shape))
    acc = torch.zeros(_states(call)[0].shape, dtype=call.wide, device=merged.device)
    for o, weight, hidden in zip(_states(call), weights, unseen, strict=True):
        acc.addcmul_(_used(o.to(call.wide), hidden), weight[..., None])
    merged.copy_(acc.view(merged.shape))
    return merged, lse


def backward(call: Call, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Gradients of every o and every lse."""
    if call.indptr is not None:
        return _ragged_backward(call, call.indptr, do, dlse)
    grads_o = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call.o]
    grads_lse = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call.lse]
    into_o = [part for x in grads_o for part in o_view(x, call.form)]
    into_lse = [part for x in grads_lse for part in lse_view(x, call.form)]
    weights, unseen, _ = _weights(call)
    do = do.to(call.wide) if do.ndim == 4 else do.to(call.wide)[None]
    dlse = (dlse if dlse.ndim == 3 else dlse[None]).transpose(1, 2)
    onto = torch.stack([_dot(do, o, hidden) for o, hidden in zip(_states(call), unseen, strict=True)])
    mean = (weights * onto).sum(0)
    found = _used(weights * (dlse + (onto - mean)), unseen)
    for n, weight in enumerate(weights):
        into_o[n].copy_(_used(do * weight[..., None], unseen[n]))
        into_lse[n].copy_(found[n].transpose(1, 2))
    return grads_o, grads_lse


def _states(call: Call) -> Tensors:
    """Every o, (batch, seqlen, heads, head_dim_v)."""
    return [part for x in call.o for part in o_view(x, call.form)]


def _weights(call: Call) -> Weights:
    """Weights (states, batch, seqlen, heads); the log-sum-exp is (batch, heads, seqlen)."""
    lse = torch.cat([lse_view(x, call.form) for x in call.lse])
    shift = _finite(lse.amax(0))
    weights = torch.exp(lse - shift)
    total = weights.sum(0)
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    return Weights(weights.transpose(2, 3), (lse == -torch.inf).transpose(2, 3), shift + torch.log(total))


def _finite(top: torch.Tensor) -> torch.Tensor:
    """What is taken out of the exponents: the largest lse, or 0 where that is infinite."""
    return top.masked_fill(top.isinf(), 0.0)


def _used(x: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """`x` (a number or a row for each of `unseen`), 0 for states that are unseen."""
    if not unseen.any():
        return x
    return x.masked_fill(unseen if x.ndim == unseen.ndim else unseen[..., None], 0.0)


def _dot(do: torch.Tensor, o: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """<do, o> along head_dim_v."""
    return _used((do * o.to(do.dtype)).sum(-1), unseen)


# any number of states in a row -------------------------------------------------------------------------------------


def _ragged_forward(call: Call, indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (weights, unseen, total), row = _ragged_weights(call, indptr)
    o, lse = call.new_output(), call.new_lse()
    parts = _used(call.o[0].to(call.wide), unseen) * weights[..., None]
    o.copy_(torch.zeros(o.shape, dtype=call.wide, device=o.device).index_add_(0, row, parts))
    lse.copy_(total.t())
    return o, lse


def _ragged_backward(call: Call, indptr: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Tensors, Tensors]:
    (weights, unseen, total), row = _ragged_weights(call, indptr)
    spread = do.to(call.wide)[row]
    onto = _dot(spread, call.o[0], unseen)
    mean = torch.zeros_like(total).index_add_(0, row, weights * onto)
    into_lse = _used(weights * (dlse.t()[row] + (onto - mean[row])), unseen)
    into_o = _used(spread * weights[..., None], unseen)
    return [into_o.to(call.o[0].dtype)], [into_lse.t().contiguous()]


def _ragged_weights(call: Call, indptr: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """Weights (total_states, heads), the log-sum-exp (rows, heads), and the row of each state."""
    lse = call.lse[0].t()
    rows = indptr.shape[0] - 1
    row = torch.repeat_interleave(torch.arange(rows, device=lse.device), indptr.long().diff())
    top = torch.full((rows, lse.shape[1]), -torch.inf, dtype=lse.dtype, device=lse.device)
    shift = _finite(top.scatter_reduce_(0, row[:, None].expand_as(lse), lse, "amax"))
    weights = torch.exp(lse - shift[row])
    total = torch.zeros_like(top).index_add_(0, row, weights)
    weights = weights / total.masked_fill(total == 0.0, 1.0)[row]
    return Weights(weights, lse == -torch.inf, shift + torch.log(total)), row
