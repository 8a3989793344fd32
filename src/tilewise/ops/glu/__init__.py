"""Gated linear units: an activation of one half of what a linear layer gives, times the other half."""

from __future__ import annotations

import torch

from tilewise.core.errors import InputError, shown
from tilewise.ops.glu.problem import make_call
from tilewise.ops.glu.table import GLU


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """o = silu(gate) up, silu(x) = x sigmoid(x) (Shazeer, "GLU variants improve Transformer", 2020).

    The backward is given gate and up alone, and computes the activation again.

    Args:
        gate: (..., width), float16, bfloat16, float32 or float64; or, with `up` None, (..., 2 width): gate, then up, as
            one linear layer gives both. Rows of unit stride are read as they lie.
        up: as gate, in its shape and dtype.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        o (..., width) in the dtype of gate, rounded once. Differentiable, again and again; the gradient of both halves
        is one tensor where they were.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
    """
    return GLU(make_call(gate, up, "silu"), impl)[0]


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "none", impl: str | None = None
) -> torch.Tensor:
    """o = gelu(gate) up, whose arguments are those of `swiglu`.

    approximate: "none" is x Phi(x), "tanh" its approximation by tanh, as torch.nn.functional.gelu has both.
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
    """o = max(gate, 0) up, whose arguments are those of `swiglu`."""
    return GLU(make_call(gate, up, "relu"), impl)[0]
