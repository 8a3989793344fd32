"""The facts of one call of `softmax` or `log_softmax`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False, slots=True)
class Call:
    """One call along the last dimension of x. `mask` is expanded to the shape of x. Implementations read this and
    nothing else.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    temperature: float
    log: bool
    in_dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float64 if self.in_dtype == torch.float64 else torch.float32


def make_call(x: Any, dim: Any, mask: Any, temperature: Any, dtype: Any, log: bool) -> Call:
    """The call of `softmax`, with `log` of `log_softmax`; raises InputError."""
    _check_x(x)
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InputError(
            "dim",
            got=shown(dim),
            expected=f"an int from {-x.ndim} to {x.ndim - 1}",
            hint=f"x has {x.ndim} dimensions; -1 is the last",
        )
    if not is_finite(temperature) or temperature <= 0:
        raise InputError(
            "temperature",
            got=shown(temperature),
            expected="a number above 0",
            hint="divide x beforehand where rows have temperatures of their own; the limit 0 is argmax",
        )
    if mask is not None:
        mask = _expanded(mask, x).movedim(dim, -1)
    return Call(x.movedim(dim, -1), mask, float(temperature), log, x.dtype, _output_dtype(dtype, x.dtype))


def results(call: Call) -> dict[str, torch.Tensor]:
    """An empty o."""
    return {"o": torch.empty(call.x.shape, dtype=call.out_dtype, device=call.x.device)}


def gradients(call: Call, kept: dict[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """An empty dx."""
    o = kept["o"]
    return {name: torch.empty(o.shape, dtype=call.in_dtype, device=o.device) for name in wanted}


def _check_x(x: Any) -> None:
    expected, hint = "a dense tensor of one dimension or more", "rows lie along its last dimension"
    check_dense("x", x, expected, hint)
    if x.ndim < 1:
        raise InputError("x", got=f"a tensor of shape {tuple(x.shape)}", expected=expected, hint=hint)
    if x.dtype not in DTYPES:
        raise InputError(
            "x",
            got=str(x.dtype),
            expected="float16, bfloat16, float32 or float64",
            hint="convert it, for example with .float()",
        )


def _expanded(mask: Any, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InputError("mask", got=got, expected="a bool tensor, True is kept", hint="add other masks to x")
    if mask.device != x.device:
        raise InputError(
            "mask", got=f"device {mask.device}", expected=f"{x.device}, the device of x", hint="move it: .to(x.device)"
        )
    pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.ndim > x.ndim or any(m != 1 and m != n for m, n in pairs):
        raise InputError(
            "mask",
            got=f"shape {tuple(mask.shape)}",
            expected=f"one that broadcasts to {tuple(x.shape)}, the shape of x",
            hint="sizes are compared from the last dimension on, and are equal or 1",
        )
    return mask.expand(x.shape)


def _output_dtype(dtype: Any, given: torch.dtype) -> torch.dtype:
    """The dtype of o: the caller's, or that of x."""
    if dtype is None:
        return given
    allowed = (torch.float64,) if given == torch.float64 else DTYPES[:3]
    if dtype not in allowed:
        names = ", ".join(str(x) for x in allowed)
        raise InputError(
            "dtype", got=shown(dtype), expected=f"None or one of {names} for an x of {given}", hint="None keeps it"
        )
    kept: torch.dtype = dtype
    return kept
