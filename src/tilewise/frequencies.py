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

_HINT = "a model's rope_scaling has it"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every angle is divided by `factor`.

    Args:
        factor: at least 1; new context length over that of training.

    Raises:
        InputError: factor is below 1.

    Source: Chen, Wong, Chen and Tian, "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023.

    Example:
        >>> cos, sin = tw.rope_tables(16, 100, scaling=tw.LinearScaling(4.0))
    """

    factor: float

    def __post_init__(self) -> None:
        _check_scaling(self)


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling: tables longer than original_length get a larger base, shorter ones stay as they are.

    The base is multiplied by (factor length / original_length - (factor - 1)) ** (rotary_dim / (rotary_dim - 2)). With
    factor 1 the slowest pair then reaches the same angle at the end of the table as in training; the fastest stays.

    Args:
        factor: at least 1.
        original_length: context length of training, in tokens.

    Raises:
        InputError: factor is below 1, or original_length not positive.

    Source: Peng, Quesnelle, Fan and Shippole, "YaRN: Efficient Context Window Extension of Large Language Models", 2023
    ("NTK-aware" and "dynamic").

    Example:
        >>> cos, sin = tw.rope_tables(16, 100, scaling=tw.DynamicScaling(2.0, original_length=64))
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_scaling(self)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: slow pairs are divided by `factor`, fast ones stay, with a linear ramp over the pairs between them.

    A pair stays if it makes more than beta_fast turns over original_length tokens, and is divided if it makes fewer
    than beta_slow. Cosines and sines are multiplied by attention_factor, and so scores by its square.

    Args:
        factor: at least 1.
        original_length: context length of training, in tokens.
        beta_fast, beta_slow: turns over original_length; beta_slow is the smaller one.
        attention_factor: above 0; None is the paper's 0.1 ln(factor) + 1.

    Raises:
        InputError: factor is below 1, another number not positive, or beta_slow not below beta_fast.

    Source: Peng, Quesnelle, Fan and Shippole, "YaRN: Efficient Context Window Extension of Large Language Models",
    2023.

    Example:
        >>> cos, sin = tw.rope_tables(16, 100, scaling=tw.YarnScaling(4.0, original_length=64))
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
    """Llama 3.1's scaling: slow pairs are divided by `factor`, fast ones stay, with a ramp in turns between them.

    A pair stays if it makes more than high_freq_factor turns over original_length tokens, and is divided if it makes
    fewer than low_freq_factor.

    Args:
        factor: at least 1.
        low_freq_factor, high_freq_factor: turns over original_length; low_freq_factor is the smaller one.
        original_length: context length of training, in tokens.

    Raises:
        InputError: factor is below 1, another number not positive, or low_freq_factor not below high_freq_factor.

    Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024; the formula is that of Llama 3.1's code.

    Example:
        >>> cos, sin = tw.rope_tables(16, 100, scaling=tw.Llama3Scaling(8.0, 1.0, 4.0, 8192))
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_scaling(self)
        _check_order(self, "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: each pair has a factor of its own, by which its angle is divided.

    Tables longer than original_length use long_factors, others short_factors. Cosines and sines are multiplied by
    attention_factor, and so scores by its square.

    Args:
        factor: at least 1; new context length over that of training.
        short_factors, long_factors: a number above 0 for each pair.
        original_length: context length of training, in tokens; 2 or more.
        attention_factor: above 0; None is the paper's sqrt(1 + ln(factor) / ln(original_length)).

    Raises:
        InputError: factor is below 1, another number not positive, or the two lists differ in length.

    Source: Ding, Zhang, Xu, Shang, Xu, Xu, Yang and Yang, "LongRoPE: Extending LLM Context Window Beyond 2 Million
    Tokens", 2024.

    Example:
        >>> scaling = tw.LongRopeScaling(4.0, (1.0,) * 8, (1.0,) * 4 + (4.0,) * 4, original_length=64)
        >>> cos, sin = tw.rope_tables(16, 100, scaling=scaling)
    """

    factor: float
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):
            listed = getattr(self, name)
            if not isinstance(listed, (list, tuple)) or not listed or not all(is_finite(x) and x > 0 for x in listed):
                expected = "numbers above 0, one for each pair"
                raise InputError(f"LongRopeScaling {name}", got=shown(listed), expected=expected, hint=_HINT)
            object.__setattr__(self, name, tuple(float(x) for x in listed))
        if len(self.short_factors) != len(self.long_factors):
            got, expected = f"{len(self.long_factors)} numbers", f"{len(self.short_factors)}, as short_factors has"
            raise InputError("LongRopeScaling long_factors", got=got, expected=expected, hint=_HINT)
        _check_scaling(self)


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


def rope_tables(
    rotary_dim: int,
    length: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary embedding for positions 0 to length - 1, as `Rope` takes them.

    Pair n is rotated by base ** (-2 n / rotary_dim) radians a token, unless `scaling` changes that. Angles are computed
    in float64, with an error below 1e-9 at far positions, and rounded once.

    Args:
        rotary_dim: number of a head's dimensions that are rotated, even.
        length: number of positions, the longest context.
        base: above 1; models of long contexts have larger ones (`rope_theta`).
        scaling: None, or a LinearScaling, DynamicScaling, YarnScaling, Llama3Scaling or LongRopeScaling.
        device: of the tables; None is PyTorch's default.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        (cos, sin), each (length, rotary_dim / 2).

    Raises:
        InputError: an argument is wrong.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> cos, sin = tw.rope_tables(16, 100)
        >>> cos.shape
        torch.Size([100, 8])
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
            expected="None, a LinearScaling, DynamicScaling, YarnScaling, Llama3Scaling or LongRopeScaling",
            hint="a model's rope_type says which",
        )
    if isinstance(scaling, DynamicScaling):
        if rotary_dim < 4:
            raise InputError(
                "rotary_dim", got=rotary_dim, expected="4 or more", hint="the base has no effect on a single pair"
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
    if isinstance(scaling, LongRopeScaling):
        return _longrope(plain, length, scaling)
    return plain, 1.0


def _longrope(plain: torch.Tensor, length: int, scaling: LongRopeScaling) -> tuple[torch.Tensor, float]:
    factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
    if len(factors) != len(plain):
        got, expected = f"{len(factors)} factors", f"{len(plain)}, one for each pair of rotary_dim={2 * len(plain)}"
        raise InputError("LongRopeScaling", got=got, expected=expected, hint=_HINT)
    more = scaling.attention_factor
    if more is None:
        more = math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_length))
    return plain / torch.tensor(factors, dtype=torch.float64), more


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
        kind = "an even int" if name == "rotary_dim" else "an int"
        raise InputError(name, got=shown(value), expected=f"{kind} of {least} or more", hint="see `tilewise.Rope`")


def _check_scaling(scaling: Any) -> None:
    """Every number is positive, lengths are whole, and factors do not shorten."""
    for field in fields(scaling):
        value, name = getattr(scaling, field.name), f"{type(scaling).__name__} {field.name}"
        if field.name in ("short_factors", "long_factors"):
            continue  # LongRopeScaling checks its own
        if field.name == "original_length":
            _check_count(name, value, 2 if isinstance(scaling, LongRopeScaling) else 1)
        elif not (field.name == "attention_factor" and value is None):
            least = 1.0 if field.name == "factor" else 0.0
            if not is_finite(value) or value < least or not value:
                says = "a number of 1 or more" if least else "a number above 0"
                raise InputError(name, got=shown(value), expected=says, hint=_HINT)


def _check_order(scaling: Any, less: str, more: str) -> None:
    low, high = getattr(scaling, less), getattr(scaling, more)
    if low >= high:
        raise InputError(
            f"{type(scaling).__name__} {less}", got=low, expected=f"less than {more}, {high}", hint="swap them"
        )
