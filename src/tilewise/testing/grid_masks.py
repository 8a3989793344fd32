"""Masks over grids for named cases: the library's, and the same spelled coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tilewise as tw
from tilewise.testing import plain
from tilewise.testing.case import Builder, Case, Maker, Spelled

Window = Sequence[int | tuple[int, int]]


def neighborhood(shape: tuple[int, ...], width: tuple[int, ...], **options: Any) -> Builder:
    """`tilewise.neighborhood`; options as sequences, one value for each axis."""

    def build(case: Case, make: Maker) -> Spelled:
        return Spelled(
            tw.neighborhood(shape, width, **options), plain.neighborhood(shape, width, make.device, **options)
        )

    return build


def sliding_tile(
    canvas: tuple[int, ...], tile: tuple[int, ...], window: Any, *, order: str = "tile", **options: Any
) -> Builder:
    """`tilewise.sliding_tile`; `window` a tuple, or a list with one for each head."""

    def build(case: Case, make: Maker) -> Spelled:
        windows = window if isinstance(window, list) else [window]
        sides = [sides_of(one, options.get("causal", False)) for one in windows]
        formula = tw.sliding_tile(canvas, tile, window, order=order, device=make.device, **options)
        places = tw.TokenOrder(canvas, tile, order).index.tolist()
        return Spelled(formula, plain.sliding_tile(canvas, tile, sides, places, make.device, **options))

    return build


def sides_of(window: Window, causal: bool) -> list[tuple[int, int]]:
    """A window's tiles (before, after) its own, along each axis: an even number has one more before."""
    result = []
    for axis, side in enumerate(window):
        if isinstance(side, tuple):
            result.append(side)
        else:
            after = 0 if causal and axis == 0 else (side - 1) // 2
            result.append((side - 1 - after, after))
    return result
