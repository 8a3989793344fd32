"""The facts of one call of `linear`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.tensors import check_dense

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """x (..., in_features), weight (out_features, in_features), bias (out_features,), and the dtype of the result.
    Implementations read this and nothing else.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


def results(call: Call) -> Tensors:
    """Empty o (..., out_features)."""
    x = call.x
    return {"o": torch.empty((*x.shape[:-1], call.weight.shape[0]), dtype=call.dtype, device=x.device)}


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: `make_call` refuses tensors that take gradients."""
    return {}


def make_call(x: Any, weight: Any, bias: Any, out_dtype: Any) -> Call:
    """The call of `linear`; raises InputError."""
    _check_floats("x", x, "(..., in_features)")
    _check_floats("weight", weight, "(out_features, in_features)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise InputError(
            "weight",
            got=f"shape {tuple(weight.shape)}",
            expected=f"(out_features, {x.shape[-1]}), as x is {tuple(x.shape)}",
            hint="as torch.nn.Linear keeps it",
        )
    if bias is not None:
        _check_floats("bias", bias, "(out_features,)")
        if bias.shape != weight.shape[:1]:
            raise InputError(
                "bias",
                got=f"shape {tuple(bias.shape)}",
                expected=f"({weight.shape[0]},), as weight is {tuple(weight.shape)}",
                hint="None leaves it out",
            )
    tensors = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, other in tensors.items():
        if other.dtype != x.dtype or other.device != x.device:
            raise InputError(
                name,
                got=f"{other.dtype} on {other.device}",
                expected=f"{x.dtype} on {x.device}, as x",
                hint=f"use {name}.to(x) for this call",
            )
        if torch.is_grad_enabled() and other.requires_grad:
            raise InputError(
                name,
                got="a tensor that takes a gradient",
                expected="tensors that take none: this operation has no backward",
                hint="call it under torch.no_grad(), or train with torch.nn.functional.linear",
            )
    if out_dtype not in (None, x.dtype, torch.float32):
        expected = f"None or torch.float32 for an x of {x.dtype}"
        raise InputError("out_dtype", got=shown(out_dtype), expected=expected, hint="None keeps the dtype of x")
    return Call(x, weight, bias, x.dtype if out_dtype is None else out_dtype)


def _check_floats(name: str, x: Any, shape: str) -> None:
    expected, hint = f"a dense tensor {shape}", "rows lie along its last dimension"
    check_dense(name, x, expected, hint)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise InputError(name, got=f"a tensor of shape {tuple(x.shape)}", expected=expected, hint=hint)
    if x.dtype not in DTYPES:
        raise InputError(
            name,
            got=str(x.dtype),
            expected="float16, bfloat16 or float32",
            hint="convert it, for example with .float()",
        )
