"""A picture of shared work: what each program does, tile after tile, and which rows of tiles are cut."""

from __future__ import annotations

from typing import Any

from tilewise.core.errors import InputError
from tilewise.explain.draw import style
from tilewise.schedule.worklist import WorkList

MOST = 160  # programs that a picture has room for


def shares(work: WorkList) -> Any:
    """A figure with a line for each program and a bar for each row of tiles (one unit, one head), coloured by request;
    bars that are parts of a row which others finish are pale, since their results are merged.

    Raises InputError for more programs than fit, MissingExtraError without matplotlib.
    """
    if work.programs > MOST:
        raise InputError(
            "programs", got=work.programs, expected=f"at most {MOST}", hint="a picture of fewer shows the same"
        )
    cut = {(merge.unit, merge.head) for merge in work.merges()}
    with style.look():
        figure, ax = style.canvas(size=(7.5, 1.1 + 0.16 * work.programs))
        for program in range(work.programs):
            at = 0
            for unit, head, first, end in work.segments(program):
                colour = style.SERIES[int(work.request[unit]) % len(style.SERIES)]
                pale = 0.45 if (unit, head) in cut else 1.0
                ax.barh(
                    program, end - first, left=at, height=0.82, color=colour, alpha=pale, edgecolor=style.PAPER,
                    linewidth=0.8,
                )  # fmt: skip
                at += end - first
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_ylim(work.programs - 0.4, -0.6)
        ax.set_xlabel("tiles of keys")
        ax.set_ylabel("program")
        ax.set_title(f"{len(set(work.request.tolist()))} requests, {work.work} tiles, {len(cut)} rows of tiles merged")
    return figure
