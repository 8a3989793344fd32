"""Custom operators and forward mode: a tangent that reaches an operator would be lost without a word."""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad

from tilewise.core.tensors import has_tangent, no_derivative

_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")  # type: ignore[no-untyped-call]


def refuse_forward_mode(operation: str, *operators: Any) -> None:
    """Have these operators raise UnsupportedError where an argument has a tangent, and be what they were elsewhere.

    Calls do not come so far in forward mode (`core.tensors.transformed`), but for a compiled region that was compiled
    without it: guards of torch.compile do not see dual tensors.
    """
    for operator in operators:
        _guard(operation, operator)


def _guard(operation: str, operator: Any) -> None:
    overload = operator._opoverload
    differentiated = make_autograd_impl(overload, operator)

    @_disable_dynamo  # which looks at the frames of whatever runs inside a region, but for PyTorch's
    def guarded(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse(operation, args)
        return differentiated(keyset, *args)

    for key in ("AutogradCPU", "AutogradCUDA"):  # before the alias Autograd, which has `differentiated`
        _LIBRARY.impl(overload.name().partition("::")[2], guarded, key, with_keyset=True)  # type: ignore[no-untyped-call]


def _refuse(operation: str, args: Any) -> None:
    for x in args:
        for y in x if isinstance(x, (list, tuple)) else (x,):
            if isinstance(y, torch.Tensor) and has_tangent(y):
                raise no_derivative(operation, "a tangent of forward mode, inside a compiled region")
