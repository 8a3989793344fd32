"""Softmax and its logarithm along one dimension, masked and tempered, in one reading of what fits into registers."""

from __future__ import annotations

import torch

from tilewise.ops.softmax.problem import make_call
from tilewise.ops.softmax.table import SOFTMAX


def softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """o = exp(x / temperature - lse) along `dim`, where lse = log sum exp(x / temperature) over what the mask keeps.

    Rows wider than the registers are read twice: first for maximum and sum together, then for o. The backward keeps
    only o: dx = o (do - <do, o>) / temperature. Differentiable; second derivatives, `torch.func` and forward mode run
    in PyTorch's operations.

    Args:
        x: one dimension or more, any strides, float16, bfloat16, float32 or float64. Unless `dim` is the last
            dimension, with unit stride, x is copied first.
        dim: the dimension whose sum is 1.
        mask: bool, broadcastable to the shape of x: True keeps a number, the others give 0.
        temperature: above 0.
        dtype: of o, float16, bfloat16 or float32 (float64 for float64); None is that of x. Sums are float32 (float64
            for float64).
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        o in the shape of x. A row that keeps nothing, or nothing above -inf, gives 0 and zero gradients. A row that
        keeps NaN or +inf is NaN.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Example:
        >>> o = tw.softmax(torch.randn(100, 64), temperature=0.7)
    """
    return SOFTMAX(make_call(x, dim, mask, temperature, dtype, log=False), impl)[0].movedim(-1, dim)


def log_softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """o = x / temperature - lse along `dim`: the logarithm of `softmax`.

    The backward keeps only o: dx = (do - exp(o) sum(do)) / temperature. An o of -inf counts as a constant: no gradient
    passes through it.

    Args:
        x, dim, mask, temperature, dtype, impl: as in `softmax`.

    Returns:
        o in the shape of x; -inf for what the mask hides, and for a row that keeps nothing.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: as `softmax`.

    Example:
        >>> o = tw.log_softmax(torch.randn(100, 64))
    """
    return SOFTMAX(make_call(x, dim, mask, temperature, dtype, log=True), impl)[0].movedim(-1, dim)
