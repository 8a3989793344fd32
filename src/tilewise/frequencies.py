"""Tables of cosines and sines for `Rope`: how fast each pair of dimensions turns, and for longer contexts than a model
was trained on, how much slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LinearScaling:
    """Every pair turns `factor` times slower (Chen, Wong, Chen and Tian, "Extending Context Window of Large Language
    Models via Positional Interpolation", 2023).

    Raises InputError unless factor is 1 or more.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_scaling(self)


@dataclass(frozen=True)
class DynamicScaling:
    """Tables longer than original_length have a base so much larger that the slowest pair turns as far as with tables
    of original_length, where factor is 1; the fastest stays ("NTK-aware" and "dynamic" in Peng, Quesnelle, Fan and
    Shippole, "YaRN: Efficient Context Window Extension of Large Language Models", 2023).

    The base is multiplied by (factor length / original_length - (factor - 1)) ** (rotary_dim / (rotary_dim - 2)).

    Raises InputError unless factor is 1 or more and original_length positive.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_scaling(self)


@dataclass(frozen=True)
class YarnScaling:
    """Pairs that make more than beta_fast turns over original_length tokens stay, those with fewer than beta_slow turn
    `factor` times slower, and between them the share is linear in the pair (Peng, Quesnelle, Fan and Shippole, "YaRN:
    Efficient Context Window Extension of Large Language Models", 2023).

    Cosines and sines are multiplied by attention_factor, None for the paper's 0.1 ln(factor) + 1; scores are then by
    its square.

    Raises InputError unless factor is 1 or more, the others positive and beta_slow below beta_fast.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_scaling(self)
        _check_order(self, "beta_slow", "beta_fast")


@dataclass(frozen=True)
class Llama3Scaling:
    """Pairs that make more than high_freq_factor turns over original_length tokens stay, those with fewer than
    low_freq_factor turn `factor` times slower, and between them the share is linear in the turns (Grattafiori et al.,
    "The Llama 3 Herd of Models", 2024; the numbers are those of Llama 3.1).

    Raises InputError unless factor is 1 or more, the others positive and low_freq_factor below high_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_scaling(self)
        _check_order(self, "low_freq_factor", "high_freq_factor")


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


def rope_tables(
    rotary_dim: int,
    length: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0 to length - 1: pair n turns by base ** (-2 n / rotary_dim) radians a token (Su
    et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021), unless `scaling` says otherwise.

    Angles are computed in float64, in which those of far positions are exact to 1e-9, and rounded once.

    Args:
        rotary_dim: how many dimensions of a head are turned, even.
        length: positions, the longest context.
        base: above 1; models of long contexts have larger ones (`rope_theta`).
        scaling: None, or a LinearScaling, DynamicScaling, YarnScaling or Llama3Scaling.
        device: of the tables; None takes PyTorch's default.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        (cos, sin), each (length, rotary_dim / 2), as `Rope` takes them.

    Raises:
        InputError: an argument is wrong.
    """
    _check_count("rotary_dim", rotary_dim, 2)
    _check_count("length", length, 1)
    if dtype not in _FLOATS:
        raise InputError(
            "dtype", got=shown(dtype), expected="float16, bfloat16, float32 or float64", hint="float32 is usual"
        )
    frequency, factor = frequencies(rotary_dim, length, base, scaling)
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angle = torch.outer(positions, frequency.to(positions.device))
    return (factor * angle.cos()).to(dtype), (factor * angle.sin()).to(dtype)


def frequencies(
    rotary_dim: int, length: int, base: float = 10000.0, scaling: Scaling | None = None
) -> tuple[torch.Tensor, float]:
    """Radians a token of each pair, float64 on the CPU, and by what cosines and sines are multiplied."""
    if not is_finite(base) or base <= 1:
        raise InputError("base", got=shown(base), expected="a number above 1", hint="10000 in the paper")
    if scaling is not None and not isinstance(scaling, Scaling):
        raise InputError(
            "scaling",
            got=type(scaling).__name__,
            expected="None, a LinearScaling, DynamicScaling, YarnScaling or Llama3Scaling",
            hint="a model's rope_type says which",
        )
    if isinstance(scaling, DynamicScaling):
        if rotary_dim < 4:
            raise InputError(
                "rotary_dim", got=rotary_dim, expected="4 or more", hint="one pair turns alike at every base"
            )
        stretch = max(length, scaling.original_length) / scaling.original_length
        more = scaling.factor * stretch - (scaling.factor - 1)
        base *= more ** (rotary_dim / (rotary_dim - 2))
    plain = float(base) ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, YarnScaling):
        factor = scaling.attention_factor
        return _yarn(plain, base, scaling), 0.1 * math.log(scaling.factor) + 1.0 if factor is None else factor
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_length * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return _between(plain, ((turns - low) / (high - low)).clamp(0.0, 1.0), scaling.factor), 1.0
    return plain, 1.0


def _yarn(plain: torch.Tensor, base: float, scaling: YarnScaling) -> torch.Tensor:
    """Which pairs make so many turns is rounded to whole pairs, outwards, as the paper's code has it."""
    rotary_dim = 2 * len(plain)

    def pair_with(turns: float) -> float:
        return rotary_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last: float = min(math.ceil(pair_with(scaling.beta_slow)), rotary_dim - 1)
    if first == last:
        last += 0.001  # a step
    pair = torch.arange(len(plain), dtype=torch.float64, device="cpu")
    return _between(plain, 1 - ((pair - first) / (last - first)).clamp(0.0, 1.0), scaling.factor)


def _between(plain: torch.Tensor, kept: torch.Tensor, factor: float) -> torch.Tensor:
    """The share `kept` of each frequency stays, the rest is divided by factor."""
    return plain * kept + plain / factor * (1 - kept)


def _check_count(name: str, value: Any, least: int) -> None:
    even = name != "rotary_dim" or (isinstance(value, int) and value % 2 == 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or not even:
        kind = "an even int" if least == 2 else "an int"
        raise InputError(name, got=shown(value), expected=f"{kind} of {least} or more", hint="see `tilewise.Rope`")


def _check_scaling(scaling: Any) -> None:
    """Every number is positive, lengths are whole, and factors do not shorten."""
    for field in fields(scaling):
        value, name = getattr(scaling, field.name), f"{type(scaling).__name__} {field.name}"
        if field.name == "original_length":
            _check_count(name, value, 1)
        elif not (field.name == "attention_factor" and value is None):
            least = 1.0 if field.name == "factor" else 0.0
            if not is_finite(value) or value < least or not value:
                says = "a number of 1 or more" if least else "a number above 0"
                raise InputError(name, got=shown(value), expected=says, hint="a model's rope_scaling has it")


def _check_order(scaling: Any, less: str, more: str) -> None:
    low, high = getattr(scaling, less), getattr(scaling, more)
    if low >= high:
        raise InputError(
            f"{type(scaling).__name__} {less}", got=low, expected=f"less than {more}, {high}", hint="swap them"
        )
