"""Masks over tokens that lie on a grid of one to three axes (a line, an image, a video).

Raster order is row-major: the last axis runs fastest. Each function raises InputError for an argument of the wrong
type, rank or range.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.formula import expr as e
from tilewise.formula.expr import Expr
from tilewise.formula.formula import Mask, mask
from tilewise.formula.order import (
    Extents,
    TokenOrder,
    check_order,
    check_text,
    each_axis,
    extents_of,
    grid_of,
    is_whole,
    tiles_of,
)
from tilewise.formula.sizes import Size

Side = int | tuple[int, int]
Sides = tuple[tuple[int, int], ...]  # of one window: (before, after) along each axis


# neighborhoods -----------------------------------------------------------------------------------------------------


def neighborhood(
    shape: Extents,
    window: int | Extents,
    *,
    stride: int | Extents = 1,
    dilation: int | Extents = 1,
    causal: bool | Sequence[bool] = False,
) -> Mask:
    """Neighborhood attention on a grid in raster order, with the meaning of NATTEN's arguments.

    Along each axis a query sees `window` keys around it: as many on either side, or, where `window` is even, one more
    before it. At the border the window is shifted inside, so every query sees the same number of keys. For window,
    stride, dilation and causal one value stands for all axes.

    Args:
        shape: extents of the grid, 1 to 3; their product is seqlen_k.
        window: keys seen along each axis; window * dilation is at most the extent.
        stride: this many neighbouring queries share one window: that of the group's middle query (of two, the later),
            or of its last where `causal`. At most `window`. With stride and window multiples of a tile it is
            `sliding_tile`.
        dilation: a query sees every dilation-th key: positions of equal remainder form a grid of their own, to which
            window, stride and border apply.
        causal: along this axis a window ends at its query, and is cut, not shifted, at the beginning.

    Returns:
        A mask.

    Raises:
        InputError: an argument is of the wrong type, rank or range, or the window does not fit the grid.

    Source: Hassani et al., "Neighborhood Attention Transformer", 2023; Hassani and Shi, "Dilated Neighborhood
    Attention Transformer", 2022; Hassani et al., "Generalized Neighborhood Attention", 2025 (stride).

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.neighborhood((10, 10), 3))  # an image of 10 x 10 tokens
    """
    shape = extents_of("neighborhood shape", shape)
    window = each_axis("neighborhood window", window, shape)
    strides = each_axis("neighborhood stride", stride, shape)
    steps = each_axis("neighborhood dilation", dilation, shape)
    forward = _each_flag("neighborhood causal", causal, shape)
    for size, width, step, group in zip(shape, window, steps, strides, strict=True):
        if width * step > size:
            most = tuple(size // step for size, step in zip(shape, steps, strict=True))
            expected = f"extents at most {most}" + ("" if max(steps) == 1 else ", shape // dilation")
            hint = "windows are shifted inside at the border, so they fit into the grid"
            raise InputError("neighborhood window", got=window, expected=expected, hint=hint)
        if group > width:
            hint = "queries of a group see one window, and each of them itself"
            raise InputError("neighborhood stride", got=strides, expected=f"at most the window, {window}", hint=hint)

    def visible(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        axes = zip(_coordinates(i, shape), _coordinates(j, shape), shape, window, strides, steps, forward, strict=True)
        return functools.reduce(lambda seen, axis: e.logic("and", seen, _near(*axis)), axes, e.TRUE)

    def name() -> str:
        given = (("stride", strides, 1), ("dilation", steps, 1), ("causal", forward, False))
        more = "".join(f", {key}={value}" for key, value, usual in given if set(value) != {usual})
        return f"neighborhood({shape}, {window}{more})"

    return mask(visible, name).sized(Size("neighborhood shape", "seqlen_k", math.prod(shape), each=True))


def _near(x: Expr, y: Expr, size: Any, width: int, stride: int, step: int, causal: bool) -> Expr:
    """Whether a query at x sees a key at y along an axis of `size` places."""
    same = e.TRUE
    if step > 1:
        rest = x % step
        same = e.compare("eq", rest, y % step)
        x, y, size = x // step, y // step, (size - 1 - rest) // step + 1
    if causal:
        last = x if stride == 1 else (x // stride * stride + (stride - 1)).clamp(max=size - 1)
        near = e.logic("and", e.compare("le", y, x), e.compare("lt", last - y, width))
    else:
        leader = x if stride == 1 else x // stride * stride + stride // 2
        near = _around(leader, y, size, width // 2, (width - 1) // 2)
    return e.logic("and", same, near)


def _around(x: Expr, y: Expr, size: Any, before: Any, after: Any) -> Expr:
    """Whether y is from `before` places before x to `after` behind it, x moved so that both ends are inside."""
    if isinstance(before, int) and before == after:
        return e.compare("le", abs(x.clamp(before, size - 1 - before) - y), before)
    center = x.clamp(before, size - 1 - after)
    return e.logic("and", e.compare("le", center - y, before), e.compare("le", y - center, after))


def _coordinates(place: Expr, shape: tuple[int, ...]) -> list[Expr]:
    """Where a place in raster order is along each axis."""
    result, stride, total = [], math.prod(shape), math.prod(shape)
    for size in shape:
        outer, stride = stride, stride // size
        result.append(place // stride if outer == total else place % outer // stride)
    return result


# sliding tiles -----------------------------------------------------------------------------------------------------


def sliding_tile(
    canvas: Extents,
    tile: int | Extents,
    window: int | tuple[Side, ...] | list[tuple[Side, ...]],
    *,
    order: str = "tile",
    text: int = 0,
    text_first: bool = False,
    causal: bool = False,
    device: torch.device | str | None = None,
) -> Mask:
    """Sliding tile attention: tokens of a tile see all tokens of the tiles in a window around theirs.

    At the border the window is shifted inside, never cut, so every query sees the same number of tiles. With text,
    every query sees all of it, and its queries see everything. No tile of a kernel is partly visible if order is
    "tile", tiles divide the canvas, and a kernel's tiles divide those (128 keys divide tiles of 6 x 8 x 8 tokens).

    Args:
        canvas: extents of the grid, 1 to 3. seqlen_k is their product and `text`.
        tile: extents of a tile, or one number for all axes; tiles at the far border are cut.
        window: in tiles. A tuple has, for each axis, the number of tiles that are seen, the query's own in the middle
            (of an even number, one more before it), or a pair (before, after) beside its own. A list has such a tuple
            for each query head. One number stands for all axes.
        order: the order of tokens in the sequence, as `TokenOrder(canvas, tile, order, text, text_first)` brings them:
            "tile", "hilbert" or "raster".
        text: number of tokens on no grid, such as a prompt.
        text_first: True where they lie before all others; else after them.
        causal: along the first axis (time) no tile later than the query's own: a window ends there (a pair is
            (before, 0)), and is cut, not shifted, at the beginning. Tokens of one tile see each other; tiles of one
            frame, (1, height, width), make it causal frame by frame. Text stays visible to all, and sees everything.
        device: of captured tensors. There are some if windows differ between heads, for order "hilbert", and for order
            "tile" with tiles that do not divide the canvas.

    Returns:
        A mask.

    Raises:
        InputError: an argument is of the wrong type, rank or range.

    Source: Zhang et al., "Fast Video Generation with Sliding Tile Attention", 2025.

    Example:
        >>> mask = tw.sliding_tile((4, 5, 5), (2, 5, 5), (1, 1, 1))  # a video of 4 frames, 2 in a tile
        >>> o = tw.attention(q, k, v, mask=mask)
    """
    canvas = extents_of("sliding_tile canvas", canvas)
    extents = each_axis("sliding_tile tile", tile, canvas)
    check_order("sliding_tile", order)
    check_text("sliding_tile", text, text_first)
    (causal,) = _each_flag("sliding_tile causal", causal, (1,))
    grid, volume = grid_of(canvas, extents), math.prod(canvas)
    heads = [_sides(one, grid, causal) for one in (window if isinstance(window, list) else [window])]
    if not heads:
        raise _wrong_window(window, grid, "a list has a tuple for each query head")
    first = text if text_first else 0
    places: torch.Tensor | None = None
    if order == "hilbert" or (order == "tile" and any(c % t for c, t in zip(canvas, extents, strict=True))):
        order_of = TokenOrder(canvas, extents, order, text, text_first, device)
        places = torch.zeros(len(grid), volume + text, dtype=torch.int32, device=device)
        moved = order_of.index[first : first + volume] - first
        places[:, first : first + volume] = tiles_of(canvas, extents, device)[:, moved].to(torch.int32)
    table = torch.tensor(heads, dtype=torch.int32, device=device) if len(set(heads)) > 1 else None

    def tile_at(place: Expr) -> list[Expr]:
        if places is not None:
            return [e.load(places, (e.lit(axis), place)) for axis in range(len(grid))]
        place = place - first if first else place
        if order == "tile":
            return _coordinates(place // math.prod(extents), grid)
        return [x // extent for x, extent in zip(_coordinates(place, canvas), extents, strict=True)]

    def visible(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        result = e.TRUE
        for axis, (x, y, size) in enumerate(zip(tile_at(i), tile_at(j), grid, strict=True)):
            before, after = heads[0][axis]
            if table is not None and len({head[axis] for head in heads}) > 1:
                before, after = (e.load(table, (h, e.lit(axis), e.lit(side))) for side in (0, 1))  # type: ignore[assignment]
            if causal and axis == 0:
                near = e.logic("and", e.compare("le", y, x), e.compare("le", x - y, before))
            else:
                near = _around(x, y, size, before, after)
            result = e.logic("and", result, near)
        for place in (j, i) if text else ():
            result = e.logic("or", place < text if text_first else place >= volume, result)
        return result

    def name() -> str:
        given = (
            ("order", order, "tile"),
            ("text", text, 0),
            ("text_first", text_first, False),
            ("causal", causal, False),
        )
        more = "".join(f", {key}={value!r}" for key, value, usual in given if value != usual)
        seen = f"windows of {len(heads)} heads" if table is not None else _written(heads[0], causal)
        return f"sliding_tile({canvas}, {extents}, {seen}{more})"

    sizes = [Size("sliding_tile canvas and text", "seqlen_k", volume + text, each=True)]
    if isinstance(window, list):
        sizes.append(Size("sliding_tile window", "num_heads_q", len(heads)))
    return mask(visible, name).sized(*sizes)


def _sides(window: Any, grid: tuple[int, ...], causal: bool) -> Sides:
    """How many tiles a window has before and behind the query's own, along each axis."""
    each = (window,) * len(grid) if is_whole(window) else window
    if not isinstance(each, Sequence) or len(each) != len(grid):
        raise _wrong_window(window, grid, "a tuple has an entry for each axis, a list a tuple for each query head")
    result = []
    for axis, (side, size) in enumerate(zip(each, grid, strict=True)):
        if is_whole(side):
            before, after = (side - 1, 0) if causal and axis == 0 else (side // 2, (side - 1) // 2)
        elif isinstance(side, Sequence) and len(side) == 2 and all(map(is_whole, side)):
            before, after = side
        else:
            raise _wrong_window(window, grid, "along an axis a number of tiles, or a pair (before, after)")
        if before < 0 or after < 0 or before + after >= size:
            raise _wrong_window(window, grid, "a pair (before, after) has the query's own tile between, uncounted")
        if causal and axis == 0 and after:
            raise _wrong_window(window, grid, "a causal window ends at the query's own tile: (before, 0)")
        result.append((int(before), int(after)))
    return tuple(result)


def _written(window: Sides, causal: bool) -> tuple[Side, ...]:
    """A window in few words: along an axis one number, where `_sides` reads it as the same pair."""
    counts = [1 + before + after for before, after in window]
    usual = [(n - 1, 0) if causal and axis == 0 else (n // 2, (n - 1) // 2) for axis, n in enumerate(counts)]
    return tuple(n if side == pair else side for n, side, pair in zip(counts, window, usual, strict=True))


def _wrong_window(window: Any, grid: tuple[int, ...], hint: str) -> InputError:
    return InputError("sliding_tile window", got=shown(window), expected=f"1 to {grid} tiles", hint=hint)


def _each_flag(name: str, value: Any, shape: tuple[int, ...]) -> tuple[bool, ...]:
    each = (value,) * len(shape) if isinstance(value, bool) else value
    if not isinstance(each, Sequence) or len(each) != len(shape) or not all(isinstance(x, bool) for x in each):
        hint = "causal=True, or for each axis whether it is causal"
        raise InputError(name, got=shown(value), expected=f"True or False, or {len(shape)} of them", hint=hint)
    return tuple(each)
