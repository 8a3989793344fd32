"""Cases of `tile_means`, and what must hold of them on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.ops.operation import Operation
from tilewise.ops.tile_means import tile_means
from tilewise.ops.tile_means.problem import make_call
from tilewise.ops.tile_means.table import TILE_MEANS


@dataclass(frozen=True)
class MeansCase:
    """Sequences of some lengths, in tiles of `block` rows."""

    name: str
    block: int
    lengths: tuple[int, ...] = (77, 77)
    heads: int = 3
    dim: int = 32
    packed: bool = False
    sliced: bool = False  # heads of a wider tensor

    def __repr__(self) -> str:
        return self.name


CASES = [
    MeansCase("halves", 40),
    MeansCase("whole", 77),
    MeansCase("wider_than_rows", 128, (20, 20)),
    MeansCase("single_rows", 1, (5, 5), dim=8),
    MeansCase("odd_dim", 16, dim=41),
    MeansCase("wide", 16, (33,), 2, 256),
    MeansCase("steps", 300, (650,), 1, 128),
    MeansCase("sliced", 24, sliced=True),
    MeansCase("packed", 16, (5, 0, 16, 33, 1), packed=True),
    MeansCase("packed_sliced", 128, (130, 0, 0, 7), dim=64, packed=True, sliced=True),
    MeansCase("nothing", 16, (0, 0)),
]
BY_NAME = {case.name: case for case in CASES}


def make_input(case: MeansCase, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x, cumulative lengths of packed sequences); one row of x is 0."""
    lead = (sum(case.lengths),) if case.packed else (len(case.lengths), case.lengths[0])
    generator = torch.Generator().manual_seed(len(case.name))
    x = torch.randn(*lead, case.heads * (2 if case.sliced else 1), case.dim, generator=generator) + 1.0
    if lead[-1] > 2:
        x[..., 2, :, :] = 0.0
    x = x.to(device, dtype)
    cu = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    return (x[..., : case.heads, :] if case.sliced else x).requires_grad_(), cu if case.packed else None


def check(case: MeansCase, dtype: torch.dtype, impl: str | None, device: str = "cpu") -> None:
    """Results and gradients are those of PyTorch in float64, tile by tile, within roundings of float32 sums; slots that
    no tile has hold 0.
    """
    x, cu = make_input(case, dtype, device)
    found = tile_means(x, case.block, cu_seqlens=cu, similarity=True, variance=True, impl=impl)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(part.dtype == wide for part in found)
    exact = x.detach().double().requires_grad_()
    want = [torch.zeros_like(part, dtype=torch.float64) for part in found]
    start = 0
    for b, length in enumerate(case.lengths):
        rows = exact[start : start + length] if case.packed else exact[b]
        first = start // case.block + b if case.packed else 0
        for tile, part in enumerate(torch.split(rows, case.block) if length else ()):
            unit = torch.nn.functional.normalize(part, dim=-1, eps=0.0).nan_to_num()
            at: Any = (slice(None), first + tile) if case.packed else (b, slice(None), tile)
            want[0][at] = part.mean(0)
            want[1][at] = torch.einsum("ihd,jhd->hij", unit, unit).mean((1, 2)).detach()
            want[2][at] = ((part - part.mean(0)) ** 2).mean(0)
        start += length if case.packed else 0
    eps = torch.finfo(wide).eps
    size = 1.0 + (float(exact.detach().abs().max()) if x.numel() else 0.0)
    for got, right in zip(found, want, strict=True):
        assert got.shape == right.shape
        off = (got.detach().double() - right.detach()).abs()
        assert not off.numel() or float(off.max()) <= 32 * eps * size**2
    by = [torch.randn(found[n].shape, generator=torch.Generator().manual_seed(n)).to(device, wide) for n in (0, 2)]
    (dx,) = torch.autograd.grad((found[0], found[2]), x, by)
    if not x.numel():
        assert dx.shape == x.shape
        return
    (right,) = torch.autograd.grad((want[0], want[2]), exact, [g.double() for g in by])
    allowed = torch.finfo(dtype).eps * right.abs() + 64 * eps * size * (1 + float(max(g.abs().max() for g in by)))
    assert dx.dtype == dtype
    assert bool(((dx.double() - right).abs() <= allowed).all())


def _variant(
    similarity: bool, variance: bool, packed: bool
) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        """Heads of 128, 100, or 256, in tiles of 128, or of 64."""
        dim, block = {4096: (128, 128), 1000: (100, 64)}.get(width, (256, 128))
        x = torch.zeros(*((300,) if packed else (2, 256)), 4, dim, dtype=dtype, requires_grad=True)
        cu = torch.tensor([0, 100, 300], dtype=torch.int32) if packed else None
        return TILE_MEANS, make_call(x, block, cu, similarity, variance)

    return make


VARIANTS = {
    "means": _variant(False, False, False),
    "alike": _variant(True, False, False),
    "alike packed": _variant(True, False, True),
    "spread": _variant(False, True, False),
}
