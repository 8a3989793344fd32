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
    """a (rows, n) times b (n, columns) as such tensor cores sum it, float64.

    Args:
        a, b: whole numbers of any dtype that float64 holds, such as codes of float8.
        flush: after how many terms the accumulator is added to a float32 sum and begins anew, a multiple of 32; None:
            never.
        bits: what the accumulator keeps.

    Raises:
        InputError: n is not the same, or `flush` no multiple of 32.
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
    """Weights (rows, keys), between 0 and 448, all keys alike, and values (keys, columns) around 0, as float8 has them:
    rows that look at everything, whose sums are the longest. Float32.
    """
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, keys, generator=g) * 448
    values = (torch.randn(keys, columns, generator=g) * 100).clamp(-448, 448)
    return weights.to(torch.float8_e4m3fn).float(), values.to(torch.float8_e4m3fn).float()
