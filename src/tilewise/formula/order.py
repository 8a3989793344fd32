"""Where tokens of a grid lie in a sequence: in raster order, tile after tile, or along a Hilbert curve."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.formula.arguments import check_integer

Extents = Sequence[int]
ORDERS = ("tile", "hilbert", "raster")


class TokenOrder:
    """An order of a grid's tokens in a sequence, and the way there from raster order and back.

    "tile" is tile after tile in raster order of the tiles, and raster order inside each; tiles at the far border are
    cut. "hilbert" follows the Hilbert curve of the smallest power of two that holds the canvas along every axis; places
    outside the canvas are left out. "raster" changes nothing. Text tokens, which are on no grid, stay before or after
    all others.

    Rotary embeddings go by a token's place in the grid. So either reorder hidden states once, and rotate by
    `Rope(cos, sin, positions=order.index)` with tables of raster places, or reorder queries and keys after rotation.

    Args:
        canvas: extents of the grid, 1 to 3.
        tile: extents of a tile, or one number for all axes; needed only for order "tile".
        order: "tile", "hilbert" or "raster".
        text: number of tokens on no grid.
        text_first: True where they lie before the grid's; else after them.
        device: of the index tensors.

    Attributes:
        index: int64 (tokens,): place p of the order holds the token that was at place index[p].
        inverse: int64 (tokens,): the token at place p went to place inverse[p].
        tile_of: int32 (tokens,): the tile, in raster order of the tiles, of the token at place p of the order; -1 for
            text. None without `tile`.

    Raises:
        InputError: an argument is of the wrong type, rank or range.

    Source: Skilling, "Programming the Hilbert curve", 2004.

    Example:
        >>> order = tw.TokenOrder((2, 4), (2, 2))
        >>> order.apply(torch.arange(8), dim=0)
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """

    def __init__(
        self,
        canvas: Extents,
        tile: int | Extents | None = None,
        order: str = "tile",
        text: int = 0,
        text_first: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.canvas = extents_of("TokenOrder canvas", canvas)
        self.tile = None if tile is None else each_axis("TokenOrder tile", tile, self.canvas)
        self.order, self.text, self.text_first = check_order("TokenOrder", order), text, text_first
        check_text("TokenOrder", text, text_first)
        if order == "tile" and self.tile is None:
            hint = 'order="hilbert" and order="raster" need none'
            raise InputError("TokenOrder tile", got=None, expected='extents of a tile for order="tile"', hint=hint)
        volume = math.prod(self.canvas)
        tiles = None
        if self.tile is not None:
            tiles = _ravel(tiles_of(self.canvas, self.tile, device), grid_of(self.canvas, self.tile))
        if order == "hilbert":
            moved = torch.argsort(_hilbert(self.canvas, device))
        elif order == "tile" and tiles is not None:
            moved = torch.argsort(tiles, stable=True)
        else:
            moved = torch.arange(volume, device=device)
        first = text if text_first else 0
        self.index = torch.arange(volume + text, device=device)
        self.index[first : first + volume] = moved + first
        self.inverse = torch.empty_like(self.index)
        self.inverse[self.index] = torch.arange(volume + text, device=device)
        self.tile_of: torch.Tensor | None = None
        if tiles is not None:
            self.tile_of = torch.full((volume + text,), -1, dtype=torch.int32, device=device)
            self.tile_of[first : first + volume] = tiles[moved].to(torch.int32)

    def apply(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Bring tokens from raster order into this order. Differentiable.

        Args:
            x: a tensor with all tokens along one dimension, of any dtype.
            dim: that dimension.

        Returns:
            A new tensor of the shape of x.

        Raises:
            InputError: x has another number of tokens along dim.
        """
        return x.index_select(dim, self._checked("apply", x, dim).index)

    def undo(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Bring tokens from this order back into raster order. Differentiable.

        Args:
            x: a tensor with all tokens along one dimension, of any dtype.
            dim: that dimension.

        Returns:
            A new tensor of the shape of x.

        Raises:
            InputError: x has another number of tokens along dim.
        """
        return x.index_select(dim, self._checked("undo", x, dim).inverse)

    def _checked(self, name: str, x: Any, dim: int) -> TokenOrder:
        tokens = self.index.shape[0]
        if not isinstance(x, torch.Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
            got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            hint = f"a canvas of {self.canvas} and {self.text} tokens of text"
            raise InputError(
                f"TokenOrder.{name} x", got=got, expected=f"a tensor with {tokens} tokens along {dim}", hint=hint
            )
        return self

    def __repr__(self) -> str:
        tile = "" if self.tile is None else f", {self.tile}"
        text = f", text={self.text}" + ", text_first=True" * self.text_first if self.text else ""
        return f"TokenOrder({self.canvas}{tile}, order={self.order!r}{text})"


def grid_of(canvas: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """How many tiles there are along each axis."""
    return tuple(-(-size // extent) for size, extent in zip(canvas, tile, strict=True))


def tiles_of(canvas: tuple[int, ...], tile: tuple[int, ...], device: Any) -> torch.Tensor:
    """int64 (axes, tokens): the tile of every token in raster order, along each axis."""
    places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in canvas))
    return places.reshape(-1, len(canvas)).T // torch.tensor(tile, device=device)[:, None]


def _ravel(coordinates: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The place in raster order of coordinates (axes, tokens)."""
    place = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, shape, strict=True):
        place = place * size + coordinate
    return place


