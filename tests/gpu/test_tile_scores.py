"""Scores of pairs of tiles on a GPU: the specification's, repeated, replayed."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tilewise.ops.tile_scores.table import TILE_SCORES
from tilewise.testing import tile_scores as cases
from tilewise.testing.graphs import captured
from tilewise.testing.tile_scores import CASES, ScoresCase

LARGE = [
    ScoresCase("large", (8192, 8000), (128, 128), dim=128),
    ScoresCase("more_tiles", (65_600, 33_000), (128, 128), dim=64, batch=1),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
def test_equals_the_specification(case: ScoresCase) -> None:
    cases.check(case, "triton", DEVICE)


def test_bits_repeat_and_are_replayed() -> None:
    call = cases.make_call(LARGE[0], DEVICE)
    first, again = TILE_SCORES(call), TILE_SCORES(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    graph, found = captured(lambda: TILE_SCORES(call))
    call.q_sums.mul_(0.5)
    graph.replay()
    for got, want in zip(found, TILE_SCORES(call), strict=True):
        assert torch.equal(got, want)
