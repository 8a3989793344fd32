"""What a case is: a call of the library, and the same by other means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def no_floor(name: str, truth: Tensors) -> float:
    """Of results that need none beyond the common one."""
    return 0.0


@dataclass
class Case:
    """One call, judged by `tools.fuzz.judge`.

    `plain` is the operation in PyTorch: with inputs in float64 it is the truth, and with those of the call it says how
    near plain PyTorch comes at their dtype; `rough` stands for the latter where the call is meant to be less exact.
    `leaves` are inputs that take gradients, of the results named in `into`. `terms` is how many numbers the longest sum
    has, `floor` what a result named so may be off by beyond rounding, and `exact` are results that have the same bits.
    `changed` are inputs that the call writes; with `repeats` it gives the same bits again.
    """

    text: str
    dtype: torch.dtype
    inputs: Tensors
    library: Callable[[Tensors], Tensors]
    plain: Callable[[Tensors], Tensors]
    rough: Callable[[Tensors], Tensors] | None = None
    leaves: tuple[str, ...] = ()
    into: tuple[str, ...] = ()
    terms: int = 1
    floor: Callable[[str, Tensors], float] = no_floor
    exact: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def wide(self) -> torch.dtype:
        """In which sums are taken."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def largest(x: torch.Tensor) -> float:
    """The largest finite absolute value; 0 of nothing."""
    x = x.detach().double()
    return float(torch.where(x.isfinite(), x, 0.0).abs().max()) if x.numel() else 0.0
