"""Cross entropy in PyTorch's own operations, which autograd differentiates as often as it is asked to. Logits are all
there at once, under a linear layer too.
"""

from __future__ import annotations

import torch

from tilewise.ops.cross_entropy.problem import Call, LinearCall, counted, wide_of


def forward(call: Call) -> tuple[torch.Tensor]:
    """The loss."""
    return (_loss(call, call.logits.to(wide_of(call.logits.dtype))),)


def linear_forward(call: LinearCall) -> tuple[torch.Tensor]:
    """The loss."""
    wide = wide_of(call.x.dtype)
    z = call.x.to(wide) @ call.weight.to(wide).t()
    if call.bias is not None:
        z = z + call.bias
    return (_loss(call, z if call.softcap is None else call.softcap * torch.tanh(z / call.softcap)),)


def _loss(call: Call | LinearCall, logits: torch.Tensor) -> torch.Tensor:
    seen = counted(call, call.target, logits.shape[-1])
    logits = logits.where(seen[..., None], 0.0)  # those of ignored tokens may be anything
    log_p = torch.log_softmax(logits, -1)
    losses = (call.label_smoothing - 1.0) * log_p.gather(-1, call.target.where(seen, 0)[..., None])[..., 0]
    if call.z_loss:
        losses = losses + call.z_loss * torch.logsumexp(logits, -1).square()
    if call.label_smoothing:
        losses = losses - call.label_smoothing * log_p.mean(-1)
    losses = losses.where(seen, 0.0)
    if call.reduction == "none":
        return losses
    return losses.sum() / seen.sum(dtype=losses.dtype) if call.reduction == "mean" else losses.sum()
