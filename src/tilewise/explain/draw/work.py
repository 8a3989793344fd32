"""A picture of how work is divided: the tiles that each program computes, and which rows of tiles are split."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.draw import style
from tilewise.schedule.worklist import WorkList

MOST = 160  # programs that a picture has room for
PALE = 0.45


def shares(work: WorkList) -> Any:
    """A figure with a line for each program and a bar for each row of tiles (one unit, one head), coloured by request.

    Bars are pale where the row is split between programs, so that their partial results are merged. Shared prefixes
    come first, all of them pale; a vertical line marks where they end.

    Args:
        work: the division of the tiles, for at most 160 programs.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: more programs than the picture has room for.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> from tilewise.schedule.worklist import WorkList
        >>> figure = draw.shares(WorkList.build([1] * 3, [100, 4000, 64], heads_q=8, heads_kv=2, programs=12))
    """
    if work.programs > MOST:
        raise InputError(
            "programs", got=work.programs, expected=f"at most {MOST}", hint="draw the division among fewer programs"
        )
    merged = {(merge.unit, merge.head) for merge in work.merges()}
    start = 0 if work.prefixes is None else int(np.diff(work.prefixes.starts).max())
    with style.look():
        figure, ax = style.canvas(size=(7.5, 1.5 + 0.16 * work.programs))
        if work.prefixes is not None:
            _bars(ax, work.prefixes, set(work.prefixes.parts()), 0)
            ax.axvline(start, color=style.INK, linewidth=0.8)
        _bars(ax, work, merged, start)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_ylim(work.programs - 0.4, -0.6)
        ax.set_xlabel("tiles of keys")
        ax.set_ylabel("program")
        tiles = work.work + (0 if work.prefixes is None else work.prefixes.work)
        _legend(figure, work)
        ax.set_title(f"{len(set(work.request.tolist()))} requests, {tiles} tiles, {len(merged)} rows of tiles merged")
    return figure


def _legend(figure: Any, work: WorkList) -> None:
    """Which colour is which request, and what a pale bar and the line mean."""
    lines, patches = style.matplotlib().lines, style.matplotlib().patches
    requests = sorted(set(work.request.tolist()))
    shown = requests[: len(style.SERIES)]
    again = ", …" if len(requests) > len(shown) else ""
    handles = [
        patches.Patch(color=style.SERIES[n % len(style.SERIES)], label=f"request {n}{again if n == shown[-1] else ''}")
        for n in shown
    ]
    handles.append(patches.Patch(color=style.MUTED, alpha=PALE, label="pale: part of a row, merged"))
    if work.prefixes is not None:
        handles.append(lines.Line2D([], [], color=style.INK, linewidth=0.8, label="end of shared prefixes"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _bars(ax: Any, work: WorkList, pale: set[tuple[int, int]], start: int) -> None:
    """The bars of each program, from `start` on; those of the rows (unit, head) in `pale` are pale."""
    for program in range(work.programs):
        at = start
        for unit, head, first, end in work.segments(program):
            colour = style.SERIES[int(work.request[unit]) % len(style.SERIES)]
            ax.barh(
                program, end - first, left=at, height=0.82, color=colour, alpha=PALE if (unit, head) in pale else 1.0,
                edgecolor=style.PAPER, linewidth=0.8,
            )  # fmt: skip
            at += end - first
