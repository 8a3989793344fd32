"""How the demo's model learns in a few hundred steps: Muon for the matrices, AdamW for the embedding and the norms.

Muon (Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks") makes every matrix update orthogonal. It
runs in fp32 here, so that two runs differ by nothing but their attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The matrix with its singular values brought near 1, by Muon's quintic Newton-Schulz iteration."""
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.mT
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum 0.95 (Nesterov), orthogonalized; decoupled weight decay. `lr` is the step's spectral size."""

    def __init__(self, matrices: Iterable[Tensor], weight_decay: float = 0.02) -> None:
        self.matrices = list(matrices)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 0.05)
            update = orthogonalize(matrix.grad.lerp(momentum, 0.95))
            matrix.mul_(1 - lr * self.weight_decay)
            matrix.add_(update, alpha=-lr * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))


class Optimizer:
    """Muon on the hidden matrices, AdamW on the rest; `step(share)` scales both learning rates."""

    def __init__(self, model: nn.Module, *, lr_matrices: float = 0.02, lr_rest: float = 1e-2) -> None:
        named = list(model.named_parameters())
        hidden = [p for name, p in named if p.dim() == 2 and not name.startswith("embedding")]
        rest = [p for name, p in named if p.dim() != 2 or name.startswith("embedding")]
        self.model, self.lr_matrices, self.lr_rest = model, lr_matrices, lr_rest
        self.muon = Muon(hidden)
        self.adam = torch.optim.AdamW(rest, lr=lr_rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, share: float) -> None:
        """Apply the gradients at `share` (0 to 1) of the learning rates, then drop them."""
        nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = share * self.lr_rest
        self.adam.step()
        self.muon.step(share * self.lr_matrices)
        self.model.zero_grad(set_to_none=True)


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate at `step` of `steps`: warm-up over a twentieth (at least 10), a cosine down to 5 %."""
    warm = min(1.0, (step + 1) / max(10, steps // 20))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
