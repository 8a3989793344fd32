"""A model of accumulators that keep few bits: what a product of 8-bit numbers loses on Hopper and Ada, by its length.

These tensor cores add a product of 32 terms to an accumulator of float32 of which 13 bits behind the point are kept,
the rest cut off (Zhang et al., "SageAttention2", 2024; in "DeepSeek-V3", 2024, section 3.3.2, it is 14 bits). The terms
of one step are added exactly here, so errors are those of accumulating alone.
"""

from __future__ import annotations

import torch

from tilewise.core.errors import InputError

STEP = 32  # terms of one instruction
BITS = 13  # behind the point


def cut(x: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """Float64 numbers with `bits` bits (0 to 52) behind the point of their binary exponent, rounded towards 0."""
    if not 0 <= bits <= 52:
        raise InputError("bits", got=bits, expected="0 to 52", hint="13 is Hopper's, 23 float32's")
    return (x.double().view(torch.int64) & (-1 << (52 - bits))).view(torch.float64)


def product(a: torch.Tensor, b: torch.Tensor, *, flush: int | None = None, bits: int = BITS) -> torch.Tensor:
    """A matrix product, summed as tensor cores with such accumulators do.

    Args:
        a, b: (rows, n) and (n, columns), of any dtype whose numbers float64 holds exactly, such as float8.
        flush: number of terms, a multiple of 32, after which the accumulator is added to a float32 sum and starts at 0;
            None: never.
        bits: fractional bits that the accumulator keeps.

    Returns:
        float64 (rows, columns).

    Raises:
        InputError: shapes that do not fit, or a `flush` that is no multiple of 32.

    Example:
        >>> from tilewise.explain.accumulators import flat_rows, product
        >>> weights, values = flat_rows(256)
        >>> product(weights, values, flush=128).shape
        torch.Size([16, 32])
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        got = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        raise InputError("a, b", got=got, expected="(rows, n) and (n, columns)", hint="transpose one of them")
    if flush is not None and (flush < STEP or flush % STEP):
        raise InputError("flush", got=flush, expected=f"a multiple of {STEP}, or None", hint="128 is a tile of keys")
    a, b = a.double(), b.double()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    held = torch.zeros_like(total, dtype=torch.float64)
    for first in range(0, a.shape[1], STEP):
        held = cut(held + a[:, first : first + STEP] @ b[first : first + STEP], bits)
        if flush is not None and (first + STEP) % flush == 0:
            total, held = total + held.float(), torch.zeros_like(held)
    return total.double() + held


def flat_rows(keys: int, *, rows: int = 16, columns: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights without a preferred key, whose sums are the longest, and values, all numbers of float8.

    Args:
        keys, rows, columns: sizes.
        seed: of the random numbers.

    Returns:
        (weights, values): float32 (rows, keys), from 0 to 448, and float32 (keys, columns), around 0.

    Example:
        >>> from tilewise.explain.accumulators import flat_rows
        >>> weights, values = flat_rows(256)
        >>> weights.shape, values.shape
        (torch.Size([16, 256]), torch.Size([256, 32]))
    """
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, keys, generator=g) * 448
    values = (torch.randn(keys, columns, generator=g) * 100).clamp(-448, 448)
    return weights.to(torch.float8_e4m3fn).float(), values.to(torch.float8_e4m3fn).float()
