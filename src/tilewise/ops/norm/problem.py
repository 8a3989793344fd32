"""The facts of one call of `rms_norm` or `layer_norm`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense
from tilewise.quant.codes import KINDS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CODES = ("fp8", "int8")
WIDEST = 65536

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """One call along the last dimension of x; `centred` takes the mean out. Implementations read this and nothing else.

    In a backward, x is what was normed, with a residual their sum.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    centred: bool
    eps: float
    offset: float
    dtype: torch.dtype
    quantize: str | None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of statistics and of all between reading and writing."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def outputs(call: Call) -> int:
    """How many results go to the caller."""
    return 1 + (call.quantize is not None) + (call.residual is not None)


def results(call: Call) -> Tensors:
    """o, or codes and scale; x, the sum with a residual; for the backward stats, (1, ...) the inverse deviation, before
    it (2, ...) the mean where that is taken out.
    """
    x = call.x
    found: Tensors = {}
    if call.quantize is None:
        found["o"] = torch.empty(x.shape, dtype=call.dtype, device=x.device)
    else:
        found["codes"] = torch.empty(x.shape, dtype=KINDS[call.quantize].dtype, device=x.device)
        found["scale"] = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if call.residual is not None:
        found["x"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if call.quantize is None:
        found["stats"] = torch.empty((1 + call.centred, *x.shape[:-1]), dtype=call.wide, device=x.device)
    return found


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """Of x, which a residual shares, weight and bias."""
    return {name: torch.empty(kept[name].shape, dtype=kept[name].dtype, device=kept[name].device) for name in wanted}


def make_call(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    centred: bool,
    eps: Any,
    offset: Any,
    out_dtype: Any,
    quantize: Any,
) -> Call:
    """The call of `rms_norm`, or with `centred` of `layer_norm`; raises InputError."""
    _check_x(x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            _check_vector(name, vector, x)
    if residual is not None:
        _check_residual(residual, x)
    if not is_finite(eps) or eps < 0:
        raise InputError("eps", got=shown(eps), expected="a finite number, at least 0", hint="usual are 1e-6 and 1e-5")
    if not is_finite(offset) or (weight is None and offset != 0):
        raise InputError(
            "offset",
            got=shown(offset),
            expected="a finite number, 0.0 without a weight",
            hint="it is added to weight: 1.0 where weights are kept as their distance from 1",
        )
    dtype = _output_dtype(out_dtype, x.dtype)
    if quantize is not None:
        _check_quantize(quantize, out_dtype, (x, weight, bias, residual))
    return Call(x, weight, bias, residual, centred, float(eps), float(offset), dtype, quantize)


def _described(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def _check_x(x: Any) -> None:
    expected = f"a dense floating-point tensor (..., width), width from 1 to {WIDEST}"
    check_dense("x", x, expected, "rows of activations")
    if x.dtype not in DTYPES:
        raise InputError(
            "x",
            got=_described(x),
            expected="float16, bfloat16, float32 or float64",
            hint="convert it, for example with .float()",
        )
    if x.ndim < 1 or not 1 <= x.shape[-1] <= WIDEST:
        raise InputError("x", got=_described(x), expected=expected, hint="statistics are of the last dimension")


def _check_vector(name: str, vector: Any, x: torch.Tensor) -> None:
    """Type, shape, dtype and device of weight or bias."""
    check_dense(name, vector, f"a dense tensor ({x.shape[-1]},)")
    if vector.shape == x.shape[-1:] and vector.dtype in (x.dtype, torch.float32) and vector.device == x.device:
        return
    dtypes = "torch.float32" if x.dtype == torch.float32 else f"{x.dtype} or torch.float32"
    raise InputError(
        name,
        got=_described(vector),
        expected=f"{dtypes} ({x.shape[-1]},) on {x.device}: a number for each column of x",
        hint="None leaves it out",
    )


def _check_residual(residual: Any, x: torch.Tensor) -> None:
    check_dense("residual", residual, f"what x is: {_described(x)}")
    if (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise InputError(
            "residual",
            got=_described(residual),
            expected=f"what x is: {_described(x)}",
            hint="convert or expand it first; None leaves it out",
        )


def _output_dtype(dtype: Any, of_x: torch.dtype) -> torch.dtype:
    """The dtype of o: the caller's, or that of x."""
    if dtype is None:
        return of_x
    allowed = (torch.float64,) if of_x == torch.float64 else DTYPES[:3]
    if dtype not in allowed:
        names = ", ".join(str(x) for x in allowed)
        raise InputError(
            "out_dtype", got=shown(dtype), expected=f"None or one of {names} for an x of {of_x}", hint="None keeps it"
        )
    kept: torch.dtype = dtype
    return kept


def _check_quantize(quantize: Any, out_dtype: Any, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """A known kind, nothing that contradicts it, and no gradient wanted."""
    if quantize not in CODES:
        raise InputError("quantize", got=shown(quantize), expected="None, 'fp8' or 'int8'", hint="None gives o itself")
    if out_dtype is not None:
        raise InputError(
            "out_dtype",
            got=f"{out_dtype} beside quantize={quantize!r}",
            expected="one of the two, not both",
            hint="codes have the dtype of their kind",
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise InputError(
            "quantize",
            got=f"{quantize!r} where a gradient is wanted",
            expected="tensors that take no gradients: codes have none",
            hint="call it inside torch.no_grad(), or pass .detach()ed tensors",
        )
