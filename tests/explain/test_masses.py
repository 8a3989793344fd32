"""Shares of the weights by tile, beside all weights in float64."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.explain import masses
from tilewise.explain.masses import tile_masses

MASKS = {
    "none": None,
    "causal": tw.causal,
    "by head": tw.mask(lambda b, h, i, j: (i - j <= 9 * h) & (j <= i + b)),
}


def weights(q: torch.Tensor, k: torch.Tensor, mask: tw.Mask | None, scale: float) -> torch.Tensor:
    """Of all pairs (batch, heads, queries, keys), float64."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    if mask is not None:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        b, h, i, j = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        s = s.masked_fill(~mask.evaluate(b=b, h=h, i=i + (k.shape[1] - q.shape[1]), j=j), -torch.inf)
    return s.softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("few", [False, True], ids=["at once", "in parts"])
def test_tiles_hold_what_their_weights_sum_to(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if few:
        monkeypatch.setitem(masses.MOST_SCORES, "cpu", 7 * 50)
    torch.manual_seed(0)
    q, k = torch.randn(2, 37, 4, 16), torch.randn(2, 50, 2, 16)
    of_q, of_k = torch.arange(37) // 8, torch.randperm(50) % 6
    of_q[of_q == 2] = -1  # not looked at
    of_q[of_q > 2] -= 1
    found = tile_masses(q, k, of_q, of_k, mask=MASKS[name], scale=0.7)
    assert found.shape == (2, 4, 4, 6)
    every = weights(q, k, MASKS[name], 0.7)
    for row in range(4):
        for column in range(6):
            part = every[:, :, of_q == row][..., of_k == column].sum(-1).mean(-1)
            torch.testing.assert_close(found[:, :, row, column].double(), part, rtol=0, atol=1e-6)


def test_queries_that_see_no_key_hold_nothing() -> None:
    q = torch.randn(1, 4, 1, 8)
    first = tw.mask(lambda b, h, i, j: i >= 2)
    found = tile_masses(q, q, torch.arange(4) // 2, torch.zeros(4, dtype=torch.int64), mask=first)
    torch.testing.assert_close(found.flatten(), torch.tensor([0.0, 1.0]))


def test_an_index_of_another_length_is_refused() -> None:
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(InputError, match="of_k"):
        tile_masses(q, q, torch.arange(4), torch.arange(3))
