"""Tiles taken by sorting rows, in PyTorch."""

from __future__ import annotations

import torch

from tilewise.ops.select.problem import SLACK, Call
from tilewise.schedule.tilemap import EMPTY

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills kept."""
    seen = (call.classes != EMPTY).expand(call.scores.shape)
    least, amount = (x.double().view(-1, 1, 1) for x in (call.least, call.amount))
    judged = seen
    if call.similar_k is not None:
        alike = call.similar_k.repeat_interleave(call.group, 1)[:, :, None] > least
        judged = seen & alike
    scores = call.scores.masked_fill(~judged, -torch.inf)
    every = (scores.isnan() | (scores == torch.inf)).any(-1, keepdim=True)
    if call.similar_q is not None:
        every = every | ~(call.similar_q[..., None] > least)
    # what is not judged stands behind the rest, also behind scores of -inf
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    order = order.gather(-1, torch.argsort(judged.gather(-1, order).byte(), dim=-1, descending=True, stable=True))
    ordered = scores.gather(-1, order).double()
    top = ordered[..., :1] if scores.shape[-1] else ordered
    weights = torch.exp(ordered - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    place = torch.arange(scores.shape[-1], device=scores.device)
    if call.kind == "mass":
        taken = (weights.cumsum(-1) - weights < amount * total) | (amount >= 1.0) | (total == 0.0)
    elif call.kind == "count":
        taken = place < amount
    elif call.kind == "share":
        taken = place < torch.ceil(amount * SLACK * seen.sum(-1, keepdim=True))
    else:
        taken = weights >= amount * total
    taken = (taken | (place == 0)).expand(scores.shape)
    kept = torch.zeros_like(seen).scatter_(-1, order, taken) & judged
    results["kept"].copy_(torch.where(every, seen, kept | (seen & ~judged)))
