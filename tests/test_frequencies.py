"""Tables of cosines and sines: those of transformers, exact angles, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.frequencies import Scaling, frequencies

LENGTHS = (100, 4096, 40_000)
SCALINGS: dict[str, tuple[Scaling, dict[str, Any]]] = {
    "linear": (tw.LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (tw.DynamicScaling(2.0, 4096), {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (
        tw.YarnScaling(8.0, 4096),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    ),
    "yarn_named": (
        tw.YarnScaling(40.0, 2048, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
    "yarn_short": (  # no pair makes so many turns
        tw.YarnScaling(4.0, 4),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
    ),
    "llama3": (
        tw.Llama3Scaling(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("rotary_dim", [16, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_frequencies_are_those_of_transformers(name: str, rotary_dim: int, base: float, length: int) -> None:
    scaling, parameters = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=2 * rotary_dim,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=parameters | {"rope_theta": base},
    )
    want, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    found, scale = frequencies(rotary_dim, length, base, scaling)
    torch.testing.assert_close(found.float(), want, rtol=2e-6, atol=0.0)
    assert scale == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("rotary_dim", [16, 128])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_longrope_is_that_of_transformers(rotary_dim: int, length: int, attention_factor: float | None) -> None:
    short, long = ([1.0 + n * step for n in range(rotary_dim // 2)] for step in (0.01, 0.25))
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": 4096, "attention_factor": attention_factor,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=2 * rotary_dim, num_attention_heads=2, rope_parameters=parameters)
    want, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
    scaling = tw.LongRopeScaling(8.0, short, long, 4096, attention_factor)
    found, scale = frequencies(rotary_dim, length, 1e4, scaling)
    torch.testing.assert_close(found.float(), want, rtol=2e-6, atol=0.0)
    assert scale == pytest.approx(factor, rel=1e-12)
    assert scaling == tw.LongRopeScaling(8.0, tuple(short), tuple(long), 4096, attention_factor)


def test_scalings_differ_from_none_and_each_other() -> None:
    tables = [tw.rope_tables(64, 5000, scaling=x)[0] for x in (None, *(x for x, _ in SCALINGS.values()))]
    for n, a in enumerate(tables):
        assert not any(torch.equal(a, b) for b in tables[:n])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_angles_are_exact(dtype: torch.dtype) -> None:
    cos, sin = tw.rope_tables(8, 100_001, base=100.0, dtype=dtype)
    assert cos.shape == sin.shape == (100_001, 4)
    assert cos.dtype == sin.dtype == dtype
    for position in (0, 1, 99_999, 100_000):
        for n in range(4):
            angle = position * 100.0 ** (-2 * n / 8)
            assert cos[position, n].item() == pytest.approx(math.cos(angle), abs=torch.finfo(dtype).eps + 1e-9)
            assert sin[position, n].item() == pytest.approx(math.sin(angle), abs=torch.finfo(dtype).eps + 1e-9)


def test_the_attention_factor_is_in_the_tables() -> None:
    cos, sin = tw.rope_tables(32, 50, scaling=tw.YarnScaling(16.0, 10), dtype=torch.float64)
    norm = torch.full_like(cos, 0.1 * math.log(16.0) + 1.0)
    torch.testing.assert_close(torch.hypot(cos, sin), norm)


def test_dynamic_scaling_begins_behind_the_original_length() -> None:
    plain = tw.rope_tables(16, 64)
    assert all(map(torch.equal, tw.rope_tables(16, 64, scaling=tw.DynamicScaling(4.0, 64)), plain))
    slowest = [frequencies(16, n, scaling=tw.DynamicScaling(1.0, 64))[0][-1] * n for n in (64, 640)]
    torch.testing.assert_close(*slowest)


def test_the_device_is_kept() -> None:
    assert all(x.device.type == "meta" for x in tw.rope_tables(8, 10, device="meta"))


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: tw.rope_tables(7, 10), r"rotary_dim: got 7; expected an even int of 2 or more"),
    (lambda: tw.rope_tables(0, 10), r"rotary_dim: got 0"),
    (lambda: tw.rope_tables(8.0, 10), r"rotary_dim: got 8.0"),
    (lambda: tw.rope_tables(8, 0), r"length: got 0; expected an int of 1 or more"),
    (lambda: tw.rope_tables(8, True), r"length: got True"),
    (lambda: tw.rope_tables(8, 10, base=1.0), r"base: got 1.0; expected a number above 1"),
    (lambda: tw.rope_tables(8, 10, base="1e4"), r"base: got '1e4'"),
    (lambda: tw.rope_tables(8, 10, scaling=2.0), r"scaling: got float; expected None, a LinearScaling"),
    (lambda: tw.rope_tables(8, 10, dtype=torch.int32), r"dtype: got torch.int32"),
    (lambda: tw.rope_tables(2, 10, scaling=tw.DynamicScaling(2.0, 4)), r"rotary_dim: got 2; expected 4 or more"),
    (lambda: tw.LinearScaling(0.5), r"LinearScaling factor: got 0.5; expected a number of 1 or more"),
    (lambda: tw.LinearScaling(math.nan), r"LinearScaling factor: got nan"),
    (lambda: tw.LinearScaling("4"), r"LinearScaling factor: got '4'"),
    (lambda: tw.LongRopeScaling(2.0, [1.0], [1.0, 2.0], 64), r"long_factors: got 2 numbers; expected 1, as short"),
    (
        lambda: tw.LongRopeScaling(2.0, [0.0], [1.0], 64),
        r"LongRopeScaling short_factors: got \[0.0\]; expected",
    ),
    (lambda: tw.LongRopeScaling(0.5, [1.0], [1.0], 64), r"LongRopeScaling factor: got 0.5; expected a number of 1"),
    (lambda: tw.LongRopeScaling(2.0, [1.0], [1.0], 1), r"LongRopeScaling original_length: got 1; expected an int of 2"),
    (
        lambda: tw.rope_tables(16, 10, scaling=tw.LongRopeScaling(2.0, [1.0], [1.0], 64)),
        r"LongRopeScaling: got 1 factors; expected 8, one for each pair of rotary_dim=16",
    ),
    (lambda: tw.DynamicScaling(2.0, 0), r"original_length: got 0; expected an int of 1 or more"),
    (lambda: tw.YarnScaling(2.0, 4.0), r"original_length: got 4.0"),
    (lambda: tw.YarnScaling(2.0, 4, beta_slow=32.0), r"YarnScaling beta_slow: got 32.0; expected less than beta_fast"),
    (lambda: tw.YarnScaling(2.0, 4, attention_factor=0.0), r"attention_factor: got 0.0; expected a number above 0"),
    (lambda: tw.Llama3Scaling(8.0, 4.0, 1.0, 8192), r"low_freq_factor: got 4.0; expected less than high_freq_factor"),
    (lambda: tw.Llama3Scaling(8.0, -1.0, 1.0, 8192), r"low_freq_factor: got -1.0"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
