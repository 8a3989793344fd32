"""Sums of blocks of rows, whose tiles are scored, and what must hold on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise.ops.operation import Operation
from tilewise.ops.tile_scores.problem import Call
from tilewise.ops.tile_scores.table import TILE_SCORES


@dataclass(frozen=True)
class ScoresCase:
    """Queries and keys of some `rows`, tiles of `block` of them, of `each` blocks."""

    name: str
    rows: tuple[int, int] = (100, 90)
    block: tuple[int, int] = (32, 16)
    each: tuple[int, int] = (2, 1)
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    batch: int = 2
    alike: bool = True

    def __repr__(self) -> str:
        return self.name


CASES = [
    ScoresCase("ragged"),
    ScoresCase("whole", (64, 64)),
    ScoresCase("not_compared", alike=False),
    ScoresCase("one_tile", (5, 3), heads=(1, 1)),
    ScoresCase("odd_dim", dim=41, each=(1, 4), block=(16, 64)),
    ScoresCase("many", (700, 1300), (16, 16), (1, 2), batch=1),
    ScoresCase("wide", (60, 70), dim=256, heads=(2, 2)),
]
BY_NAME = {case.name: case for case in CASES}


def make_call(case: ScoresCase, device: str = "cpu") -> Call:
    """Sums of random rows."""
    generator = torch.Generator().manual_seed(len(case.name))
    made = []
    for side in range(2):
        size, blocks = case.block[side] // case.each[side], -(-case.rows[side] * case.each[side] // case.block[side])
        x = torch.randn(case.batch, case.heads[side], blocks * size, case.dim, generator=generator) + 0.5
        x[:, :, case.rows[side] :] = 0.0
        units = torch.nn.functional.normalize(x, dim=-1)
        made += [y.view(*x.shape[:2], blocks, size, case.dim).sum(3).to(device) for y in (x, units)]
    q, q_units, k, k_units = made
    alike_q, alike_k = (q_units, k_units) if case.alike else (None, None)
    return Call(q, k, alike_q, alike_k, case.rows, case.block, case.each, case.dim**-0.5)


def check(case: ScoresCase, impl: str | None, device: str = "cpu") -> None:
    """What the specification finds. Each addition of a product's float32 sum rounds to half of 2**-23 of what its sizes
    add up to, and so do a mean and a product by three of TF32, some 32 times.
    """
    found = TILE_SCORES(make_call(case, device), impl)
    call = make_call(case)
    want = TILE_SCORES(call, "reference")
    assert len(found) == len(want) == (3 if case.alike else 1)
    sizes = TILE_SCORES(replace(call, q_sums=call.q_sums.abs(), k_sums=call.k_sums.abs()), "reference")[0]
    assert found[0].shape == want[0].shape
    assert bool(((found[0].cpu() - want[0]).abs() <= (case.dim + 32) * 2.0**-24 * sizes).all())
    for got, right in zip(found[1:], want[1:], strict=True):
        assert got.shape == right.shape
        assert float((got.cpu().double() - right.double()).abs().max()) <= 2.0**-20


def _variant(alike: bool) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        """Heads of 128, 100, or 256."""
        dim = {4096: 128, 1000: 100}.get(width, 256)
        case = ScoresCase("variant", (1024, 1024), (128, 128), (2, 1), dim=dim, alike=alike)
        return TILE_SCORES, make_call(case)

    return make


VARIANTS = {"scores": _variant(False), "alike": _variant(True)}
