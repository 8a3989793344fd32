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


SIZES = (1e3, 1e6, 1e9, 1e30)


def low_rows_are_means(setting: Setting, size: float, *, queries: int = 70, kept: bool = False) -> None:
    """A row all of whose scores are -size has the mean of its values, and makes no gradient NaN: the right one if that
    is `kept`; else none beyond 2**22, and none where what comes in is 0, as behind a mask of padding.
    """
    generator = torch.Generator().manual_seed(1)
    backward = queries == 70
    q, k, v, do = (
        torch.randn(1, n, 2, 64, generator=generator).to(setting.device, setting.dtype)
        for n in (queries, 70, 70, queries)
    )
    low = torch.zeros(70, dtype=torch.bool, device=setting.device)
    low[[3, 40, 67, 69]] = True
    without = do.clone()
    without[:, low[70 - queries :]] = 0.0
    if not kept and size < 2**22:  # where a log-sum in float32 has too little of the weights for a comparison
        do = without
    score = tw.score(lambda s, b, h, i, j: torch.where(low[i], -size, s))
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    o, lse = tw.attention_with_lse(*leaves, score=score, impl=setting.impl)
    got = [o, *(torch.autograd.grad(o, leaves, do) if backward else ())]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    s = torch.einsum("bihd,bjhd->bhij", wide[0], wide[1]) / 8
    s = torch.where(low[70 - queries :, None], -size, s)
    want = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), wide[2])
    counted = do if kept else without
    truth = [want, *(torch.autograd.grad(want, wide, counted.double()) if backward else ())]
    rows = lse.transpose(1, 2)[:, low[70 - queries :]]
    torch.testing.assert_close(rows, torch.full_like(rows, -size), rtol=1e-6, atol=5.0)
    allowed = 1e-5 if setting.dtype == torch.float32 else 0.02
    for one, other in zip(got, truth, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=allowed, atol=allowed * (1 + float(other.detach().abs().max()))
        )


def no_sink_adds_nothing(setting: Setting, *, queries: int = 70) -> None:
    """A sink of -inf changes nothing, neither where a row sees keys nor where it sees none."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(1, n, 2, 64, generator=generator).to(setting.device, setting.dtype).requires_grad_(queries == 70)
        for n in (queries, 70, 70)
    )
    odd = tw.mask(lambda b, h, i, j: (i + h) % 2 == 0)
    for score in (None, tw.score(lambda s, b, h, i, j: abs(s))):
        found = []
        for sink in (None, torch.full((2,), -torch.inf, device=setting.device)):
            o, lse = tw.attention_with_lse(q, k, v, mask=odd, score=score, sink=sink, impl=setting.impl)
            grads = torch.autograd.grad(o.float().square().sum(), (q, k, v)) if q.requires_grad else ()
            found.append([o, lse, *grads])
        assert bool((found[0][1] == -torch.inf).any())
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 if setting.dtype == torch.float32 else 0.01)
