"""The specification, one row and head after another, in float64."""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.token_rest.problem import Call


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    for name in ("o", "lse"):
        results[name].copy_(getattr(call, name))
    for row, head, query in itertools.product(range(call.o.shape[0]), range(call.heads), range(call.group)):
        length, h = int(call.lengths[row]), head * call.group + query
        logs = (x[row, head, query].double().logsumexp(-1) for x in (call.seen, call.read))
        more = float(next(logs) - next(logs))
        lse = call.lse[row, h].double()
        if length <= call.width or lse == -torch.inf or not more > 0.0:
            continue
        total = call.values[row, head].double().sum(0)
        if call.last is not None:
            total += call.last[row, head]
        share = torch.exp(torch.tensor(-more, dtype=torch.float64, device=lse.device))
        results["o"][row, h] = (share * call.o[row, h].double() + (1.0 - share) * total / length).to(call.o.dtype)
        results["lse"][row, h] = (lse + more).to(call.lse.dtype)
