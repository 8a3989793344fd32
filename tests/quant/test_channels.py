"""Keys by channel: how far codes are from keys, channels that are equal or not finite, open pages, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.errors import InputError
from tilewise.quant import ByChannel, channels, decode, encode, encode_by_channel

BITS = (4, 2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keys_of(made: ByChannel) -> torch.Tensor:
    return made.keys(torch.arange(len(made.data)))


def keys(seed: int, page_size: int, head_dim: int, exponent: int, dtype: torch.dtype) -> torch.Tensor:
    """(3, page_size, 2, head_dim): channels that lie far apart."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(3, page_size, 2, head_dim, generator=make) + 4 * torch.randn(3, 1, 2, head_dim, generator=make)
    return (x * 2.0**exponent).to(dtype)


def error_is_half_a_step(x: torch.Tensor, bits: int) -> None:
    """Of a step that is rounded to the dtype of x, to a multiple of its least number at worst."""
    made = encode_by_channel(x, bits)
    found, exact = keys_of(made).double(), x.double()
    assert (made.bits, made.shape, made.scale.dtype) == (bits, tuple(x.shape), x.dtype)
    span, most = exact.amax(1) - exact.amin(1), 2**bits - 1
    unit, info = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype)
    step = span / most
    lost = step * (unit + 2.0**-23) + info.smallest_normal * info.eps  # of a step, by rounding
    lost = torch.where(made.scale == 0, span / most, lost)
    allowed = (step + lost) / 2 + most * lost + 2.0**-23 * exact.abs().amax(1)
    assert ((found - exact).abs() <= allowed[:, None]).all()
    assert torch.equal(made.least.double(), exact.amin(1))
    assert ((made.scale.double() - step).abs() <= lost).all()


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    page_size=st.integers(1, 20),
    quarter=st.integers(1, 10),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_error_is_half_a_step(
    bits: int, page_size: int, quarter: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    exponent = exponent if dtype != torch.float16 else exponent // 6
    error_is_half_a_step(keys(seed, page_size, 4 * quarter, exponent, dtype), bits)


def test_an_error_beyond_half_a_step_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "round", torch.Tensor.floor)
    for bits in BITS:
        with pytest.raises(AssertionError):
            error_is_half_a_step(keys(0, 16, 16, 0, torch.float32), bits)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_is_itself(bits: int) -> None:
    """A channel that has all codes, and the least number far below 0."""
    x = torch.arange(2**bits).float()[None, :, None, None] * 0.5 - 100 + torch.arange(8)
    made = encode_by_channel(x, bits)
    assert torch.equal(keys_of(made), x)
    assert (made.scale == 0.5).all()
    again = encode_by_channel(keys_of(made), bits)
    assert torch.equal(again.data, made.data)


