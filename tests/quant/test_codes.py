"""Codes: how far they are from what they encode, what zeros, NaN and tiny numbers become, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.errors import InputError
from tilewise.quant import KINDS, Encoded, codes, decode, encode

ROUNDING = 2.0**-22  # of quotients and products in float32, of the largest value


def half_step(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """How far the nearest code may be: half a scale, or 1/16 of a float with 3 bits of mantissa, if not subnormal."""
    if kind == "fp8":
        return torch.maximum(x.abs() / 16, scale[..., None] * 2.0**-10)
    return (scale / 2)[..., None].expand_as(x)


def rows(seed: int, head_dim: int, exponent: int) -> torch.Tensor:
    """(3, 2, head_dim): normal, with one outlier, some 0."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, head_dim, generator=make) * 2.0**exponent
    x[1, :, 0] *= 100
    return torch.where(torch.rand(x.shape, generator=make) < 0.2, 0.0, x)


def error_is_half_a_step(x: torch.Tensor, kind: str) -> None:
    made = encode(x, kind)
    found = decode(made)
    x = x.float()
    largest = x.abs().amax(-1)
    allowed = half_step(x, made.scale, kind) + ROUNDING * largest[..., None]
    assert found.shape == x.shape == made.shape
    assert ((found - x).abs() <= allowed).all()
    assert (found[x == 0] == 0).all()
    torch.testing.assert_close(made.scale, largest / KINDS[kind].largest, rtol=0, atol=0)
    at_largest = x.abs() == largest[..., None]
    torch.testing.assert_close(found[at_largest], x[at_largest], rtol=1e-6, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    half=st.integers(1, 40),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_error_is_half_a_step(kind: str, half: int, exponent: int, dtype: torch.dtype, seed: int) -> None:
    error_is_half_a_step(rows(seed, 2 * half, exponent).to(dtype), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str) -> None:
    error_is_half_a_step(rows(0, 64, 0).half(), kind)


def test_an_error_beyond_half_a_step_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "round", torch.Tensor.floor)
    for kind in ("int8", "int4"):
        with pytest.raises(AssertionError):
            error_is_half_a_step(rows(0, 16, 0), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_itself(kind: str) -> None:
    """What codes stand for is encoded as these codes again, where the largest is among them."""
    if kind == "fp8":
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        every = every[every.isfinite()]
    else:
        every = torch.arange(-KINDS[kind].largest, KINDS[kind].largest + 1).float()
        every = torch.cat([every, every[:1]])
    found = encode(every * 0.5, kind)
    assert found.scale.item() == 0.5
    assert torch.equal(decode(found), every * 0.5)
    again = encode(decode(found), kind)
    assert torch.equal(again.data.view(torch.uint8), found.data.view(torch.uint8))


def test_where_numbers_of_4_bits_lie() -> None:
    x = torch.tensor([[7.0, -7.0, 0.0, 1.0, 2.0, -3.0]])
    found = encode(x, "int4")
    assert found.data.dtype == torch.uint8
    assert found.data.tolist() == [[15 | 9 << 4, 1 | 10 << 4, 8 | 5 << 4]]
    assert found.shape == (1, 6)
    assert found.nbytes == 3 + 4


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_tiny_rows_are_zero(kind: str) -> None:
    x = torch.zeros(4, 8)
    x[1] = 1e-44  # which float32 holds only roughly
    x[2] = -0.0
    x[3, 2] = 1.0
    found = encode(x, kind)
    assert found.scale[:3].tolist() == [0.0] * 3
    assert (decode(found)[:3] == 0.0).all()
    assert decode(found)[3].tolist() == x[3].tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_nan_and_no_other(kind: str, bad: float) -> None:
    x = rows(0, 8, 0)
    whole = decode(encode(x, kind))
    x[1, 0, 5] = bad
    found = decode(encode(x, kind))
    assert found[1, 0].isnan().all()
    whole[1, 0] = found[1, 0] = 0.0
    assert torch.equal(found, whole)


def test_an_encoded_row_takes_no_gradient() -> None:
    assert not decode(encode(torch.ones(2, 4, requires_grad=True), "int8")).requires_grad


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "another kind": (lambda: encode(torch.ones(2, 4), "int2"), r"kind: got 'int2'; expected one of 'int8', 'fp8'"),
    "integers": (lambda: encode(torch.ones(2, 4).int(), "int8"), r"x: got torch.int32 \(2, 4\)"),
    "a list": (lambda: encode([1.0], "int8"), r"x: got list"),  # type: ignore[arg-type]
    "an odd head_dim": (lambda: encode(torch.ones(2, 5), "int4"), r"x: got head_dim 5; expected an even head_dim"),
    "codes of no kind": (lambda: Encoded(torch.ones(2, 4), torch.ones(2)), r"Encoded data: got torch.float32"),
    "data that is no tensor": (lambda: Encoded(None, torch.ones(2)), r"Encoded data: got NoneType"),  # type: ignore[arg-type]
    "scale that is no tensor": (lambda: Encoded(torch.ones(2).char(), 1.0), r"Encoded scale: got float"),  # type: ignore[arg-type]
    "scales of 16 bits": (
        lambda: Encoded(torch.ones(2, 4).char(), torch.ones(2).half()),
        r"Encoded scale: got torch.float16 \(2,\) on cpu; expected torch.float32 \(2,\) on cpu",
    ),
    "a scale too many": (lambda: Encoded(torch.ones(2, 4).char(), torch.ones(3)), r"Encoded scale: got .*\(3,\)"),
    "a scale for each number": (lambda: Encoded(torch.ones(2, 4).char(), torch.ones(2, 4)), r"one for each row"),
    "scales elsewhere": (lambda: Encoded(torch.ones(2, 4).char(), torch.ones(2, device="meta")), r"on meta"),
    "rows that lie apart": (lambda: Encoded(torch.ones(2, 4).char().T, torch.ones(4)), r"Encoded data: got shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        make()


def test_the_smallest_scale_is_a_normal_number() -> None:
    """GPUs may take smaller ones for 0."""
    x = torch.tensor([[codes.SMALLEST * 127], [codes.SMALLEST * 126.9]])
    assert encode(x, "int8").scale.tolist() == [codes.SMALLEST, 0.0]
