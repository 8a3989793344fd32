"""The model of accumulators of few bits: what is cut off, and that a fresh one keeps the error where it was."""

from __future__ import annotations

import pytest
import torch

from tilewise.core.errors import InputError
from tilewise.explain.accumulators import BITS, STEP, cut, flat_rows, product


def test_bits_are_cut_towards_zero() -> None:
    x = torch.tensor([1.0 + 3 * 2.0**-14, -1.0 - 2.0**-14, 2.0**100 * (2 - 2.0**-30), 0.0, -0.5], dtype=torch.float64)
    want = [1.0 + 2.0**-13, -1.0, 2.0**100 * (2 - 2.0**-13), 0.0, -0.5]
    assert cut(x).tolist() == want
    y = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cut(y, 23), y.double())
    assert bool(((y - cut(y)).abs() < y.abs() * 2.0**-BITS).all())
    assert bool((cut(y).abs() <= y.abs()).all())


def test_a_product_is_exact_where_nothing_is_cut() -> None:
    weights, values = flat_rows(300)
    want = weights.double() @ values.double()
    torch.testing.assert_close(product(weights, values, bits=52), want, rtol=1e-12, atol=1e-9)
    assert product(weights[:, :0], values[:0]).abs().max() == 0


def test_one_step_keeps_13_bits() -> None:
    """Whole numbers below 2**14 pass, one above it loses its last bit."""
    ones = torch.ones(1, STEP)
    terms = torch.zeros(STEP, 2)
    terms[:2] = torch.tensor([[2.0**13, 2.0**14], [2.0**13 - 1, 1.0]])
    assert product(ones, terms).tolist() == [[2.0**14 - 1, 2.0**14]]


def error(keys: int, flush: int | None) -> float:
    weights, values = flat_rows(keys)
    want = weights.double() @ values.double()
    return float((product(weights, values, flush=flush) - want).abs().sum() / want.abs().sum())


def test_errors_grow_with_the_length_unless_the_accumulator_is_fresh() -> None:
    """Some 0.3 % at 4,096 keys and 2.5 % at 32,768; with a fresh one each 128 keys 0.011 % at any length."""
    assert error(4096, None) == pytest.approx(0.003, rel=0.15)
    assert error(32_768, None) == pytest.approx(0.025, rel=0.15)
    for keys in (512, 4096, 32_768):
        assert error(keys, 128) == pytest.approx(0.00011, rel=0.15)
    assert error(4096, 4096) == error(4096, None)
    assert error(4096, 128) < error(4096, 512) < error(4096, None)


def test_bad_input() -> None:
    weights, values = flat_rows(64)
    for call, name in (
        (lambda: product(weights, values[:-1]), "a, b"),
        (lambda: product(weights, values, flush=48), "flush"),
        (lambda: product(weights, values, flush=0), "flush"),
        (lambda: cut(weights, 53), "bits"),
    ):
        with pytest.raises(InputError, match=name):
            call()
