"""Gated linear units: one half of a projection, through an activation, times the other half (Shazeer, "GLU Variants
Improve Transformer", 2020).
"""

from __future__ import annotations

import torch

from tilewise.ops.glu.problem import gelu_of, make_call
from tilewise.ops.glu.table import GLU


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """o = silu(gate) * up, where silu(x) = x / (1 + exp(-x)) (Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units
    for Neural Network Function Approximation in Reinforcement Learning", 2017).

    The backward computes the activation again from gate and up, which are all that is kept.

    Args:
        gate: (..., width), or without `up` (..., 2 width): the columns of gate, then those of up. Any strides, float16,
            bfloat16, float32 or float64. Rows of unit stride, one stride apart, are read as they lie.
        up: shape, dtype and device of gate, any strides.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        o, contiguous (..., width), in the dtype of gate: computed in float32 (float64 for float64), rounded once.
        Differentiable once in gate and up; a packed gate has one packed gradient.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
    """
    return GLU(make_call(gate, up, "silu"), impl)[0]


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "none", impl: str | None = None
) -> torch.Tensor:
    """o = gelu(gate) * up, where gelu(x) = x (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel, "Gaussian Error Linear
    Units (GELUs)", 2016).

    Args:
        gate, up, impl: as `swiglu` has them.
        approximate: "none", or "tanh": x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    Returns what `swiglu` does, and raises what it does.
    """
    return GLU(make_call(gate, up, gelu_of(approximate)), impl)[0]


def reglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """o = max(gate, 0) * up. No gradient reaches a gate of 0, as in `torch.relu`.

    Args:
        gate, up, impl: as `swiglu` has them.

    Returns what `swiglu` does, and raises what it does.
    """
    return GLU(make_call(gate, up, "relu"), impl)[0]
