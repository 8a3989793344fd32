"""What a named case is, and the tensors that stand in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.testing.plain import Function


class Spelled(NamedTuple):
    """One mask or score twice: for `tilewise.attention`, and as a plain function of index tensors."""

    formula: Any
    plain: Function


class Maker:
    """Seeded tensors for a case: the same values on every device and, rounded to the case's dtype, in every precision.

    Args:
        device: where tensors are made.
        dtype: dtype of the problem.
        exact: give the problem's values in float64 (for oracles).
        blank: draw zeros, where only shapes, strides and dtypes matter.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, seed: int = 0, *, exact: bool = False, blank: bool = False
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.exact = exact
        self.blank = blank
        self.captured: list[torch.Tensor] = []
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal values, rounded to `dtype` (default the problem's)."""
        if self.blank:
            return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        rounded = values.to(dtype or self.dtype)
        return (rounded.double() if self.exact else rounded).to(self.device)

    def learned(self, *shape: int, low: float | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A captured tensor that takes a gradient: normal values, or |values| + low; float32 by default."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        values = self.draw(*shape, dtype=dtype or wide)
        if low is not None:
            values = values.abs() + low
        self.captured.append(values.requires_grad_())
        return values

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 values in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def booleans(self, share: float, *shape: int) -> torch.Tensor:
        """True with probability `share`."""
        return (torch.rand(shape, generator=self._generator) < share).to(self.device)

    def fixed(self, values: Any) -> torch.Tensor:
        """An int64 tensor of the given values."""
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)


Builder = Callable[["Case", Maker], Spelled]


@dataclass(frozen=True)
class Case:
    """One named problem, for any dtype, device and implementation.

    `packed` lists (seqlen_q, seqlen_k) of each sequence and then replaces batch and seqlens. `memory` says how q, k, v
    lie: "dense", "sliced" (one (batch, seqlen, heads, dim) tensor cut along its heads) or "expanded" (one key/value
    head seen as many, stride 0). `gpu` marks what only a GPU should run, by size.
    """

    name: str
    batch: int = 2
    seqlen_q: int = 65
    seqlen_k: int = 65
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    mask: Builder | None = None
    score: Builder | None = None
    sink: bool = False
    dropout: float = 0.0
    scale: float | None = None
    packed: tuple[tuple[int, int], ...] | None = None
    memory: str = "dense"
    lse_gradient: bool = False
    gpu: bool = False

    def __repr__(self) -> str:
        return self.name

    def with_(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of every batch element or sequence."""
        return self.packed if self.packed is not None else ((self.seqlen_q, self.seqlen_k),) * self.batch

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def pairs(self) -> int:
        """Scores to compute, over all heads."""
        return self.heads_q * sum(q * k for q, k in self.lengths)

    @property
    def interpret(self) -> bool:
        """Whether Triton's interpreter runs it in about a second."""
        return not self.gpu and self.pairs <= 20_000 and max(self.head_dim, self.head_dim_v) <= 128
