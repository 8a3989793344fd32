"""Pictures of the weights of heads, tile by tile, and of the tiles that a selection selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.core.errors import InputError
from tilewise.explain.draw import style

LEVELS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # of a row's weights; below the first is paper


def weights(panels: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]]) -> Any:
    """A panel for each head: the darker a tile, the larger its weight; selected tiles have an outline.

    Below a panel is the share of the tiles that are selected, and their share of the weights.

    Args:
        panels: title -> (weights, selected): float and bool (tiles_q, tiles_k); rows of weights sum to 1.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no panels, or other shapes.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> tiles = torch.softmax(4 * torch.randn(8, 8), -1)
        >>> figure = draw.weights({"head 0": (tiles, tiles > 0.1)})
    """
    if not panels:
        raise InputError("panels", got="none", expected="at least one", hint="a title, and weights and tiles")
    drawn = {title: (np.asarray(held), np.asarray(taken, bool)) for title, (held, taken) in panels.items()}
    for title, (held, taken) in drawn.items():
        if held.ndim != 2 or held.shape != taken.shape:
            got = f"weights of shape {held.shape}, tiles of {taken.shape}"
            raise InputError(title, got=got, expected="(tiles_q, tiles_k), both", hint="take one head: masses[0, h]")
    with style.look():
        figure, axes = style.canvas(len(drawn), size=(2.75 * len(drawn), 3.3), squeeze=False)
        for ax, (title, (held, taken)) in zip(axes[0], drawn.items(), strict=True):
            _tiles(ax, held, taken)
            ax.set_title(title)
            shares = f"{taken.mean():.0%} of the tiles hold {(held * taken).sum() / held.sum():.0%} of the weights"
            ax.set_xlabel(f"tiles of keys\n{shares}", linespacing=1.45)
        axes[0, 0].set_ylabel("tiles of queries")
    return figure


def _tiles(ax: Any, held: npt.NDArray[Any], taken: npt.NDArray[np.bool_]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("weights", [style.PAPER, style.FULL])(np.linspace(0, 1, len(LEVELS) + 1))
    level = np.digitize(held, LEVELS)
    rows, columns = held.shape
    for row in range(rows):
        for column in range(columns):
            ax.fill_between(
                [column, column + 1], row, row + 1, facecolor=shades[level[row, column]], edgecolor=style.HAIRLINE,
                linewidth=0.3,
            )  # fmt: skip
    for row, column in zip(*np.nonzero(taken), strict=True):
        ax.fill_between(
            [column + 0.08, column + 0.92], row + 0.08, row + 0.92, facecolor="none", edgecolor=style.PARTIAL,
            linewidth=1.1,
        )  # fmt: skip
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
