"""Integers in formulas compile for a GPU that is not there: their bits, and bounds of what may leave 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.compile.test_gluon import apply, arguments, emitted
from tilewise.formula.emit import Captured
from tilewise.formula.formula import as_mask
from tilewise.ops.attention.variant import mask_functions
from tilewise.schedule.rule import build_tables, tile_rule
from tilewise.testing.offline import compiling_for

IDS = torch.arange(64) // 9
NARROW = IDS.to(torch.int32)


@triton.jit
def judge(
    OUT, b, h, args, nums, table_args, ONCE: tl.constexpr, VISIBLE: tl.constexpr, CLASSIFY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Which pairs a mask shows, and what its bounds say of tiles of 16 x 16."""
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    seen = VISIBLE(b, h, i, j, ONCE(b, h, i, args, nums), args, nums)
    block = tl.full([], 16, tl.int64)
    i0 = (i // 16 * 16).to(tl.int64)
    j0 = (j // 16 * 16).to(tl.int64)
    sure, maybe = CLASSIFY(b, h, i0, i0 + 15, j0, j0 + 15, block, block, table_args, nums)
    tl.store(OUT + i * N + j, seen.to(tl.int8) + sure.to(tl.int8) + maybe.to(tl.int8))


def morton(x: Any) -> Any:
    """Bits of a number on every second place."""
    for by, kept in ((4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        x = (x | (x << by)) & kept
    return x


MASKS: dict[str, Callable[..., Any]] = {
    "bits": lambda b, h, i, j: ((i ^ j) & (j | h) & ~i) < 5,
    "shifts": lambda b, h, i, j: (1 << (j >> 2)) + (i >> j - 3) > (NARROW[j] << IDS[i]),
    "order": lambda b, h, i, j: (morton(j >> 3) | (morton(i >> 3) << 1)) < 99,
    "sums": lambda b, h, i, j: (IDS[i] + j * h - abs(NARROW[j] * i)) // 5 % 7 < -IDS[j],
    "truncated": lambda b, h, i, j: (j * 1.5 * IDS[i]).to(torch.int64) - i < 9,
}


@pytest.mark.parametrize("name", MASKS)
def test_integers_compile(name: str) -> None:
    """In Triton with the bounds of a tile, in Gluon with what a tile's columns need once."""
    mask = as_mask(MASKS[name])
    rule = tile_rule(mask.text)
    tables = tuple(Captured(len(t.dims), True) for t in rule.tables)
    functions = mask_functions(mask.text, tuple(map(Captured.of, mask.tensors)), tables)
    args, nums = arguments(mask)
    extrema = build_tables(rule.tables, mask.tensors, 16, 16)
    side = functions.queries
    s = torch.zeros(64, 64)
    with compiling_for(90) as kernels:
        judge[(1,)](
            s.to(torch.int8), 2, 3, args, nums, (*args, *extrema), side.once, side.visible, functions.classify, 64, 64
        )
        apply[(1,)](s, torch.zeros_like(s), 2, 3, args, nums, (), (), *emitted(mask, ("b", "h", "i", "j")), None, None,
                    None, 64, 64)  # fmt: skip
    assert len(kernels) == 2
