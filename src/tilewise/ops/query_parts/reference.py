"""The specification, one row and head after another, in float64."""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.query_parts.problem import Call


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    for row, head in itertools.product(range(call.q.shape[0]), range(call.heads)):
        q = call.q[row, head * call.group : (head + 1) * call.group].double()
        sums = q.abs().sum(0)
        sums = torch.where(sums.isfinite(), sums, torch.inf)
        dims = sorted(torch.argsort(sums, descending=True, stable=True)[: call.rank].tolist())
        part = q[:, dims]
        warmer = (q.abs().sum(-1) / part.abs().sum(-1).clamp(min=1e-30)).sqrt()
        results["dims"][row, head] = torch.tensor(dims)
        results["parts"][row, head] = part * (call.scale * warmer)[:, None]
