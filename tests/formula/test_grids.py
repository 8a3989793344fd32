"""Masks over grids against oracles that walk tile by tile, orders of their tokens, and which kernel tiles they need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.schedule.test_tilemap import check_sound
from tilewise.core.errors import FormulaError, InputError
from tilewise.formula.order import ORDERS
from tilewise.schedule.tilemap import FULL, PARTIAL, TileMap
from tilewise.testing import plain
from tilewise.testing.grid_masks import sides_of

CPU = torch.device("cpu")


def visible(mask: tw.Mask, tokens: int, heads: int = 1) -> torch.Tensor:
    """bool (heads, tokens, tokens)."""
    places = torch.arange(tokens)
    seen = mask.evaluate(b=torch.tensor(0), h=torch.arange(heads)[:, None, None], i=places[:, None], j=places)
    return seen.expand(heads, tokens, tokens)


def table(function: Callable[..., torch.Tensor], tokens: int, heads: int = 1) -> torch.Tensor:
    """What an oracle says, bool (heads, tokens, tokens)."""
    places = torch.arange(tokens)
    seen = function(torch.tensor(0), torch.arange(heads)[:, None, None], places[:, None], places)
    return seen.expand(heads, tokens, tokens)


def grids(most: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    extents = st.integers(1, 3).flatmap(lambda axes: st.lists(st.integers(1, most), min_size=axes, max_size=axes))
    return extents.map(tuple).filter(lambda shape: math.prod(shape) <= 90)


# neighborhoods -----------------------------------------------------------------------------------------------------


@st.composite
def neighborhoods(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    shape = draw(grids(14))
    dilation = tuple(draw(st.integers(1, min(3, size))) for size in shape)
    window = tuple(draw(st.integers(1, size // step)) for size, step in zip(shape, dilation, strict=True))
    stride = tuple(draw(st.integers(1, width)) for width in window)
    causal = tuple(draw(st.booleans()) for _ in shape)
    return shape, {"window": window, "stride": stride, "dilation": dilation, "causal": causal}


@given(drawn=neighborhoods())
def test_any_neighborhood_is_that_of_the_oracle(drawn: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    shape, options = drawn
    tokens = math.prod(shape)
    mask = tw.neighborhood(shape, **options)
    assert torch.equal(visible(mask, tokens), table(plain.neighborhood(shape, device=CPU, **options), tokens))
    check_sound(mask, TileMap.build(mask, seqlen_q=tokens, seqlen_k=tokens, block_m=8, block_n=16), 1, 1)


def test_the_windows_of_a_line_written_out() -> None:
    """A row for each query; the second list is of a window of 4, in groups of 3, every second place."""
    assert rows(tw.neighborhood((5,), 3)) == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4]]
    assert rows(tw.neighborhood((5,), 2)) == [[0, 1], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert rows(tw.neighborhood((6,), 4, stride=3)) == [[0, 1, 2, 3]] * 3 + [[2, 3, 4, 5]] * 3
    assert rows(tw.neighborhood((5,), 2, dilation=2)) == [[0, 2], [1, 3], [0, 2], [1, 3], [2, 4]]
    assert rows(tw.neighborhood((5,), 2, causal=True)) == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert rows(tw.neighborhood((5,), 3, stride=2, causal=True)) == [[0], [0, 1], [1, 2], [1, 2, 3], [2, 3, 4]]


def rows(mask: tw.Mask) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in visible(mask, 6 if "6" in repr(mask) else 5)[0]]


@pytest.mark.parametrize(
    ("shape", "window"),
    [((20,), (7,)), ((6, 8), (3, 5)), ((3, 4, 5), (3, 1, 5)), ((6, 8), (2, 4)), ((9, 4), 4)],
    ids=str,
)
def test_every_query_of_a_neighborhood_sees_as_many_keys(shape: tuple[int, ...], window: Any) -> None:
    seen = visible(tw.neighborhood(shape, window), math.prod(shape))[0]
    assert bool((seen.sum(-1) == (math.prod(window) if isinstance(window, tuple) else window ** len(shape))).all())
    assert bool(seen.diagonal().all())


def test_odd_windows_are_one_comparison_of_distances() -> None:
    spelled = tw.mask(
        lambda b, h, i, j: (abs((i // 6).clamp(1, 2) - j // 6) <= 1) & (abs((i % 6 // 1).clamp(2, 3) - j % 6 // 1) <= 2)
    )
    assert tw.neighborhood((4, 6), (3, 5)) == spelled
    assert tw.neighborhood((4, 6), (3, 5), stride=(1, 1), dilation=1, causal=[False, False]) == spelled


# sliding tiles -----------------------------------------------------------------------------------------------------


@st.composite
def sliding_tiles(draw: st.DrawFn) -> dict[str, Any]:
    canvas = draw(grids())
    tile = tuple(draw(st.integers(1, size + 1)) for size in canvas)
    causal = draw(st.booleans())

    def window() -> tuple[Any, ...]:
        entries: list[Any] = []
        for axis, (size, extent) in enumerate(zip(canvas, tile, strict=True)):
            count = draw(st.integers(1, -(-size // extent)))
            after = 0 if causal and axis == 0 else draw(st.integers(0, count - 1))
            entries.append(draw(st.sampled_from([count, (count - 1 - after, after)])))
        return tuple(entries)

    return {
        "canvas": canvas,
        "tile": tile,
        "window": [window() for _ in range(3)] if draw(st.booleans()) else window(),
        "order": draw(st.sampled_from(ORDERS)),
        "text": draw(st.integers(0, 5)),
        "text_first": draw(st.booleans()),
        "causal": causal,
    }


def oracle(canvas: Any, tile: Any, window: Any, order: str = "tile", **options: Any) -> Callable[..., torch.Tensor]:
    windows = window if isinstance(window, list) else [window]
    sides = [sides_of(one, options.get("causal", False)) for one in windows]
    places = tw.TokenOrder(canvas, tile, order).index.tolist()
    return plain.sliding_tile(canvas, tile, sides, places, CPU, **options)


@given(drawn=sliding_tiles())
def test_any_sliding_tile_is_that_of_the_oracle(drawn: dict[str, Any]) -> None:
    tokens = math.prod(drawn["canvas"]) + drawn["text"]
    mask = tw.sliding_tile(**drawn)
    assert torch.equal(visible(mask, tokens, 3), table(oracle(**drawn), tokens, 3))
    check_sound(mask, TileMap.build(mask, seqlen_q=tokens, seqlen_k=tokens, heads=3, block_m=8, block_n=16), 1, 3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("canvas", "tile", "window"),
    [((6, 8), (2, 4), (3, 1)), ((9, 4, 6), (3, 2, 1), (1, 1, 3)), ((20,), (4,), (3,)), ((5, 6), (1, 3), (5, 1))],
    ids=str,
)
def test_a_neighborhood_in_strides_of_its_tiles_slides_by_tiles(
    canvas: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...], order: str
) -> None:
    tokens = math.prod(canvas)
    wide = tuple(size * extent for size, extent in zip(window, tile, strict=True))
    raster = visible(tw.neighborhood(canvas, wide, stride=tile), tokens)
    index = tw.TokenOrder(canvas, tile, order).index
    assert torch.equal(
        visible(tw.sliding_tile(canvas, tile, window, order=order), tokens), raster[:, index][:, :, index]
    )


def test_a_list_of_windows_of_one_kind_captures_nothing() -> None:
    """Nor do heads enter where windows are the same, so tiles are classified once for all of them."""
    alike, one = (tw.sliding_tile((6, 8), (2, 4), window) for window in ([(3, 1)] * 4, (3, 1)))
    assert alike == one
    assert not one.tensors
    build = {"seqlen_q": 48, "seqlen_k": 48, "block_m": 8, "block_n": 8, "heads": 2, "batch": 3}
    assert TileMap.build(one, **build).classes.shape[:2] == (1, 1)
    each = tw.sliding_tile((6, 8), (2, 4), [(3, 1), (1, 2)])
    assert TileMap.build(each, **build).classes.shape[:2] == (1, 2)
    assert "(@0:int h 0 " in each.text
    assert "(@0:int h 1 " in each.text
    one_axis = tw.sliding_tile((6, 8), (2, 4), [(3, 1), (3, 2)])
    assert "(@0:int h 0 " not in one_axis.text, "what heads have in common is no captured tensor"


def test_a_sliding_tile_is_named_by_what_makes_it() -> None:
    """Windows in few words: those of heads by their number."""
    assert repr(tw.sliding_tile((6, 8), 2, (3, (1, 0)))) == "sliding_tile((6, 8), (2, 2), (3, 2))"
    assert repr(tw.sliding_tile((6, 8), 2, 2, causal=True)) == "sliding_tile((6, 8), (2, 2), (2, 2), causal=True)"
    mask = tw.sliding_tile((6, 8), 2, [(1, (0, 1)), (2, 2)], order="hilbert", text=3, text_first=True)
    options = "order='hilbert', text=3, text_first=True"
    assert repr(mask) == f"sliding_tile((6, 8), (2, 2), windows of 2 heads, {options})"
    assert repr(tw.sliding_tile((6, 8), 2, (1, (0, 1)))) == "sliding_tile((6, 8), (2, 2), (1, (0, 1)))"
    assert repr(tw.neighborhood((6,), 4, stride=2)) == "neighborhood((6,), (4,), stride=(2,))"


def test_windows_for_fewer_heads_than_there_are_stop_before_a_launch() -> None:
    q = torch.zeros(1, 48, 3, 8)
    with pytest.raises(FormulaError, match="captured tensor"):
        tw.attention(q, q, q, mask=tw.sliding_tile((6, 8), (2, 4), [(3, 1), (1, 2)]))


# kernel tiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(3, 3, 3), (5, 5, 5), (3, 2, 4), (1, 6, 10), ((4, 0), (0, 2), (1, 3))], ids=str)
def test_no_kernel_tile_of_a_video_is_partly_visible(window: tuple[Any, ...]) -> None:
    """30 x 48 x 80 tokens, tiles of 6 x 8 x 8: 9 % of tiles for windows of 3 x 3 x 3, as the paper has it."""
    tokens = 30 * 48 * 80
    tiles = TileMap.build(tw.sliding_tile((30, 48, 80), (6, 8, 8), window), seqlen_q=tokens, seqlen_k=tokens, heads=24)
    assert tiles.classes.shape == (1, 1, 900, 900)
    assert not bool((tiles.classes == PARTIAL).any())
    seen = math.prod(1 + sum(side) if isinstance(side, tuple) else side for side in window)
    assert int((tiles.classes == FULL).sum()) == 900 * 3 * seen
    assert tiles.density() == pytest.approx(seen / 300)
    assert (window != (3, 3, 3)) or (seen == 27)


@pytest.mark.parametrize(("text", "first"), [(256, False), (77, False), (256, True)])
def test_text_is_partly_visible_nowhere_where_it_begins_at_a_kernel_tile(text: int, first: bool) -> None:
    mask = tw.sliding_tile((12, 16, 16), (6, 8, 8), (1, 1, 1), text=text, text_first=first)
    tokens = 12 * 16 * 16 + text
    classes = TileMap.build(mask, seqlen_q=tokens, seqlen_k=tokens).classes[0, 0]
    assert not bool((classes == PARTIAL).any())
    words = slice(0, text // 128) if first else slice(24, None)
    assert bool((classes[words] == FULL).all())
    assert bool((classes[:, words] == FULL).all())


def test_text_before_a_video_shifts_its_tiles() -> None:
    """Kernel tiles that straddle two tiles are PARTIAL at most, and the rest is still EMPTY or FULL."""
    mask = tw.sliding_tile((12, 16, 16), (6, 8, 8), (1, 1, 1), text=77, text_first=True)
    tokens = 12 * 16 * 16 + 77
    tiles = TileMap.build(mask, seqlen_q=tokens, seqlen_k=tokens)
    check_sound(mask, tiles, 1, 1)
    assert tiles.density() < 0.5
    assert bool((tiles.classes == FULL).any())


def test_tiles_along_a_curve_stay_close() -> None:
    """Along the curve 128 tokens are a compact piece of a video, in raster order a line through it."""
    density = {}
    for order in ORDERS:
        mask = tw.sliding_tile((16, 32, 32), (4, 8, 8), (3, 3, 3), order=order)
        density[order] = TileMap.build(mask, seqlen_q=16384, seqlen_k=16384).density()
    assert density["tile"] == pytest.approx(27 / 64)
    assert density["tile"] <= density["hilbert"] < density["raster"]


# orders ------------------------------------------------------------------------------------------------------------


@given(
    canvas=grids(), order=st.sampled_from(ORDERS), text=st.integers(0, 4), first=st.booleans(), tile=st.integers(1, 4)
)
def test_an_order_moves_every_token_once(
    canvas: tuple[int, ...], order: str, text: int, first: bool, tile: int
) -> None:
    made = tw.TokenOrder(canvas, tile, order, text, first)
    tokens, volume = math.prod(canvas) + text, math.prod(canvas)
    assert made.index.dtype == made.inverse.dtype == torch.int64
    assert sorted(made.index.tolist()) == list(range(tokens))
    words = slice(0, text) if first else slice(volume, None)
    assert made.index[words].tolist() == list(range(tokens))[words]
    x = torch.randn(2, tokens, 3)
    assert torch.equal(made.apply(x), x[:, made.index])
    assert torch.equal(made.undo(made.apply(x)), x)
    assert torch.equal(made.apply(made.undo(x.mT, -1), -1), x.mT)
    assert made.tile_of is not None
    assert made.tile_of.dtype == torch.int32
    assert made.tile_of[words].tolist() == [-1] * text
    grid = [-(-size // tile) for size in canvas]
    for place, token in enumerate(made.index.tolist()):
        if place in range(tokens)[words]:
            continue
        number = 0
        for x_, count in zip(list(itertools.product(*map(range, canvas)))[token - text * first], grid, strict=True):
            number = number * count + x_ // tile
        assert made.tile_of[place] == number
    if order == "tile":
        inside = made.tile_of[made.tile_of >= 0]
        assert bool((inside.diff() >= 0).all())
        assert bool((made.index.diff()[: volume - 1][inside.diff() == 0] > 0).all() or first)


def test_tiles_in_order_are_a_rearrangement() -> None:
    """(T tt) (H th) (W tw) becomes (T H W) (tt th tw)."""
    x = torch.arange(4 * 6 * 8).reshape(2, 2, 3, 2, 2, 4)
    order = tw.TokenOrder((4, 6, 8), (2, 2, 4))
    assert torch.equal(order.apply(x.flatten(), 0), x.permute(0, 2, 4, 1, 3, 5).flatten())


@pytest.mark.parametrize("shape", [(16,), (8, 8), (2, 2), (4, 4, 4), (8, 8, 8)], ids=str)
def test_a_hilbert_curve_steps_to_neighbours_and_fills_cubes_one_by_one(shape: tuple[int, ...]) -> None:
    index = tw.TokenOrder(shape, order="hilbert").index
    places = torch.stack(torch.unravel_index(index, shape), -1)
    assert places.diff(dim=0).abs().sum(-1).unique().tolist() == [1]
    edge = 2
    while edge <= shape[0]:
        cubes = (places // edge).unflatten(0, (-1, edge ** len(shape)))
        assert bool((cubes == cubes[:, :1]).all())
        edge *= 2


def test_a_hilbert_curve_over_any_canvas_is_that_of_the_power_of_two_around_it() -> None:
    whole = tw.TokenOrder((8, 8, 8), order="hilbert").index
    inside = torch.zeros(8, 8, 8, dtype=torch.bool)
    inside[:3, :5, :7] = True
    renumbered = inside.flatten().cumsum(0) - 1
    kept = renumbered[whole[inside.flatten()[whole]]]
    assert torch.equal(tw.TokenOrder((3, 5, 7), order="hilbert").index, kept)


def test_an_order_without_tiles_knows_none() -> None:
    order = tw.TokenOrder((3, 5), order="raster", text=2)
    assert order.tile_of is None
    assert order.index.tolist() == order.inverse.tolist() == list(range(17))
    assert repr(order) == "TokenOrder((3, 5), order='raster', text=2)"
    assert repr(tw.TokenOrder((3, 5), 2, text=2, text_first=True)) == (
        "TokenOrder((3, 5), (2, 2), order='tile', text=2, text_first=True)"
    )


# arguments ---------------------------------------------------------------------------------------------------------

ORDER = tw.TokenOrder((3, 5), 2)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "shape_4d": (lambda: tw.neighborhood((3,) * 4, (3,) * 4), "neighborhood shape: got (3, 3, 3, 3)"),
    "shape_number": (lambda: tw.neighborhood(8, 3), "neighborhood shape: got 8; expected 1 to 3 extents"),  # type: ignore[arg-type]
    "shape_float": (lambda: tw.neighborhood((8.0,), (3,)), "neighborhood shape: got 8.0; expected extents"),  # type: ignore[arg-type]
    "window_ranks": (lambda: tw.neighborhood((8, 8), (3,)), "neighborhood window: got (3,); expected 2 extents"),
    "window_wide": (
        lambda: tw.neighborhood((8,), (9,)),
        "window: got (9,); expected extents at most (8,)",
    ),
    "window_zero": (lambda: tw.neighborhood((8,), 0), "neighborhood window: got 0"),
    "window_dilated": (lambda: tw.neighborhood((9,), 4, dilation=3), "window: got (4,); expected extents at most (3,)"),
    "stride_wide": (lambda: tw.neighborhood((9,), 4, stride=5), "neighborhood stride: got (5,); expected at most the"),
    "dilation": (lambda: tw.neighborhood((9,), 4, dilation="2"), "neighborhood dilation: got '2'"),  # type: ignore[arg-type]
    "causal": (
        lambda: tw.neighborhood((9, 9), 4, causal=(True,)),
        "neighborhood causal: got (True,); expected",
    ),
    "causal_number": (lambda: tw.neighborhood((9,), 4, causal=1), "neighborhood causal: got 1"),  # type: ignore[arg-type]
    "canvas": (lambda: tw.sliding_tile((), 2, 1), "sliding_tile canvas: got ()"),
    "tile": (lambda: tw.sliding_tile((8, 8), (2, 2, 2), 1), "sliding_tile tile: got (2, 2, 2); expected 2 extents"),
    "tile_zero": (lambda: tw.sliding_tile((8, 8), 0, 1), "sliding_tile tile: got 0"),
    "tiles_wide": (lambda: tw.sliding_tile((8, 8), 2, (3, 5)), "sliding_tile window: got (3, 5); expected 1 to (4, 4)"),
    "tiles_ranks": (lambda: tw.sliding_tile((8, 8), 2, (3,)), "sliding_tile window: got (3,)"),
    "tiles_pair": (lambda: tw.sliding_tile((8, 8), 2, ((2, 2), 1)), "sliding_tile window: got ((2, 2), 1)"),
    "tiles_negative": (lambda: tw.sliding_tile((8, 8), 2, ((-1, 2), 1)), "sliding_tile window: got ((-1, 2), 1)"),
    "tiles_zero": (lambda: tw.sliding_tile((8, 8), 2, (0, 1)), "sliding_tile window: got (0, 1)"),
    "tiles_list": (lambda: tw.sliding_tile((8, 8), 2, [3, (1, 5)]), "sliding_tile window: got (1, 5)"),  # type: ignore[list-item]
    "tiles_none": (lambda: tw.sliding_tile((8, 8), 2, []), "sliding_tile window: got []"),
    "tiles_float": (lambda: tw.sliding_tile((8, 8), 2, (1.0, 1)), "sliding_tile window: got (1.0, 1)"),  # type: ignore[arg-type]
    "tiles_ahead": (
        lambda: tw.sliding_tile((8, 8), 2, ((0, 1), 1), causal=True),
        "tile window: got ((0, 1), 1)",
    ),
    "order": (
        lambda: tw.sliding_tile((8, 8), 2, 1, order="z"),
        "sliding_tile order: got 'z'; expected one of",
    ),
    "text": (lambda: tw.sliding_tile((8, 8), 2, 1, text=-1), "sliding_tile text: got -1; expected an integer >= 0"),
    "text_first": (lambda: tw.sliding_tile((8, 8), 2, 1, text_first=None), "sliding_tile text_first: got None"),  # type: ignore[arg-type]
    "order_tile": (lambda: tw.TokenOrder((8, 8)), "TokenOrder tile: got None; expected extents of a tile"),
    "order_name": (lambda: tw.TokenOrder((8, 8), 2, "cube"), "TokenOrder order: got 'cube'"),
    "order_text": (lambda: tw.TokenOrder((8, 8), 2, text=True), "TokenOrder text: got True"),
    "apply": (
        lambda: ORDER.apply(torch.zeros(1, 16, 2)),
        "TokenOrder.apply x: got shape (1, 16, 2)",
    ),
    "undo": (lambda: ORDER.undo(torch.zeros(15), 1), "TokenOrder.undo x: got shape (15,); expected a tensor with 15"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_named(name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(InputError) as caught:
        make()
    assert said in str(caught.value)
    assert caught.value.hint
