"""Gated linear units: an activation of one half of what a linear layer gives, times the other half."""

from __future__ import annotations

import torch

from tilewise.core.errors import InputError, shown
from tilewise.ops.glu.problem import make_call
from tilewise.ops.glu.table import GLU


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """o = silu(gate) * up, with silu(x) = x sigmoid(x).

    The backward keeps only gate and up, and computes the activation again. Differentiable any number of times; the
    gradient of gate and up is one tensor where they were one.

    Args:
        gate: (..., width), float16, bfloat16, float32 or float64; or, with `up` None, (..., 2 width): gate, then up, as
            one linear layer gives both. Rows without unit stride are copied first.
        up: as gate, in its shape and dtype.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        o (..., width) in the dtype of gate, rounded once.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
        >>> gate, up = torch.randn(2, 100, 64)
        >>> o = tw.swiglu(gate, up)
    """
    return GLU(make_call(gate, up, "silu"), impl)[0]


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "none", impl: str | None = None
) -> torch.Tensor:
    """o = gelu(gate) * up.

    Args:
        gate, up, impl: as in `swiglu`.
        approximate: "none" is gelu(x) = x Phi(x), "tanh" its approximation by tanh, as in
            `torch.nn.functional.gelu`.

    Returns:
        o (..., width) in the dtype of gate, rounded once.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
        >>> o = tw.geglu(torch.randn(100, 128))  # (100, 64)
    """
    if approximate not in ("none", "tanh"):
        raise InputError(
            "approximate",
            got=shown(approximate),
            expected="'none' or 'tanh'",
            hint="as torch.nn.functional.gelu has it",
        )
    return GLU(make_call(gate, up, "gelu" if approximate == "none" else "gelu_tanh"), impl)[0]


def reglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """o = max(gate, 0) * up.

    Args:
        gate, up, impl: as in `swiglu`.

    Returns:
        o (..., width) in the dtype of gate, rounded once.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
        >>> o = tw.reglu(torch.randn(100, 128))  # (100, 64)
    """
    return GLU(make_call(gate, up, "relu"), impl)[0]
