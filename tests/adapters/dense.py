"""Attention written out in a few lines of PyTorch, independent of tilewise, and the tolerance that follows from it."""

from __future__ import annotations

from collections.abc import Callable

import torch

Scores = Callable[[torch.Tensor], torch.Tensor]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None = None,
    scores: Scores | None = None,
    *,
    scale: float | None = None,
    keep: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, lse, p) for (batch, heads, seqlen, dim); `visible`, `keep` broadcast to (batch, heads, seqlen_q, seqlen_k).

    A row that sees nothing gives o = 0, lse = -inf, p = 0. Differentiable.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if scores is None else scores(s)
    seen = torch.ones_like(s, dtype=torch.bool) if visible is None else visible.expand_as(s)
    empty = ~seen.any(-1, keepdim=True)
    safe = s.masked_fill(~seen, -torch.inf).masked_fill(empty, 0.0)
    lse = torch.logsumexp(safe, -1, keepdim=True)
    p = torch.exp(safe - lse).masked_fill(empty, 0.0)
    dropped = p if keep is None else torch.where(keep, p / (1.0 - dropout), 0.0)
    return dropped @ v, lse.masked_fill(empty, -torch.inf)[..., 0], p


def assert_close(
    ours: torch.Tensor, reference: torch.Tensor, plain: torch.Tensor, what: str = "", size: float = 0.0
) -> None:
    """Error against float64 at most twice that of plain PyTorch at the same dtype, plus 16 units in the last place of
    the largest number, or of `size`, the largest sum of absolute terms, where terms cancel.
    """
    assert ours.shape == reference.shape, f"{what}: {tuple(ours.shape)}, expected {tuple(reference.shape)}"
    eps = torch.finfo(ours.dtype).eps
    ours, reference, plain = (x.detach().double() for x in (ours, reference, plain))
    finite = reference.isfinite()
    assert bool((finite | (ours == reference)).all()), f"{what}: infinities differ"
    if not bool(finite.any()):
        return
    worst, budget = (float((x - reference)[finite].abs().max()) for x in (ours, plain))
    floor = 16 * eps * max(size, float(reference[finite].abs().max()))
    assert worst <= 2.0 * budget + floor, f"{what}: error {worst:.3e}, plain PyTorch's {budget:.3e}"


def leaves(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Normal tensors that take gradients, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def as_double(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Float64 copies that take gradients of their own."""
    return [x.detach().double().requires_grad_() for x in tensors]


def as_leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that take gradients of their own."""
    return [x.detach().clone().requires_grad_() for x in tensors]