def test_where_numbers_lie() -> None:
    """A byte has numbers that are a half, or a quarter, of the head apart."""
    x = torch.zeros(1, 2, 1, 8)
    x[0, 1, 0] = 15.0
    x[0, 0, 0] = torch.arange(8) + 1.0  # so the least of a channel is its first token's, and code 0
    x[0, 0, 0, 2], x[0, 1, 0, 2] = 15.0, 3.0  # but of one
    made = encode_by_channel(x, 4)
    assert made.data[0, :, 0].tolist() == [[0, 0, 15, 0], [255, 255, 240, 255]]
    made = encode_by_channel(x, 2)
    assert made.data[0, :, 0].tolist() == [[0b001100, 0], [0b11110011, 255]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_equal_keys_stay_as_they_are(bits: int, dtype: torch.dtype) -> None:
    x = keys(0, 1, 8, 0, dtype).expand(3, 5, 2, 8)
    made = encode_by_channel(x, bits)
    assert torch.equal(keys_of(made), x.float())
    assert not made.scale.any()
    x = torch.tensor([-0.0, 0.0], dtype=dtype)[None, :, None, None].expand(1, 2, 1, 4)
    made = encode_by_channel(x, bits)
    assert not made.least.signbit().any()  # whichever of both zeros is found first


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", BITS)
def test_a_channel_that_is_not_finite_is_nan_and_no_other(bits: int, bad: float) -> None:
    x = keys(0, 6, 8, 0, torch.float32)
    whole = keys_of(encode_by_channel(x, bits))
    x[1, 3, 0, 5] = bad
    found = keys_of(encode_by_channel(x, bits))
    assert found[1, :, 0, 5].isnan().all()
    whole[1, :, 0, 5] = found[1, :, 0, 5] = 0.0
    assert torch.equal(found, whole)
    x[1, :, 0, 5] = torch.tensor([3e38, -3e38] * 3)
    assert keys_of(encode_by_channel(x, bits))[1, :, 0, 5].isnan().all()


def test_least_and_codes_add_up_exactly_and_are_rounded_once() -> None:
    x = keys(3, 16, 64, 0, torch.bfloat16)
    made = encode_by_channel(x, 4)
    codes = torch.cat([made.data & 15, made.data >> 4], -1).double()
    want = codes * made.scale.double()[:, None] + made.least.double()[:, None]
    assert torch.equal(keys_of(made), want.float())


def test_by_channel_is_nearer_where_channels_lie_apart() -> None:
    x = keys(0, 64, 64, 0, torch.float32)
    by_channel, by_token = keys_of(encode_by_channel(x, 4)), decode(encode(x, "int4"))
    assert (by_channel - x).norm() < 0.5 * (by_token - x).norm()


def test_open_pages_are_as_they_are() -> None:
    x = keys(0, 4, 8, 0, torch.bfloat16)
    made = encode_by_channel(x, 2)
    opened = keys(1, 4, 8, 0, torch.bfloat16)
    mixed = replace(made, open=opened, place=torch.tensor([-3, 2, 0], dtype=torch.int32))
    found = mixed.keys(torch.tensor([2, 0, 1, 1]))
    want = [opened[0].float(), keys_of(made)[0], opened[2].float(), opened[2].float()]
    assert torch.equal(found, torch.stack(want))
    assert mixed.nbytes == made.nbytes + opened.nbytes


MADE = encode_by_channel(torch.ones(3, 4, 2, 8), 4)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "other bits": (lambda: encode_by_channel(torch.ones(3, 4, 2, 8), 8), r"bits: got 8; expected 4 or 2"),
    "integers": (lambda: encode_by_channel(torch.ones(3, 4, 2, 8).int(), 4), r"x: got torch.int32 \(3, 4, 2, 8\)"),
    "three dimensions": (lambda: encode_by_channel(torch.ones(4, 2, 8), 4), r"x: got torch.float32 \(4, 2, 8\)"),
    "pages of no tokens": (lambda: encode_by_channel(torch.ones(3, 0, 2, 8), 4), r"x: got .*\(3, 0, 2, 8\)"),
    "a list": (lambda: encode_by_channel([1.0], 4), r"x: got list"),  # type: ignore[arg-type]
    "a head_dim": (lambda: encode_by_channel(torch.ones(3, 4, 2, 6), 2), r"got head_dim 6; expected a multiple of 4"),
    "codes of 16 bits": (lambda: replace(MADE, data=MADE.data.short()), r"ByChannel data: got torch.int16"),
    "codes by token": (lambda: replace(MADE, data=MADE.data[0]), r"ByChannel data: got torch.uint8 \(4, 2, 4\)"),
    "no tensor": (lambda: replace(MADE, least=None), r"ByChannel least: got NoneType"),
    "codes apart": (lambda: replace(MADE, data=MADE.data.transpose(2, 3)), r"ByChannel data: got .* strides"),
    "open pages of another size": (lambda: replace(MADE, open=torch.ones(1, 5, 2, 8)), r"ByChannel open: got"),
    "another head_dim": (lambda: replace(MADE, open=torch.ones(1, 4, 2, 12)), r"head_dim 8 or 16"),
    "float64": (lambda: replace(MADE, open=torch.ones(1, 4, 2, 8).double()), r"ByChannel open: got torch.float64"),
    "scales of 16 bits": (lambda: replace(MADE, scale=MADE.scale.half()), r"scale: got torch.float16 \(3, 2, 8\)"),
    "a scale for each token": (
        lambda: replace(MADE, least=torch.ones(3, 4, 8)),
        r"least: got .*\(3, 4, 8\) on cpu; exp",
    ),
    "places of 64 bits": (lambda: replace(MADE, place=MADE.place.long()), r"place: got torch.int64 \(3,\)"),
    "places elsewhere": (lambda: replace(MADE, place=MADE.place.to("meta")), r"ByChannel place"),
    "places that are no tensor": (lambda: replace(MADE, place=[0]), r"place: got list"),
    "a row too many": (
        lambda: replace(MADE, place=MADE.place + 1).check_places(),
        r"k.place: got row 0; expected below 0",
    ),
    "no such row": (lambda: replace(MADE, place=MADE.place - 1).check_places(), r"k.place: got row 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        make()


def test_the_smallest_step_is_a_normal_number() -> None:
    """GPUs may take smaller ones for 0."""
    x = torch.tensor([0.0, channels.SMALLEST * 3])[None, :, None, None].repeat(2, 1, 1, 4)
    x[1] *= 0.99
    assert encode_by_channel(x, 2).scale[:, 0, 0].tolist() == [channels.SMALLEST, 0.0]
