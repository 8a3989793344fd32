"""The loss of a language model: cross entropy of logits, and of the linear layer that would make them."""

from __future__ import annotations

import torch

from tilewise.ops.cross_entropy.problem import make_call, make_linear_call
from tilewise.ops.cross_entropy.table import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    impl: str | None = None,
) -> torch.Tensor:
    """lse - (1 - e) logits[target] - e mean(logits) + z_loss lse^2 for each token, with e = label_smoothing.

    Logits are read once for the loss, with maximum and sum found together (Milakov and Gimelshein 2018), and once for
    their gradient; no probabilities are kept. The z-loss is that of PaLM (Chowdhery et al. 2022).

    Args:
        logits: (tokens..., vocabulary), float16, bfloat16, float32 or float64; unit stride in vocabulary is read as it
            lies.
        target: (tokens...) int64, classes from 0 to vocabulary - 1, or `ignore_index`. Others are an error where values
            are read (on a CPU, and with TILEWISE_DEBUG=1 on a GPU), and elsewhere ignored.
        ignore_index: tokens with this target give no loss and zero gradients, and their logits are not read.
        label_smoothing: from 0 to 1, as torch.nn.functional.cross_entropy has it.
        z_loss: 0 or more.
        reduction: "mean" over tokens that are not ignored (NaN where there is none, as PyTorch gives), "sum" or "none".
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or for "none" in the shape of target. Differentiable in
        logits. Second derivatives, `torch.func` and forward mode go through PyTorch's operations, which keep
        probabilities.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
    """
    call = make_call(logits, target, ignore_index, label_smoothing, z_loss, reduction)
    return _of_some(CROSS_ENTROPY(call, impl)[0], target, reduction)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """`cross_entropy(x @ weight.T + bias, target)` without logits of more than `chunk` tokens at a time.

    The forward takes one chunk after another: its logits, its losses, the gradient written over the logits, and what
    that gives x, weight and bias. The backward multiplies by what comes in (Hsu et al., "Liger Kernel", 2024). With
    "none" each token has an incoming gradient of its own, so the backward computes logits again, as Cut Your Losses
    (Wijmans et al. 2024) does. The gradient of weight is rounded once for
    each chunk.

    Args:
        x: (tokens..., hidden), float16, bfloat16, float32 or float64.
        weight: (vocabulary, hidden), of the dtype of x.
        target: (tokens...) int64, as `cross_entropy` takes it.
        bias: (vocabulary,), of the dtype of x.
        softcap: above 0: logits are softcap tanh(logits / softcap), as in Gemma 2.
        chunk: tokens whose logits are there at a time; None takes an eighth of them, or 1024 where that is more.
        ignore_index, label_smoothing, z_loss, reduction, impl: as `cross_entropy` has them.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or for "none" in the shape of target. Differentiable in x,
        weight and bias; second derivatives, `torch.func` and forward mode go through PyTorch's operations, with the
        logits of all tokens at once. Logits are rounded to the dtype of x, as a linear layer rounds them; gradients
        are rounded to it before they are multiplied by what comes in. In float16, which such sums may leave, those of
        weight and bias are kept in float32 until then, and take twice the memory.

    Raises InputError and UnsupportedError as `cross_entropy` does.
    """
    call = make_linear_call(x, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, reduction, chunk)
    return _of_some(LINEAR_CROSS_ENTROPY(call, impl)[0], target, reduction)


def _of_some(loss: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """The mean over no tokens is NaN with gradients of 0, as PyTorch has it; operations give 0 for empty calls."""
    return loss + torch.nan if reduction == "mean" and target.numel() == 0 else loss
