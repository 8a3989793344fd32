"""The specification, in float64, one row of output after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewise.ops.merge.problem import Call, lse_view, o_view


def _rows(
    call: Call, o_parts: list[torch.Tensor], lse_parts: list[torch.Tensor]
) -> Iterator[tuple[tuple[int, int], list[torch.Tensor], list[torch.Tensor]]]:
    """((batch, row), its states (heads, head_dim_v), their lse (heads,)), as views."""
    o_parts, lse_parts = [o_view(x, call.form) for x in o_parts], [lse_view(x, call.form) for x in lse_parts]
    if call.indptr is not None:
        ends = call.indptr.tolist()
        for row in range(len(ends) - 1):
            own = range(ends[row], ends[row + 1])
            yield (0, row), [o_parts[0][n, 0, 0] for n in own], [lse_parts[0][n, 0, :, 0] for n in own]
        return
    _, batch, seqlen, _, _ = o_parts[0].shape
    for b in range(batch):
        for row in range(seqlen):
            o = [x[n, b, row] for x in o_parts for n in range(x.shape[0])]
            lse = [x[n, b, :, row] for x in lse_parts for n in range(x.shape[0])]
            yield (b, row), o, lse


def _weighed(o: list[torch.Tensor], lse: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(states, weights, log-sum-exp) of one row in float64; states that saw no key are 0."""
    scores = torch.stack(lse).double()
    seen = scores > -torch.inf
    total = torch.logsumexp(scores, 0)
    weights = torch.where(scores == -torch.inf, 0.0, torch.softmax(scores, 0))
    states = torch.where((seen | scores.isnan())[..., None], torch.stack([x.double() for x in o]), 0.0)
    return states, weights, total


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse)"""
    merged, total = call.new_output(), call.new_lse()
    o = merged if merged.ndim == 4 else merged[None]
    lse = total if total.ndim == 3 else total[None]
    for (b, row), states, scores in _rows(call, list(call.o), list(call.lse)):
        if not states:
            o[b, row], lse[b, :, row] = 0.0, -torch.inf
            continue
        values, weights, lse[b, :, row] = _weighed(states, scores)
        o[b, row] = (weights[..., None] * values).sum(0)
    return merged, total


def backward(call: Call, do: torch.Tensor, dlse: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of every o and every lse."""
    grads_o = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in call.o]
    grads_lse = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in call.lse]
    do = do.double() if do.ndim == 4 else do.double()[None]
    dlse = dlse.double() if dlse.ndim == 3 else dlse.double()[None]
    rows = zip(_rows(call, list(call.o), list(call.lse)), _rows(call, grads_o, grads_lse), strict=True)
    for ((b, row), states, scores), (_, into_o, into_lse) in rows:
        if not states:
            continue
        values, weights, _ = _weighed(states, scores)
        o = (weights[..., None] * values).sum(0)
        for n, weight in enumerate(weights):
            seen = scores[n] != -torch.inf
            to_o = weight[:, None] * do[b, row]
            to_lse = weight * (dlse[b, :, row] + (do[b, row] * (values[n] - o)).sum(-1))
            into_o[n].copy_(torch.where(seen[:, None], to_o, 0.0))
            into_lse[n].copy_(torch.where(seen, to_lse, 0.0))
    return grads_o, grads_lse
