"""`fast_linear`: the same as PyTorch's linear layer, whichever order of the product it takes."""

from __future__ import annotations

import doctest

import pytest
import torch

from tilewise.ops.linear import fast
from tilewise.ops.linear.fast import fast_linear

SHAPES = {"wide": (96, 40), "narrow": (40, 96), "long": (8, 2100), "single": (1, 1)}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_product_in_float64(
    shape: str, bias: bool, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    out_features, in_features = SHAPES[shape]
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, in_features, generator=generator), torch.randn(out_features, in_features)
    b = torch.randn(out_features) if bias else None
    found = fast_linear(x, weight, b)
    want = x.double() @ weight.double().t() + (0.0 if b is None else b.double())
    bound = x.double().abs() @ weight.double().abs().t() + (0.0 if b is None else b.double().abs())
    assert found.shape == (rows, out_features)
    assert found.is_contiguous()
    assert ((found - want).abs() <= (in_features + 1) * 2.0**-24 * bound).all()


def test_other_dtypes_are_pytorchs() -> None:
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    assert torch.equal(fast_linear(x, weight), torch.nn.functional.linear(x, weight))


def test_the_example() -> None:
    assert doctest.testmod(fast, extraglobs={"torch": torch}).failed == 0


def test_rows_of_any_stride() -> None:
    x, weight = torch.randn(16, 6).t(), torch.randn(8, 16)
    torch.testing.assert_close(fast_linear(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)
