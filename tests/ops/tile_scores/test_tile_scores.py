"""Scores of pairs of tiles on a CPU: the specification's, in any shape, and those of the rows themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.ops.tile_means import tile_means
from tilewise.ops.tile_scores.problem import Call
from tilewise.ops.tile_scores.table import TILE_SCORES
from tilewise.testing import tile_scores as cases
from tilewise.testing.tile_scores import CASES, ScoresCase


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_equals_the_specification(case: ScoresCase) -> None:
    cases.check(case, "cpu")


@given(
    rows=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    each=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.sampled_from([1, 8, 33]),
)
def test_any_shape(
    rows: tuple[int, int], size: tuple[int, int], each: tuple[int, int], heads_kv: int, group: int, dim: int
) -> None:
    block = (size[0] * each[0], size[1] * each[1])
    cases.check(ScoresCase("any", rows, block, each, (heads_kv * group, heads_kv), dim, 1), "cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_scores_are_those_of_means_of_rows(impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 2, 16, generator=generator) for n in (50, 45))
    sums = []
    for x, size in ((q, 8), (k, 16)):
        for rows in (x, torch.nn.functional.normalize(x, dim=-1)):
            blocks = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
            sums.append(blocks.sum(2).transpose(1, 2).contiguous())
    call = Call(sums[0], sums[2], sums[1], sums[3], (50, 45), (16, 16), (2, 1), 0.25)
    scores, similar_q, similar_k = TILE_SCORES(call, impl)
    (of_q, alike_q), (of_k, alike_k) = (tile_means(x, 16, similarity=True) for x in (q, k))
    torch.testing.assert_close(scores, of_q @ of_k.transpose(-1, -2) * 0.25)
    torch.testing.assert_close(similar_q, alike_q)
    torch.testing.assert_close(similar_k, alike_k)
