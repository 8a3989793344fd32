"""The facts of one call of `cross_entropy` or `linear_cross_entropy`, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.readback import values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense, hidden

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CHUNKS = 8  # at most, since each rounds the sums of weight gradients once more
_FEWEST = 1024  # tokens of a chunk: products of fewer are slow


@dataclass(eq=False, slots=True)
class Call:
    """One call of `cross_entropy`. Implementations read this and nothing else."""

    logits: torch.Tensor
    target: torch.Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str


@dataclass(eq=False, slots=True)
class LinearCall:
    """One call of `linear_cross_entropy`. `early` names the inputs whose gradients the forward makes: those of the sum
    of all losses.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    chunk: int | None
    early: tuple[str, ...]

    def chunks(self) -> Iterator[slice]:
        """The tokens in chunks of about one size, which is a multiple of 128 where the caller chose none."""
        tokens, size = self.target.numel(), self.chunk
        if size is None:
            size = -(-max(_FEWEST, -(-tokens // _CHUNKS)) // 128) * 128
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of losses."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def counted(call: Call | LinearCall, target: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Which tokens have a loss."""
    return (target != call.ignore_index) & (target >= 0) & (target < vocabulary)


# empty results -------------------------------------------------------------------------------------------------------


def results(call: Call) -> Tensors:
    """Empty loss, maximum and log of the sum of exponentials below it of each token, and for "mean" 1 / the number of
    tokens in it. One number for both, the log-sum-exp, would lose the sum beside logits of large magnitude.
    """
    found = _loss(call.reduction, call.target, call.logits.dtype)
    return found | _sums_of(call.target.numel(), found["loss"])


def gradients(call: Call | LinearCall, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """Empty gradients, alike what they are of."""
    return {name: torch.empty(kept[name].shape, dtype=kept[name].dtype, device=kept[name].device) for name in wanted}


def linear_results(call: LinearCall) -> Tensors:
    """As `results`, those of each token only where the backward needs them; empty gradients of what `early` names."""
    found = _loss(call.reduction, call.target, call.x.dtype)
    number = call.target.numel() if call.reduction == "none" else 0
    found |= _sums_of(number, found["loss"])
    for name, x in (("x", call.x), ("weight", call.weight), ("bias", call.bias)):
        shape = x.shape if x is not None and name in call.early else (0,)
        # sums over tokens, not divided by their number yet, may leave float16
        wide = call.x.dtype == torch.float16 and name != "x"
        found[f"d{name}"] = torch.empty(shape, dtype=torch.float32 if wide else call.x.dtype, device=call.x.device)
    return found


def _sums_of(tokens: int, loss: torch.Tensor) -> Tensors:
    return {name: torch.empty(tokens, dtype=loss.dtype, device=loss.device) for name in ("top", "log_sum")}


def _loss(reduction: str, target: torch.Tensor, dtype: torch.dtype) -> Tensors:
    wide = wide_of(dtype)
    shape = target.shape if reduction == "none" else ()
    return {
        "loss": torch.empty(shape, dtype=wide, device=target.device),
        "scale": torch.empty(() if reduction == "mean" else (0,), dtype=wide, device=target.device),
    }


# checks --------------------------------------------------------------------------------------------------------------


def make_call(logits: Any, target: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, reduction: Any) -> Call:
    """The call of `cross_entropy`; raises InputError."""
    _check_floats("logits", logits, "(tokens..., vocabulary)")
    _check_terms(ignore_index, label_smoothing, z_loss, reduction)
    _check_target(target, logits, "logits", ignore_index, logits.shape[-1])
    return Call(logits, target, ignore_index, float(label_smoothing), float(z_loss), reduction)


def make_linear_call(
    x: Any, weight: Any, bias: Any, target: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any,
    reduction: Any, chunk: Any,
) -> LinearCall:  # fmt: skip
    """The call of `linear_cross_entropy`; raises InputError."""
    _check_floats("x", x, "(tokens..., hidden)")
    _check_floats("weight", weight, "(vocabulary, hidden)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise InputError(
            "weight",
            got=f"shape {tuple(weight.shape)}",
            expected=f"(vocabulary, {x.shape[-1]}), as x is {tuple(x.shape)}",
            hint="as torch.nn.Linear keeps it",
        )
    if bias is not None:
        _check_floats("bias", bias, "(vocabulary,)")
        if bias.shape != weight.shape[:1]:
            raise InputError(
                "bias",
                got=f"shape {tuple(bias.shape)}",
                expected=f"{tuple(weight.shape[:1])}",
                hint="one for each class",
            )
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise InputError(
                name,
                got=f"{other.dtype} on {other.device}",
                expected=f"{x.dtype} on {x.device}, as x",
                hint=f"use {name}.to(x) for this call",
            )
    _check_terms(ignore_index, label_smoothing, z_loss, reduction)
    _check_target(target, x, "x", ignore_index, weight.shape[0])
    if softcap is not None and (not _is_number(softcap) or softcap <= 0):
        raise InputError("softcap", got=shown(softcap), expected="None or a number above 0", hint="30.0 in Gemma 2")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError("chunk", got=shown(chunk), expected="None or an int of 1 or more", hint="tokens at a time")
    wants = torch.is_grad_enabled() and reduction != "none"
    inputs = (("x", x), ("weight", weight), ("bias", bias))
    early = tuple(name for name, t in inputs if wants and t is not None and t.requires_grad)
    cap = None if softcap is None else float(softcap)
    terms = (ignore_index, float(label_smoothing), float(z_loss))
    return LinearCall(x, weight, bias, target, *terms, cap, reduction, chunk, early)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and is_finite(x)


def _check_floats(name: str, x: Any, shape: str) -> None:
    expected, hint = f"a dense tensor {shape}", "rows lie along its last dimension"
    check_dense(name, x, expected, hint)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise InputError(name, got=f"a tensor of shape {tuple(x.shape)}", expected=expected, hint=hint)
    if x.dtype not in DTYPES:
        raise InputError(
            name,
            got=str(x.dtype),
            expected="float16, bfloat16, float32 or float64",
            hint="convert it, for example with .float()",
        )


def _check_terms(ignore_index: Any, label_smoothing: Any, z_loss: Any, reduction: Any) -> None:
    whole = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    if not whole or not -(2**63) <= ignore_index < 2**63:  # a target is int64
        raise InputError(
            "ignore_index", got=shown(ignore_index), expected="an int of 64 bits", hint="-100 is PyTorch's"
        )
    if not _is_number(label_smoothing) or not 0.0 <= label_smoothing <= 1.0:
        raise InputError(
            "label_smoothing", got=shown(label_smoothing), expected="a number from 0 to 1", hint="0 is off"
        )
    if not _is_number(z_loss) or z_loss < 0.0:
        raise InputError("z_loss", got=shown(z_loss), expected="a number of 0 or more", hint="1e-4 in PaLM")
    if reduction not in ("mean", "sum", "none"):
        raise InputError("reduction", got=shown(reduction), expected='"mean", "sum" or "none"', hint="a string")


def _check_target(target: Any, x: torch.Tensor, name: str, ignore_index: int, vocabulary: int) -> None:
    """Type, shape, dtype and device of target, and its values where they are read."""
    expected, hint = "a dense int64 tensor of classes", "convert it with .long()"
    check_dense("target", target, expected, hint)
    if target.dtype != torch.int64:
        raise InputError("target", got=str(target.dtype), expected=expected, hint=hint)
    if target.shape != x.shape[:-1] or target.device != x.device:
        raise InputError(
            "target",
            got=f"shape {tuple(target.shape)} on {target.device}",
            expected=f"{tuple(x.shape[:-1])} on {x.device}: one class for each row of {name}",
            hint="classes are the last dimension here, not the second as in torch.nn.functional.cross_entropy",
        )
    if not values_checked(target.device) or hidden(target):
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= vocabulary))]
    if wrong.numel():
        raise InputError(
            "target",
            got=f"class {int(wrong[0])}",
            expected=f"0 to {vocabulary - 1}, or ignore_index={ignore_index}",
            hint="give tokens without a class the ignore_index",
        )
