"""The facts of one call of `swiglu`, `geglu` or `reglu`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.tensors import check_dense

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False, slots=True)
class Call:
    """One call. Without `up`, gate holds both. Implementations read this and nothing else."""

    gate: torch.Tensor
    up: torch.Tensor | None
    activation: str  # "silu", "gelu", "gelu_tanh" or "relu"

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate, up), views where one tensor holds both."""
        return halves_of(self.gate, self.up)


def halves_of(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors as they are, or the halves of one."""
    if up is not None:
        return gate, up
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]


def make_call(gate: Any, up: Any, activation: str) -> Call:
    """The call; raises InputError."""
    for name, x in (("gate", gate), ("up", up)):
        if x is None and name == "up":
            continue
        expected, hint = "a dense tensor (..., width)", "swiglu(gate, up), or swiglu(both) of gate and up side by side"
        check_dense(name, x, expected, hint)
        if x.ndim < 1:
            raise InputError(name, got=f"a tensor of shape {tuple(x.shape)}", expected=expected, hint=hint)
        if x.dtype not in DTYPES:
            raise InputError(
                name,
                got=str(x.dtype),
                expected="float16, bfloat16, float32 or float64",
                hint="convert it, for example with .float()",
            )
    if up is None:
        if gate.shape[-1] % 2:
            raise InputError(
                "gate",
                got=f"shape {tuple(gate.shape)}",
                expected="an even last dimension, gate and then up",
                hint="pass up, if gate is alone",
            )
    elif (up.shape, up.dtype, up.device) != (gate.shape, gate.dtype, gate.device):
        raise InputError(
            "up",
            got=f"{tuple(up.shape)}, {up.dtype} on {up.device}",
            expected=f"{tuple(gate.shape)}, {gate.dtype} on {gate.device}, as gate has it",
            hint="both come from the same input",
        )
    return Call(gate, up, activation)


def results(call: Call) -> Tensors:
    """An empty o."""
    gate, _up = call.halves
    return {"o": torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)}


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """Empty gradients of gate and of up, or of both in one."""
    return {name: torch.empty(kept[name].shape, dtype=kept[name].dtype, device=kept[name].device) for name in wanted}
