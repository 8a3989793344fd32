"""Pictures of masks: which pairs may meet, how each tile is classified, and which tiles a query visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.core.errors import InputError
from tilewise.explain.draw import style

EMPTY, PARTIAL, FULL = 0, 1, 2
Box = tuple[int, int, int, int]  # left, top, right, bottom


class Panel(NamedTuple):
    """One mask for a picture.

    Attributes:
        title: above the panel.
        visible: bool (seqlen_q, seqlen_k).
        classes: int8 (num_q_tiles, num_k_tiles): EMPTY (0), PARTIAL (1) or FULL (2).

    Example:
        >>> from tilewise.explain import draw
        >>> visible = torch.ones(64, 64).tril().bool().numpy()
        >>> panel = draw.Panel("causal", visible, draw.classify(visible, 32, 32))
    """

    title: str
    visible: npt.NDArray[np.bool_]
    classes: npt.NDArray[np.int8]


def classify(visible: npt.ArrayLike, block_m: int, block_n: int) -> npt.NDArray[np.int8]:
    """Tile classes of a dense mask, by brute force, for pictures of small masks.

    Args:
        visible: bool (seqlen_q, seqlen_k).
        block_m, block_n: queries and keys of a tile.

    Returns:
        int8 (num_q_tiles, num_k_tiles): EMPTY (0), PARTIAL (1) or FULL (2).

    Raises:
        InputError: another rank, or a tile size below 1.

    Example:
        >>> from tilewise.explain import draw
        >>> draw.classify(torch.ones(4, 4).tril(), 2, 2).tolist()
        [[1, 0], [2, 1]]
    """
    dense = np.asarray(visible, dtype=bool)
    if dense.ndim != 2 or block_m < 1 or block_n < 1:
        raise InputError(
            "visible",
            got=f"shape {dense.shape}, tiles of {block_m} x {block_n}",
            expected="(seqlen_q, seqlen_k) and tile sizes of at least 1",
            hint="take one batch element and head: visible[b, h]",
        )
    rows, cols = range(0, dense.shape[0], block_m), range(0, dense.shape[1], block_n)
    tiles = [[dense[i : i + block_m, j : j + block_n] for j in cols] for i in rows]
    return np.array([[FULL if t.all() else PARTIAL if t.any() else EMPTY for t in row] for row in tiles], dtype=np.int8)


def tiles(panels: Sequence[Panel], block_m: int, block_n: int, *, columns: int = 3) -> Any:
    """A figure with a panel for each mask: tiles coloured by class, visible pairs darker, numbers of tiles below.

    Args:
        panels: the masks, as `panel` makes them.
        block_m, block_n: queries and keys of a tile, as given to `panel`.
        columns: panels in a row.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no panels, or a number of tiles that does not fit its mask.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> sizes = {"seqlen_q": 256, "seqlen_k": 256, "block_m": 64, "block_n": 64}
        >>> figure = draw.tiles([draw.panel(mask, **sizes) for mask in (tw.causal, tw.window(64))], 64, 64)
    """
    for panel in panels:
        _check(panel.visible, panel.classes, block_m, block_n)
    if not panels or columns < 1:
        raise InputError(
            "panels",
            got=f"{len(panels)} panels, {columns} columns",
            expected="at least one panel and one column",
            hint="tilewise.explain.draw.panel makes one of a mask",
        )
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with style.look():
        figure, axes = style.canvas(columns, rows, size=(2.75 * columns, 3.3 * rows + 0.3), squeeze=False)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes.flat, panels, strict=False):
            _tiles(ax, panel, block_m, block_n)
            ax.set_title(panel.title)
            total = panel.classes.size
            partial, full = (int((panel.classes == kind).sum()) for kind in (PARTIAL, FULL))
            ax.set_xlabel(f"keys\nvisits {partial + full} of {total} tiles, masks {partial}", linespacing=1.45)
        _legend(figure)
    return figure


def query(panel: Panel, block_m: int, block_n: int, position: int) -> Any:
    """A figure of the tiles of keys that the tile of one query visits, numbered in order; the rest is faded.

    Args:
        panel: the mask, as `panel` makes it.
        block_m, block_n: queries and keys of a tile, as given to `panel`.
        position: the query's row in the mask, counted from 0.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: `position` is not a row of the mask, or the tiles do not fit it.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> panel = draw.panel(tw.causal, seqlen_q=256, seqlen_k=256, block_m=64, block_n=64)
        >>> figure = draw.query(panel, 64, 64, position=150)
    """
    _check(panel.visible, panel.classes, block_m, block_n)
    seqlen_q, seqlen_k = panel.visible.shape
    if not 0 <= position < seqlen_q:
        hint = "rows count queries from 0"
        raise InputError("position", got=position, expected=f"a query row in [0, {seqlen_q})", hint=hint)
    tile = position // block_m
    visited = np.flatnonzero(panel.classes[tile] != EMPTY)
    with style.look():
        figure, ax = style.canvas(size=(4.6, 4.9))
        _tiles(ax, panel, block_m, block_n)
        top, bottom = tile * block_m, min((tile + 1) * block_m, seqlen_q)
        for low, high in ((0, top), (bottom, seqlen_q)):
            ax.add_patch(_rectangle(0, low, seqlen_k, high - low, style.PAPER, alpha=0.72, zorder=3))
        for order, n in enumerate(visited, start=1):
            left, right = n * block_n, min((n + 1) * block_n, seqlen_k)
            ax.text(
                (left + right) / 2,
                (top + bottom) / 2,
                str(order),
                ha="center",
                va="center",
                fontweight="bold",
                bbox={"boxstyle": "circle,pad=0.28", "facecolor": style.PAPER, "edgecolor": "none"},
                zorder=6,
            )
        ax.add_patch(_rectangle(0, top, seqlen_k, bottom - top, "none", edgecolor=style.INK, linewidth=1.6, zorder=5))
        ax.annotate(
            f"query {position}",
            (0, position + 0.5),
            (-5, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
        seen = int(panel.visible[position].sum())
        ax.set_title(panel.title)
        ax.set_ylabel("")
        ax.set_xlabel(
            f"its tile loads {len(visited)} of {panel.classes.shape[1]} key tiles; the query sees {seen} keys"
        )
        _legend(figure)
    return figure


def _check(visible: npt.NDArray[np.bool_], classes: npt.NDArray[np.int8], block_m: int, block_n: int) -> None:
    expected = tuple(-(-length // block) for length, block in zip(visible.shape, (block_m, block_n), strict=False))
    if visible.ndim != 2 or classes.shape != expected:
        hint = "pass the block_m and block_n that the panel was made with"
        raise InputError(
            "classes", got=classes.shape, expected=f"{expected} tiles for a mask {visible.shape}", hint=hint
        )


def _tiles(ax: Any, panel: Panel, block_m: int, block_n: int) -> None:
    """Tiles, and in PARTIAL ones the visible pairs, as one vector path a colour: sharp at any zoom, small in a file."""
    visible, classes = panel.visible, panel.classes
    seqlen_q, seqlen_k = visible.shape
    boxes: dict[int, list[Box]] = {EMPTY: [], PARTIAL: [], FULL: []}
    seen: list[Box] = []
    for m, n in np.ndindex(*classes.shape):
        kind = int(classes[m, n])
        top, left = m * block_m, n * block_n
        bottom, right = min(top + block_m, seqlen_q), min(left + block_n, seqlen_k)
        boxes[kind].append((left, top, right, bottom))
        if kind == PARTIAL:
            seen += _runs(visible[top:bottom, left:right], left, top)
    for kind, colour in ((EMPTY, style.EMPTY), (PARTIAL, style.PARTIAL_PALE), (FULL, style.FULL)):
        _boxes(ax, boxes[kind], colour, 1)
    _boxes(ax, seen, style.PARTIAL, 2)
    for edge in range(block_n, seqlen_k, block_n):
        ax.axvline(edge, color=style.PAPER, linewidth=1.2, zorder=2.5)
    for edge in range(block_m, seqlen_q, block_m):
        ax.axhline(edge, color=style.PAPER, linewidth=1.2, zorder=2.5)
    ax.set(xlim=(0, seqlen_k), ylim=(seqlen_q, 0), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_ylabel("queries", labelpad=3)


def _runs(visible: npt.NDArray[np.bool_], left: int, top: int) -> list[Box]:
    """Boxes of the visible pairs of one tile: the runs of each row, equal runs of neighbouring rows joined."""
    open_boxes: dict[tuple[int, int], int] = {}
    done: list[Box] = []
    for row in range(len(visible) + 1):
        keys = visible[row].astype(np.int8) if row < len(visible) else np.zeros(visible.shape[1], dtype=np.int8)
        edges = np.flatnonzero(np.diff(np.pad(keys, 1))).reshape(-1, 2)
        runs = {(int(start), int(stop)) for start, stop in edges}
        for run in sorted(open_boxes.keys() - runs):
            done.append((left + run[0], top + open_boxes.pop(run), left + run[1], top + row))
        for run in runs - open_boxes.keys():
            open_boxes[run] = row
    return done


def _boxes(ax: Any, boxes: Sequence[Box], colour: str, zorder: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if boxes:
        corners = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)] for x0, y0, x1, y1 in boxes]
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
        path = Path(np.array(corners, dtype=float).reshape(-1, 2), codes)
        ax.add_patch(PathPatch(path, facecolor=colour, edgecolor="none", linewidth=0, antialiased=False, zorder=zorder))


def _rectangle(x: float, y: float, width: float, height: float, colour: str, **options: Any) -> Any:
    from matplotlib.patches import Rectangle

    options = {"edgecolor": "none", "linewidth": 0, **options}
    return Rectangle((x, y), width, height, facecolor=colour, **options)


def _legend(figure: Any) -> None:
    handles = [
        _rectangle(0, 0, 1, 1, style.FULL),
        _rectangle(0, 0, 1, 1, style.PARTIAL),
        _rectangle(0, 0, 1, 1, style.PARTIAL_PALE),
        _rectangle(0, 0, 1, 1, style.EMPTY),
    ]
    labels = ["FULL: no mask computed", "PARTIAL: visible", "PARTIAL: hidden", "EMPTY: never visited"]
    width = figure.get_size_inches()[0]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4 if width > 6 else 2,
        frameon=False,
        fontsize=8,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.6,
    )
