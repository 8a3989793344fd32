"""The facts of one call of `swiglu`, `geglu` or `reglu`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Call:
    """One call: gate and up (..., width), or packed, without up, a gate (..., 2 width). `activation` is "silu", "gelu",
    "gelu_tanh" or "relu". Implementations read this and nothing else.
    """

    gate: torch.Tensor
    up: torch.Tensor | None
    activation: str

    @property
    def wide(self) -> torch.dtype:
        """The dtype of all between reading and writing."""
        return torch.float64 if self.gate.dtype == torch.float64 else torch.float32

    @property
    def width(self) -> int:
        """Columns of o."""
        columns = self.gate.shape[-1]
        return columns // 2 if self.up is None else columns

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate and up, each (..., width)."""
        if self.up is not None:
            return self.gate, self.up
        return self.gate[..., : self.width], self.gate[..., self.width :]

    def gradients_of_halves(self, gradients: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where dgate and dup go, each (..., width) if it is wanted."""
        if self.up is not None:
            return gradients.get("gate"), gradients.get("up")
        return gradients["gate"][..., : self.width], gradients["gate"][..., self.width :]


def make_call(gate: Any, up: Any, activation: str) -> Call:
    """The call of a gated linear unit; raises InputError."""
    expected = "a dense tensor (..., width)" if up is not None else "a dense tensor (..., 2 width)"
    if not _is_dense(gate) or gate.ndim < 1:
        raise InputError("gate", got=_described(gate), expected=expected, hint="rows of a projection")
    if gate.dtype not in DTYPES:
        raise InputError(
            "gate",
            got=_described(gate),
            expected="float16, bfloat16, float32 or float64",
            hint="convert it, for example with .float()",
        )
    if up is None and gate.shape[-1] % 2:
        raise InputError(
            "gate",
            got=_described(gate),
            expected="an even last dimension: the columns of gate, then those of up",
            hint="pass up where it is a tensor of its own",
        )
    if up is not None and (
        not _is_dense(up) or (up.shape, up.dtype, up.device) != (gate.shape, gate.dtype, gate.device)
    ):
        raise InputError(
            "up",
            got=_described(up),
            expected=f"what gate is: {_described(gate)}",
            hint="None where gate holds both",
        )
    return Call(gate, up, activation)


def gelu_of(approximate: Any) -> str:
    """The activation that torch.nn.functional.gelu names so; raises InputError."""
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        raise InputError(
            "approximate", got=repr(approximate), expected="'none' or 'tanh'", hint="'none' is the exact one, by erf"
        )
    return "gelu" if approximate == "none" else "gelu_tanh"


def results(call: Call) -> Tensors:
    """An empty o."""
    shape = (*call.gate.shape[:-1], call.width)
    return {"o": torch.empty(shape, dtype=call.gate.dtype, device=call.gate.device)}


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """Empty ones, contiguous, in the shapes of gate and up."""
    return {name: torch.empty(kept[name].shape, dtype=kept[name].dtype, device=kept[name].device) for name in wanted}


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_nested and x.layout == torch.strided


def _described(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if _is_dense(x) else "a nested or sparse tensor"