def _hilbert(canvas: tuple[int, ...], device: Any) -> torch.Tensor:
    """int64 (tokens,): how far along the Hilbert curve each token in raster order is (Skilling's transform)."""
    x = list(tiles_of(canvas, (1,) * len(canvas), device))
    bits = (max(canvas) - 1).bit_length()
    for bit in reversed(range(1, bits)):
        low = (1 << bit) - 1
        for axis in range(len(x)):
            inverted = (x[axis] >> bit & 1).bool()
            swapped = torch.where(inverted, 0, (x[0] ^ x[axis]) & low)
            x[axis] = x[axis] ^ swapped
            x[0] = x[0] ^ swapped ^ torch.where(inverted, low, 0)
    for axis in range(1, len(x)):
        x[axis] = x[axis] ^ x[axis - 1]
    turned = torch.zeros_like(x[0])
    for bit in reversed(range(1, bits)):
        turned = turned ^ torch.where((x[-1] >> bit & 1).bool(), (1 << bit) - 1, 0)
    distance = torch.zeros_like(x[0])
    for bit in reversed(range(bits)):
        for axis in x:
            distance = distance << 1 | (axis ^ turned) >> bit & 1
    return distance


# arguments ---------------------------------------------------------------------------------------------------------


def is_whole(value: Any) -> bool:
    """Whether it is an integer, symbolic ones of torch.compile among them."""
    return isinstance(value, (int, numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def extents_of(name: str, value: Any) -> tuple[int, ...]:
    """1 to 3 extents of a grid."""
    hint = "one integer for each side of the grid, (n,) for a line of n"
    if not isinstance(value, Sequence) or not 1 <= len(value) <= 3:
        raise InputError(name, got=shown(value), expected="1 to 3 extents, for example (32, 32)", hint=hint)
    return _integers(name, value, hint)


def each_axis(name: str, value: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A number for each axis of a grid of this shape; one alone is that of all."""
    value = (value,) * len(shape) if is_whole(value) else value
    hint = "one extent for each of the grid's"
    if not isinstance(value, Sequence) or len(value) != len(shape):
        raise InputError(name, got=shown(value), expected=f"{len(shape)} extents, as of {shape}", hint=hint)
    return _integers(name, value, hint)


def _integers(name: str, value: Iterable[Any], hint: str) -> tuple[int, ...]:
    value = tuple(value)
    for size in value:
        check_integer(name, size, hint, kind="extents that are integers")
    return tuple(size if isinstance(size, int) else int(size) for size in value)


def check_order(name: str, order: Any) -> str:
    """The order, if there is one of this name."""
    if not isinstance(order, str) or order not in ORDERS:
        hint = "how the canvas's tokens lie in the sequence"
        raise InputError(f"{name} order", got=shown(order), expected=f"one of {ORDERS}", hint=hint)
    return order


def check_text(name: str, text: Any, text_first: Any) -> None:
    """Raise unless they say how many tokens of text there are, and where."""
    check_integer(f"{name} text", text, "how many tokens are on no grid", least=0, most=2**31 - 1)
    check_flags(**{f"{name} text_first": text_first})
