"""Scores at the ends of float32: what every implementation makes of them."""

from __future__ import annotations

import torch

import tilewise as tw
from tilewise.testing.properties import Setting

LEAST = torch.finfo(torch.float32).min


def least_scores_are_hidden(setting: Setting, mask: tw.Mask | None, queries: int = 70) -> None:
    """A key that has the least float32 added is hidden, from rows that see nothing else too, and no gradient is NaN."""
    generator = torch.Generator().manual_seed(0)
    rows = (queries, 70, 70)
    q, k, v = (
        torch.randn(1, n, 2, 64, generator=generator).to(setting.device, setting.dtype).requires_grad_(queries == 70)
        for n in rows
    )
    bias = torch.zeros(2, 70, 70)
    bias[0, 30], bias[0, 68], bias[1, :, :40], bias[1, 7] = LEAST, LEAST, LEAST, -2.9e38
    bias = bias.to(setting.device)
    seen = tw.mask(lambda b, h, i, j: bias[h, i, j] == 0.0)
    given = {
        "score": {"mask": mask, "score": lambda s, b, h, i, j: s + bias[h, i, j]},
        "mask": {"mask": seen if mask is None else mask & seen},
    }
    found = {}
    for name, formulas in given.items():
        o, lse = tw.attention_with_lse(q, k, v, impl=setting.impl, **formulas)  # type: ignore[arg-type]
        found[name] = [o, lse, *(torch.autograd.grad(o.float().square().sum(), (q, k, v)) if q.requires_grad else ())]
    empty = found["mask"][1] == -torch.inf
    assert bool(empty[0, 0, -2])
    assert torch.equal(found["score"][1] == -torch.inf, empty)
    assert not found["score"][0].transpose(1, 2)[empty].any()
    allowed = 1e-4 if setting.dtype == torch.float32 else 0.02
    for one, other in zip(found["score"], found["mask"], strict=True):
        torch.testing.assert_close(one, other, rtol=allowed, atol=allowed)
