"""Masks that cut no tile: which are known to, and that tiles of these are classified as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.formula.formula import as_mask
from tilewise.schedule.tilemap import PARTIAL, TileMap
from tilewise.schedule.whole import TILE, is_whole_in_tiles

HEADS = 2
MAP = torch.rand(HEADS, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
CODES = torch.arange(6)
CANVAS, CUBE = (8, 16, 8), (4, 8, 4)  # 128 tokens of each cube


def is_whole(mask: Any, seqlen_q: int, seqlen_k: int) -> bool:
    bound = as_mask(mask).bound
    return is_whole_in_tiles(bound.text, bound.numbers, seqlen_k - seqlen_q)


def dense(mask: Any, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """bool (heads, seqlen_q, seqlen_k)"""
    i = torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None]
    h = torch.arange(HEADS)[:, None, None]
    seen = as_mask(mask).evaluate(b=torch.tensor(0), h=h, i=i, j=torch.arange(seqlen_k))
    return seen.expand(HEADS, seqlen_q, seqlen_k)


def check(mask: Any, seqlen_q: int, seqlen_k: int) -> None:
    """No tile is cut, by what its pairs see or by what bounds say of it, which is what lists of tiles are made of."""
    seen = dense(mask, seqlen_q, seqlen_k)
    for tile in (TILE, TILE // 2):
        for rows in seen.split(tile, 1):
            for pairs in rows.split(tile, 2):
                assert torch.equal(pairs.flatten(1).any(1), pairs.flatten(1).all(1))
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": HEADS, "block_m": tile, "block_n": tile}
        assert not bool((TileMap.build(as_mask(mask), **sizes).classes == PARTIAL).any())


WHOLE: dict[str, tuple[Any, int, int]] = {
    "map": (tw.blocks(MAP, TILE), 700, 700),
    "wider map": (tw.blocks(MAP[:, :3, :3], 2 * TILE), 700, 700),
    "last queries": (tw.blocks(MAP, TILE), 444, 700),
    "cubes": (tw.sliding_tile(CANVAS, CUBE, (1, 2, 1)), 1024, 1024),
    "cubes and text": (tw.sliding_tile(CANVAS, CUBE, (1, 1, 1), text=100), 1124, 1124),
    "text first": (tw.sliding_tile(CANVAS, CUBE, (1, 1, 2), text=TILE, text_first=True), 1152, 1152),
    "threshold": (lambda b, h, i, j: (j < 256) | (i // 128 == j // 128), 600, 600),
    "last before": (lambda b, h, i, j: (j <= 255) & (i > 383), 600, 600),
    "moved": (lambda b, h, i, j: (i + 128) // 256 == (j - 128) // 256, 600, 600),
    "from their first": (lambda b, h, i, j: (i - 55) // 128 != j // 128, 645, 700),
    "by head": (lambda b, h, i, j: (i // 128 + h) % 2 == (j // 128) % 2, 600, 600),
    "read": (lambda b, h, i, j: CODES[i // 128] * 2 <= CODES[j // 128] + 3, 700, 700),
}
CUT: dict[str, tuple[Any, int, int]] = {
    "small map": (tw.blocks(MAP.repeat_interleave(2, 1).repeat_interleave(2, 2), TILE // 2), 700, 700),
    "queries between": (tw.blocks(MAP, TILE), 645, 700),
    "causal": (tw.causal, 700, 700),
    "causal, too": (lambda b, h, i, j: (i // 128 == j // 128) & (j <= i), 700, 700),
    "text between": (tw.sliding_tile(CANVAS, CUBE, (1, 1, 1), text=100, text_first=True), 1124, 1124),
    "threshold between": (lambda b, h, i, j: (j < 250) | (i // 128 == j // 128), 600, 600),
    "one more": (lambda b, h, i, j: j <= 256, 600, 600),
    "one less": (lambda b, h, i, j: i > 384, 600, 600),
    "remainders": (lambda b, h, i, j: (i % 256) // 128 == j // 128, 600, 600),  # whole, but not known to be
    "floats": (lambda b, h, i, j: (i // 128) * 0.5 <= j // 128, 600, 600),  # whose bounds are wider
    "a divisor of its own": (lambda b, h, i, j: (i // 128) // (h + 1) == j // 128, 600, 600),
    "backwards": (lambda b, h, i, j: i // -128 == j // -128, 600, 600),
    "by equality": (lambda b, h, i, j: (i == 128) | (j // 128 == 1), 600, 600),
    "from the end": (lambda b, h, i, j: (599 - i) // 128 == j // 128, 600, 600),
}


@pytest.mark.parametrize("name", WHOLE)
def test_masks_that_cut_no_tile(name: str) -> None:
    assert is_whole(*WHOLE[name])
    check(*WHOLE[name])


@pytest.mark.parametrize("name", CUT)
def test_masks_that_may_cut_one(name: str) -> None:
    assert not is_whole(*CUT[name])


@st.composite
def conditions(draw: st.DrawFn) -> Any:
    """A condition over (h, i, j) of a few operations, near those that cut no tile."""
    number = st.sampled_from([0, 1, 64, 127, 128, 129, 256, 384])
    kind = draw(st.sampled_from(["divided", "before", "behind"]))
    axes = [draw(st.sampled_from("ij")) for _ in range(2)]
    moves, divisors = [draw(number) - draw(number) for _ in axes], [max(1, draw(number)) for _ in axes]
    limit, more = draw(number), draw(st.sampled_from([None, 2, 3]))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        x, y = ({"i": i, "j": j}[axis] + move for axis, move in zip(axes, moves, strict=True))
        if kind == "before":
            return (x < limit) | (y // divisors[1] <= h)
        if kind == "behind":
            return (limit < x) & (limit <= y)
        u, v = x // divisors[0], y // divisors[1]
        return abs(u - v) <= 1 if more is None else u % more == v % more

    return seen


@given(mask=conditions(), seqlen_q=st.integers(1, 700), seqlen_k=st.sampled_from([300, 512, 700]))
def test_whatever_is_said_to_cut_no_tile_cuts_none(mask: Any, seqlen_q: int, seqlen_k: int) -> None:
    if is_whole(mask, seqlen_q, seqlen_k):
        check(mask, seqlen_q, seqlen_k)
