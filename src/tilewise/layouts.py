"""Where the rows of q, k and v lie: `Dense` (batch, seqlen, heads, dim) or `Packed` (total, heads, dim)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import host_values


@dataclass(frozen=True)
class Dense:
    """Tensors of shape (batch, seqlen, heads, dim). The default."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences of different lengths, one after another: tensors of shape (total, heads, dim).

    Args:
        cu_seqlens_q: int32 (batch + 1,), cumulative query lengths: starts at 0, never falls, ends at the total.
        cu_seqlens_k: the same for keys; None where queries and keys share one.

    Lengths of 0 and 1 are fine. The values are checked once a tensor, which reads it on the host; inside a CUDA graph
    capture or a compiled region they are taken as they are.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor:
        """Cumulative key lengths."""
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


_HINT = "running sums of the lengths: torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)"


def check_cu_seqlens(name: str, cu_seqlens: Any, total: int, device: torch.device) -> None:
    """Raise InputError unless `cu_seqlens` is int32 (batch + 1,), from 0, never falling, ending at `total`."""
    expected = "an int32 tensor (batch + 1,) on the device of q"
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise InputError(name, got=got, expected=expected, hint=_HINT)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != device or not cu_seqlens.is_contiguous():
        raise InputError(
            name, got=f"{cu_seqlens.dtype} on {cu_seqlens.device}", expected=expected, hint="use .to(torch.int32)"
        )
    values = host_values(cu_seqlens)
    if values is None:
        return
    if values[0] != 0 or values[-1] != total:
        raise InputError(
            name,
            got=f"first {values[0]}, last {values[-1]}",
            expected=f"from 0 to {total}, the number of rows",
            hint="cumulative lengths, one entry more than there are sequences",
        )
    for index in range(len(values) - 1):
        if values[index + 1] < values[index]:
            raise InputError(
                name,
                got=f"{values[index + 1]} after {values[index]}",
                expected="values that never fall",
                hint=_HINT,
            )
