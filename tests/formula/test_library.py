"""Details of the library's masks and scores that a comparison of whole attentions could miss."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.testing import plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("num_buckets", "bidirectional", "max_distance"),
    [
        (32, True, 128),
        (32, False, 128),
        (16, True, 64),
        (64, True, 256),
        (8, True, 20),
        (32, True, 1000),
        (128, False, 512),
    ],
)
def test_t5_buckets_of_every_distance(
    num_buckets: int, bidirectional: bool, max_distance: int, dtype: torch.dtype
) -> None:
    """Distances on a bucket's edge (64 of T5's own 32 buckets) fall into T5's bucket in every precision."""
    table = torch.arange(num_buckets, dtype=dtype)[:, None]
    options = {"bidirectional": bidirectional, "max_distance": max_distance}
    zero, middle, j = torch.tensor(0), torch.tensor([1500]), torch.arange(3000)
    score = tw.relative_bias(table, **options)  # type: ignore[arg-type]
    found = score.evaluate(dtype=dtype, s=torch.zeros(3000, dtype=dtype), b=zero, h=zero, i=middle, j=j)
    wanted = plain.relative_bias(table, **options)(torch.zeros(3000, dtype=dtype), zero, zero, middle, j)  # type: ignore[arg-type]
    assert torch.equal(found, wanted)


def test_tree_times_nest() -> None:
    """A node's interval of entry and exit holds its descendants' and no others'."""
    parents = [-1, 0, 0, 1, 1, 2, -1, 6]
    entry, exit_ = tw.tree_times(parents)
    nested = (entry[None, :] <= entry[:, None]) & (exit_[:, None] <= exit_[None, :])
    i, j = torch.arange(8)[:, None], torch.arange(8)
    assert torch.equal(nested, plain.tree(parents, torch.device("cpu"))(0, 0, i, j))
    assert sorted([*entry.tolist(), *exit_.tolist()]) == list(range(16))


@pytest.mark.parametrize(("shape", "window"), [((20,), (7,)), ((6, 8), (3, 5)), ((3, 4, 5), (3, 1, 5))], ids=str)
def test_every_query_of_a_neighborhood_sees_as_many_keys(shape: tuple[int, ...], window: tuple[int, ...]) -> None:
    total, count = torch.Size(shape).numel(), torch.Size(window).numel()
    zero = torch.tensor(0)
    seen = tw.neighborhood(shape, window).evaluate(
        b=zero, h=zero, i=torch.arange(total)[:, None], j=torch.arange(total)
    )
    assert bool((seen.sum(-1) == count).all())
    assert bool(seen.diagonal().all())
