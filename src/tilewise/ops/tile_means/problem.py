"""The facts of one call of `tile_means`, checked before any work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.tensors import check_dense

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False, slots=True)
class Call:
    """Tiles of `block` rows of x, (batch, seqlen, heads, dim), or (total, heads, dim) with `cu_seqlens`.
    Implementations read this and nothing else.
    """

    x: torch.Tensor
    cu_seqlens: torch.Tensor | None
    block: int
    similarity: bool
    variance: bool
    dtype: torch.dtype  # of x, also where the backward is not given x

    @property
    def wide(self) -> torch.dtype:
        """The dtype of results."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tiles(self) -> int:
        """Tiles of a sequence, or slots for those of packed ones."""
        if self.cu_seqlens is None:
            return -(-self.x.shape[1] // self.block)
        return self.x.shape[0] // self.block + self.cu_seqlens.shape[0] - 1


def make_call(x: Any, block: Any, cu_seqlens: Any, similarity: bool, variance: bool) -> Call:
    """The call of `tile_means`; raises InputError. Cumulative lengths are taken as they are: attention checks them."""
    check_flags(similarity=similarity, variance=variance)
    ndim = 4 if cu_seqlens is None else 3
    check_dense("x", x, "a dense tensor of rows")
    if not isinstance(x, torch.Tensor) or x.ndim != ndim or x.dtype not in DTYPES:
        raise InputError(
            "x",
            got=f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__,
            expected=f"a floating-point tensor {'(batch, seqlen, heads, dim)' if ndim == 4 else '(total, heads, dim)'}",
            hint="cu_seqlens says where packed sequences begin",
        )
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise InputError("x", got=f"stride {x.stride(-1)} in dim", expected="unit stride", hint="x.contiguous()")
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise InputError("block", got=shown(block), expected="an integer >= 1", hint="rows of a tile, such as 128")
    return Call(x, cu_seqlens, block, similarity, variance, x.dtype)


def names(call: Call) -> list[str]:
    """Of the results, in their order."""
    return ["mean"] + ["similarity"] * call.similarity + ["variance"] * call.variance


def results(call: Call) -> Tensors:
    """Empty ones, by name."""
    *_, heads, dim = call.x.shape
    lead = (heads, call.tiles) if call.cu_seqlens is not None else (call.x.shape[0], heads, call.tiles)
    shapes = {"mean": (*lead, dim), "similarity": lead, "variance": (*lead, dim)}
    return {name: torch.empty(shapes[name], dtype=call.wide, device=call.x.device) for name in names(call)}


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """An empty dx."""
    x = kept["x"]
    return {"x": torch.empty(x.shape, dtype=x.dtype, device=x.device)} if "x" in wanted else {}


def parts(call: Call, tensors: Sequence[torch.Tensor], *by_row: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """For each sequence its rows of `by_row` (seqlen, heads, dim), and then its tiles of `tensors` (heads, tiles, ...).
    Reads packed lengths on the host.
    """
    if call.cu_seqlens is None:
        for b in range(by_row[0].shape[0]):
            yield *(x[b] for x in by_row), *(x[b] for x in tensors)
        return
    for b, (start, end) in enumerate(itertools.pairwise(call.cu_seqlens.tolist())):
        first = start // call.block + b
        slots = slice(first, first - (start - end) // call.block)
        yield *(x[start:end] for x in by_row), *(x[:, slots] for x in tensors)
