"""The specification, in float64, one token after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.ops.cross_entropy.problem import Call, LinearCall, Tensors, counted


def _token(call: Call | LinearCall, s: torch.Tensor, label: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, its gradient) for the logits of one token."""
    log_p, lse = torch.log_softmax(s, 0), torch.logsumexp(s, 0)
    wanted = torch.full_like(s, call.label_smoothing / len(s))
    wanted[label] += 1.0 - call.label_smoothing
    loss = -(wanted * log_p)[wanted > 0.0].sum() + call.z_loss * lse**2
    return loss, log_p.exp() * (1.0 + 2.0 * call.z_loss * lse) - wanted


def _mean_of(call: Call | LinearCall, losses: torch.Tensor, vocabulary: int, results: Tensors) -> None:
    """Fills loss and scale."""
    number = counted(call, call.target, vocabulary).sum().double()
    if call.reduction == "mean":
        results["scale"].copy_(1.0 / number.clamp(min=1.0))
    total = losses.view(call.target.shape) if call.reduction == "none" else losses.sum()
    results["loss"].copy_(total / number if call.reduction == "mean" else total)


def _factors(call: Call | LinearCall, kept: Tensors, incoming: torch.Tensor) -> torch.Tensor:
    """What the gradient of each token's loss is multiplied by: one number, but for "none"."""
    return incoming.double().reshape(-1) * (kept["scale"] if call.reduction == "mean" else 1.0)


def forward(call: Call, results: Tensors) -> None:
    """Fills loss, top, log_sum and scale."""
    logits = call.logits.reshape(-1, call.logits.shape[-1])
    target = call.target.reshape(-1)
    losses = torch.zeros(len(logits), dtype=torch.float64)
    for n, seen in enumerate(counted(call, target, logits.shape[1])):
        s = logits[n].double()
        results["top"][n], results["log_sum"][n] = _sum_of(s)
        if seen:
            losses[n], _ = _token(call, s, int(target[n]))
    _mean_of(call, losses, logits.shape[1], results)


def backward(call: Call, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradient of the logits."""
    logits, target = call.logits.reshape(-1, call.logits.shape[-1]), call.target.reshape(-1)
    factors = _factors(call, kept, incoming[0]).expand(len(logits))
    into = gradients["logits"].view(logits.shape).zero_()
    for n, seen in enumerate(counted(call, target, logits.shape[1])):
        if seen:
            into[n] = factors[n] * _token(call, logits[n].double(), int(target[n]))[1]


def linear_forward(call: LinearCall, results: Tensors) -> None:
    """Fills loss, top, log_sum and scale, and the early gradients."""
    losses, sums = _visit(call, torch.ones(call.target.numel()), {name: results[f"d{name}"] for name in call.early})
    for name, values in zip(("top", "log_sum"), sums, strict=True):
        results[name].copy_(values[: results[name].numel()])
    _mean_of(call, losses, call.weight.shape[0], results)


def linear_backward(call: LinearCall, kept: Tensors, incoming: Sequence[torch.Tensor], gradients: Tensors) -> None:
    """Fills the gradients."""
    factors = _factors(call, kept, incoming[0])
    if call.reduction == "none":
        _visit(call, factors, gradients)
        return
    for name, gradient in gradients.items():
        gradient.copy_(kept[f"d{name}"].double() * factors)


def _sum_of(s: torch.Tensor) -> torch.Tensor:
    """The largest logit of a token, and the log of the sum of exponentials relative to it."""
    top = s.max().clamp(min=torch.finfo(s.dtype).min)
    return torch.stack((top, torch.logsumexp(s - top, 0)))


def _visit(call: LinearCall, factors: torch.Tensor, gradients: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, (top, log_sum)), with the gradients filled, every token's multiplied by its factor."""
    x, weight, target = call.x.reshape(-1, call.x.shape[-1]).double(), call.weight.double(), call.target.reshape(-1)
    sums = {"x": torch.zeros_like(x), "weight": torch.zeros_like(weight), "bias": torch.zeros_like(weight[:, 0])}
    losses, found = torch.zeros(len(x), dtype=torch.float64), torch.zeros(2, len(x), dtype=torch.float64)
    for n, seen in enumerate(counted(call, target, len(weight))):
        z = weight @ x[n] if call.bias is None else weight @ x[n] + call.bias.double()
        t = z if call.softcap is None else torch.tanh(z / call.softcap)
        s = z if call.softcap is None else call.softcap * t
        found[:, n] = _sum_of(s)
        if not seen:
            continue
        losses[n], slope = _token(call, s, int(target[n]))
        slope = factors[n] * (slope if call.softcap is None else slope * (1.0 - t**2))
        sums["x"][n] = slope @ weight
        sums["weight"] += slope[:, None] * x[n]
        sums["bias"] += slope
    for name, gradient in gradients.items():
        gradient.copy_(sums[name].view(gradient.shape))
    return losses, found
