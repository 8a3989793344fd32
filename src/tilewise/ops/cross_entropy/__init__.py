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
    """The loss of each token: lse - (1 - e) logits[target] - e mean(logits) + z_loss lse^2, with e = label_smoothing.

    Logits are read once for the loss, maximum and sum together, and once for their gradient; probabilities are not
    kept. Differentiable in logits; second derivatives, `torch.func` and forward mode run in PyTorch's operations, which
    keep probabilities.

    Args:
        logits: (tokens..., vocabulary), float16, bfloat16, float32 or float64; without unit stride in vocabulary they
            are copied first.
        target: (tokens...) int64, classes from 0 to vocabulary - 1, or `ignore_index`. Others are an error where values
            are read (on a CPU, and with TILEWISE_DEBUG=1 on a GPU), and elsewhere ignored.
        ignore_index: tokens with this target have no loss and zero gradients; their logits are not read.
        label_smoothing: from 0 to 1, as in `torch.nn.functional.cross_entropy`.
        z_loss: 0 or more.
        reduction: "mean" over tokens that are not ignored (NaN where there is none, as in PyTorch), "sum" or "none".
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or with "none" in the shape of target.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Chowdhery et al., "PaLM", 2022
    (z-loss).

    Example:
        >>> loss = tw.cross_entropy(torch.randn(100, 1000), torch.randint(1000, (100,)), z_loss=1e-4)
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
    """`cross_entropy(x @ weight.T + bias, target)`, with the logits of at most `chunk` tokens in memory at a time.

    The forward takes one chunk after another: its logits, its losses, the gradient in place of the logits, and what
    that adds to the gradients of x, weight and bias. The backward multiplies these by the incoming gradient. With
    "none" each token has an incoming gradient of its own: the backward computes logits again. Differentiable in x,
    weight and bias; second derivatives, `torch.func` and forward mode run in PyTorch's operations, with the logits of
    all tokens at once.

    Args:
        x: (tokens..., hidden), float16, bfloat16, float32 or float64.
        weight: (vocabulary, hidden), of the dtype of x.
        target: (tokens...) int64, as in `cross_entropy`.
        bias: (vocabulary,), of the dtype of x; None is 0.
        softcap: above 0: logits are softcap tanh(logits / softcap), as in Gemma 2. None leaves them as they are.
        chunk: tokens whose logits are in memory at a time; None is an eighth of them, or 1,024 where that is more.
        ignore_index, label_smoothing, z_loss, reduction, impl: as in `cross_entropy`.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or with "none" in the shape of target. Logits, and gradients
        before the incoming gradient multiplies them, are rounded to the dtype of x; the gradient of weight once for
        each chunk. For float16, whose range such sums may exceed, gradients of weight and bias are summed in float32,
        which takes twice the memory.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Hsu et al., "Liger Kernel", 2024; Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
    2024 (for "none").

    Example:
        >>> x, weight = torch.randn(100, 64), torch.randn(1000, 64, requires_grad=True)
        >>> tw.linear_cross_entropy(x, weight, torch.randint(1000, (100,))).backward()
    """
    call = make_linear_call(x, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, reduction, chunk)
    return _of_some(LINEAR_CROSS_ENTROPY(call, impl)[0], target, reduction)


def _of_some(loss: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """The mean over no tokens is NaN with gradients of 0, as PyTorch has it; operations give 0 for empty calls."""
    return loss + torch.nan if reduction == "mean" and target.numel() == 0 else loss
