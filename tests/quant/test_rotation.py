"""The rotation keeps products and evens out channels."""

from __future__ import annotations

import pytest
import torch

from tilewise.core.errors import InputError
from tilewise.quant import decode, encode, rotate


@pytest.mark.parametrize("head_dim", [1, 2, 64, 128])
def test_products_stay(head_dim: int) -> None:
    q, k = torch.randn(2, 5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((rotate(q, 3) * rotate(k, 3)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)
    assert rotate(q.bfloat16()).dtype == torch.bfloat16


def test_seeds_differ() -> None:
    x = torch.randn(4, 64)
    assert not torch.allclose(rotate(x, 0), rotate(x, 1))
    assert torch.equal(rotate(x, 1), rotate(x, 1))


def test_an_outlier_channel_costs_less() -> None:
    k = torch.randn(500, 128, generator=torch.Generator().manual_seed(0))
    k[:, 5] *= 30
    plain, rotated = ((decode(encode(x, "int4")) - x).square().mean() for x in (k, rotate(k)))
    assert rotated < plain / 2


def test_other_head_dims_are_refused() -> None:
    with pytest.raises(InputError, match="x: got head_dim 96; expected a power of 2"):
        rotate(torch.zeros(2, 96))
