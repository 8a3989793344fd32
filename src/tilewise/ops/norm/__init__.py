"""Rows brought to unit root mean square, or to mean 0 and variance 1, with what stands before and behind in a model."""

from __future__ import annotations

import torch

from tilewise.ops.norm.problem import make_call
from tilewise.ops.norm.table import NORM

Output = torch.Tensor | tuple[torch.Tensor, ...]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    quantize: str | None = None,
    impl: str | None = None,
) -> Output:
    """o = x / sqrt(mean(x^2) + eps) * (weight + offset), along the last dimension.

    With `residual`, x + residual is normalised, and returned as well. Differentiable in x, weight and residual; second
    derivatives, `torch.func` and forward mode run in PyTorch's operations.

    Args:
        x: (..., width), width from 1 to 65,536, any strides, float16, bfloat16, float32 or float64. Without unit stride
            in the last dimension it is copied first.
        weight: (width,), the dtype of x or float32; None is 1.
        residual: shape, dtype and device of x, any strides: s = x + residual, rounded to the dtype of x, is normalised.
        eps: at least 0, added to the mean.
        offset: added to weight: 1.0 for weights that are stored minus 1, as Gemma's are.
        out_dtype: of o, float16, bfloat16 or float32 (float64 for float64); None is that of x. All arithmetic is
            float32 (float64 for float64), rounded once.
        quantize: "fp8" or "int8": codes of o, as of `tilewise.quant.encode`, in place of o. Not differentiable.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        o in the shape of x; with `residual` (o, s). With `quantize` two tensors stand for o: codes in the shape of x,
        float8_e4m3fn or int8, and their scale, float32 (...,), the largest absolute value of a row over 448 or 127, 0
        for a row of zeros. Sums have a fixed order: the same bits in every run.

    Raises:
        InputError: an argument is wrong, or `quantize` is given where a gradient is wanted.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Example:
        >>> x, weight = torch.randn(2, 100, 64), torch.ones(64)
        >>> o, x = tw.rms_norm(x, weight, residual=torch.randn(2, 100, 64))
    """
    call = make_call(x, weight, None, residual, False, eps, offset, out_dtype, quantize)
    found = NORM(call, impl)
    return found[0] if len(found) == 1 else found


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    quantize: str | None = None,
    impl: str | None = None,
) -> Output:
    """o = (x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias, along the last dimension.

    The variance is divided by width, and taken from distances to the mean: nothing cancels where the mean is large.

    Args:
        bias: (width,), the dtype of x or float32; None is 0.
        x, weight, residual, eps, offset, out_dtype, quantize, impl: as in `rms_norm`.

    Returns:
        As `rms_norm`; differentiable in bias, too.

    Raises:
        InputError: an argument is wrong, or `quantize` is given where a gradient is wanted.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Example:
        >>> o = tw.layer_norm(torch.randn(2, 100, 64), torch.ones(64), torch.zeros(64))
    """
    call = make_call(x, weight, bias, residual, True, eps, offset, out_dtype, quantize)
    found = NORM(call, impl)
    return found[0] if len(found) == 1 else found
