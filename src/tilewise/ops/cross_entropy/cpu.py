"""Cross entropy in PyTorch, in float32 (float64 for float64) whatever the inputs are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.cross_entropy.problem import Call, LinearCall, Tensors, counted, wide_of


def forward(call: Call, results: Tensors) -> None:
    """Fills loss, top, log_sum and scale."""
    losses, top, log_sum = _losses(call, _wide_rows(call.logits), call.target.reshape(-1))
    results["top"].copy_(top)
    results["log_sum"].copy_(log_sum)
    _reduce(call, losses, call.logits.shape[-1], results)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradient of the logits."""
    logits, target = _wide_rows(call.logits), call.target.reshape(-1)
    slopes = _slopes(call, logits, target, kept["top"], kept["log_sum"])
    slopes *= _factor(call, kept, incoming[0]).reshape(-1, 1)
    gradients["logits"].copy_(slopes.view(call.logits.shape))


def linear_forward(call: LinearCall, results: Tensors) -> None:
    """Fills loss, top, log_sum and scale, and the early gradients."""
    target = call.target.reshape(-1)
    losses = torch.empty(target.shape, dtype=results["loss"].dtype)
    top, log_sum = torch.empty_like(losses), torch.empty_like(losses)
    sums = _sums(call, call.early)
    for rows in call.chunks():
        z, logits = _logits(call, rows)
        losses[rows], top[rows], log_sum[rows] = _losses(call, logits, target[rows])
        if call.early:
            slopes = _slopes(call, logits, target[rows], top[rows], log_sum[rows])
            _add(call, sums, rows, _uncapped(call, z, slopes))
    for name, total in sums.items():
        results[f"d{name}"].copy_(total.view(results[f"d{name}"].shape))
    results["top"].copy_(top[: results["top"].numel()])
    results["log_sum"].copy_(log_sum[: results["log_sum"].numel()])
    _reduce(call, losses, call.weight.shape[0], results)


def linear_backward(call: LinearCall, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradients: scales the early ones, or computes logits again."""
    factor = _factor(call, kept, incoming[0])
    if call.reduction != "none":
        for name, gradient in gradients.items():
            gradient.copy_(kept[f"d{name}"].to(factor.dtype) * factor)
        return
    target, factor = call.target.reshape(-1), factor.reshape(-1, 1)
    sums = _sums(call, tuple(gradients))
    for rows in call.chunks():
        z, logits = _logits(call, rows)
        slopes = factor[rows] * _slopes(call, logits, target[rows], kept["top"][rows], kept["log_sum"][rows])
        _add(call, sums, rows, _uncapped(call, z, slopes))
    for name, total in sums.items():
        gradients[name].copy_(total.view(gradients[name].shape))


def _wide_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).to(wide_of(x.dtype))


def _losses(call: Call | LinearCall, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(loss, largest logit, log of the sum of exponentials relative to it) of each token."""
    seen = counted(call, target, logits.shape[1])
    top = logits.amax(1)
    top = top.where(top != -torch.inf, 0.0)
    below = logits - top[:, None]
    own = below.gather(1, target.where(seen, 0)[:, None])[:, 0]
    mean = below.mean(1) if call.label_smoothing else None
    log_sum = below.exp_().sum(1).log_()
    lse = top + log_sum
    loss = (1.0 - call.label_smoothing) * (log_sum - own) + call.z_loss * lse * lse
    if mean is not None:
        loss += call.label_smoothing * (log_sum - mean)
    return loss.where(seen, 0.0), top, log_sum


def _slopes(
    call: Call | LinearCall, logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor, log_sum: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sum of all losses in the logits."""
    seen = counted(call, target, logits.shape[1])
    slopes = torch.sub(logits, top[:, None]).sub_(log_sum[:, None]).exp_()
    if call.z_loss:
        slopes *= (1.0 + 2.0 * call.z_loss * (top + log_sum))[:, None]
    if call.label_smoothing:
        slopes -= call.label_smoothing / logits.shape[1]
    own = torch.full_like(top, call.label_smoothing - 1.0)[:, None]
    slopes.scatter_add_(1, target.where(seen, 0)[:, None], own)
    return slopes if seen.all() else slopes.masked_fill_(~seen[:, None], 0.0)


def _reduce(call: Call | LinearCall, losses: torch.Tensor, vocabulary: int, results: Tensors) -> None:
    """Fills loss and scale."""
    if call.reduction == "none":
        results["loss"].copy_(losses.view(call.target.shape))
        return
    total = losses.sum()
    if call.reduction == "mean":
        number = counted(call, call.target, vocabulary).sum(dtype=total.dtype)
        results["scale"].copy_(1.0 / number.clamp(min=1.0))
        total = total / number
    results["loss"].copy_(total)


def _factor(call: Call | LinearCall, kept: Tensors, incoming: torch.Tensor) -> torch.Tensor:
    """What the gradient of the sum is multiplied by."""
    return incoming * kept["scale"] if call.reduction == "mean" else incoming


# the linear layer ----------------------------------------------------------------------------------------------------


def _logits(call: LinearCall, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a chunk before and behind the cap."""
    z = _wide_rows(call.x)[rows] @ call.weight.to(wide_of(call.x.dtype)).t()
    if call.bias is not None:
        z += call.bias
    return z, z if call.softcap is None else call.softcap * torch.tanh(z / call.softcap)


def _uncapped(call: LinearCall, z: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    return slopes if call.softcap is None else slopes * (1.0 - torch.tanh(z / call.softcap) ** 2)


def _sums(call: LinearCall, wanted: Sequence[str]) -> Tensors:
    wide = wide_of(call.x.dtype)
    sizes = {"x": (call.target.numel(), call.x.shape[-1]), "weight": call.weight.shape, "bias": call.weight.shape[:1]}
    return {name: torch.zeros(sizes[name], dtype=wide) for name in wanted}


def _add(call: LinearCall, sums: Tensors, rows: slice, slopes: torch.Tensor) -> None:
    """What a chunk adds to the gradients."""
    if "x" in sums:
        sums["x"][rows] = slopes @ call.weight.to(slopes.dtype)
    if "weight" in sums:
        sums["weight"].addmm_(slopes.t(), _wide_rows(call.x)[rows])
    if "bias" in sums:
        sums["bias"] += slopes.sum(0)
