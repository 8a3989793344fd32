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

    Rows wider than registers are read twice, with maximum and sum found together the first time (Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018). The backward keeps o alone:
    dx = o (do - <do, o>) / temperature.

    Args:
        x: any shape of one dimension or more, any strides, float16, bfloat16, float32 or float64. The last dimension,
            with unit stride, is read as it lies; another `dim` is copied to the end first.
        dim: the dimension that adds up to 1.
        mask: bool, broadcastable to the shape of x: True is kept, the others give 0.
        temperature: above 0.
        dtype: of o, float16, bfloat16 or float32 (float64 for float64); None takes that of x. Sums are float32 (float64
            for float64).
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        o in the shape of x. A row that keeps nothing, or nothing above -inf, gives 0 and zero gradients. A NaN that is
        kept makes its row NaN, as +inf does. Differentiable; second derivatives, `torch.func` and forward mode go
        through PyTorch's operations.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
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
    """o = x / temperature - lse along `dim`: the logarithm of `softmax`, whose arguments it takes.

    What the mask hides gives -inf, and so does a row that keeps nothing. An o of -inf is a constant: no gradient passes
    through it. dx = (do - exp(o) sum(do)) / temperature, from o alone.

    Raises InputError and UnsupportedError as `softmax` does.
    """
    return SOFTMAX(make_call(x, dim, mask, temperature, dtype, log=True), impl)[0].movedim(-1, dim)
