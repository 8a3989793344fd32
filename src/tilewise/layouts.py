"""Where the rows of q, k and v lie: `Dense` (batch, seqlen, heads, dim) or `Packed` (total, heads, dim)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import once_per_version


@dataclass(frozen=True)
class Dense:
    """Tensors of shape (batch, seqlen, heads, dim). The default."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences of different lengths, one after another: tensors of shape (total, heads, dim).

    Args:
        cu_seqlens_q: int32 (batch + 1,), cumulative query lengths: starts at 0, never falls, ends at the total.
        cu_seqlens_k: the same for keys; None where queries and keys share one.

    Both on the device of q and contiguous; `attention` raises InputError for others. Lengths of 0 and 1 are fine. The
    values are checked once for each tensor, which reads it on the host, in a compiled region when it runs; while a CUDA
    graph is captured they are taken as they are.
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


def check_packing(cu_seqlens_q: Any, cu_seqlens_k: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise InputError unless the cumulative lengths fit packed q and k, and each other."""
    for what, cu_seqlens, x in (("q", cu_seqlens_q, q), ("k", cu_seqlens_k, k)):
        _check_cu_seqlens(f"layout cu_seqlens_{what}", cu_seqlens, x.shape[0], q.device)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise InputError(
            "layout cu_seqlens_k",
            got=tuple(cu_seqlens_k.shape),
            expected=f"{tuple(cu_seqlens_q.shape)} as cu_seqlens_q",
            hint="one entry more than there are sequences, for queries and keys alike",
        )


def _check_cu_seqlens(name: str, cu_seqlens: Any, total: int, device: torch.device) -> None:
    """Raise InputError unless `cu_seqlens` is int32 (batch + 1,), from 0, never falling, ending at `total`."""
    expected = "a contiguous int32 tensor (batch + 1,) on the device of q"
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise InputError(name, got=got, expected=expected, hint=_HINT)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != device or not cu_seqlens.is_contiguous():
        raise InputError(
            name,
            got=f"{cu_seqlens.dtype} on {cu_seqlens.device}, stride {cu_seqlens.stride(0)}",
            expected=expected,
            hint="use .to(q.device, torch.int32).contiguous()",
        )
    found = _ends_and_fall(cu_seqlens)
    if found is None:
        return
    first, last, fall = found
    if first != 0 or last != total:
        raise InputError(
            name,
            got=f"first {first}, last {last}",
            expected=f"from 0 to {total}, the number of rows",
            hint="cumulative lengths, one entry more than there are sequences",
        )
    if fall is not None:
        raise InputError(name, got=f"{fall[1]} after {fall[0]}", expected="values that never fall", hint=_HINT)


@once_per_version
def _ends_and_fall(cu_seqlens: torch.Tensor) -> tuple[int, int, tuple[int, int] | None]:
    """First and last value, and the first pair of neighbours that falls."""
    values = cu_seqlens.tolist()
    return values[0], values[-1], next((pair for pair in itertools.pairwise(values) if pair[1] < pair[0]), None)
