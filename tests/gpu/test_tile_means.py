"""Means of tiles on a GPU: against PyTorch in float64, repeated, replayed."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tilewise.ops.tile_means import tile_means
from tilewise.testing import tile_means as cases
from tilewise.testing.graphs import captured
from tilewise.testing.tile_means import CASES, MeansCase

LARGE = [
    MeansCase("large", 128, (4099, 4099), 8, 128),
    MeansCase("large_wide", 64, (1000,), 4, 256),
    MeansCase("large_packed", 128, (2000, 0, 1, 129, 4096), 8, 64, packed=True),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_pytorch(case: MeansCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton", DEVICE)


def test_bits_repeat() -> None:
    x, cu = cases.make_input(LARGE[2], torch.bfloat16, DEVICE)
    first, again = (tile_means(x, 128, cu_seqlens=cu, similarity=True, variance=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_replayed() -> None:
    x, _ = cases.make_input(LARGE[0], torch.bfloat16, DEVICE)
    x = x.detach()
    graph, found = captured(lambda: tile_means(x, 128, similarity=True))
    x.normal_()
    graph.replay()
    for got, want in zip(found, tile_means(x, 128, similarity=True), strict=True):
        assert torch.equal(got, want)
