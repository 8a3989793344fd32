"""A picture of shared work: what each program does, tile after tile, and which rows of tiles are cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.draw import style
from tilewise.schedule.worklist import WorkList

MOST = 160  # programs that a picture has room for


def shares(work: WorkList) -> Any:
    """A figure with a line for each program and a bar for each row of tiles (one unit, one head), coloured by request;
    bars that are parts of a row which others finish are pale, since their results are merged. Prefixes that requests
    share come first, all of them pale, and behind a line what is done when they are.

    Raises InputError for more programs than fit, MissingExtraError without matplotlib.
    """
    if work.programs > MOST:
        raise InputError(
            "programs", got=work.programs, expected=f"at most {MOST}", hint="a picture of fewer shows the same"
        )
    merged = {(merge.unit, merge.head) for merge in work.merges()}
    start = 0 if work.prefixes is None else int(np.diff(work.prefixes.starts).max())
    with style.look():
        figure, ax = style.canvas(size=(7.5, 1.1 + 0.16 * work.programs))
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
        ax.set_title(f"{len(set(work.request.tolist()))} requests, {tiles} tiles, {len(merged)} rows of tiles merged")
    return figure


def _bars(ax: Any, work: WorkList, pale: set[tuple[int, int]], start: int) -> None:
    """A line's bars, from `start` on; those of `pale` rows (unit, head) are pale."""
    for program in range(work.programs):
        at = start
        for unit, head, first, end in work.segments(program):
            colour = style.SERIES[int(work.request[unit]) % len(style.SERIES)]
            ax.barh(
                program, end - first, left=at, height=0.82, color=colour, alpha=0.45 if (unit, head) in pale else 1.0,
                edgecolor=style.PAPER, linewidth=0.8,
            )  # fmt: skip
            at += end - first
