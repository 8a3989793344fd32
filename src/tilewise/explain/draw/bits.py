"""Pictures of few bits: errors by kind of numbers and who shares a scale, which codes are used, errors by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.draw import style

Series = Mapping[str, Mapping[Any, float]]  # label -> place on the x axis -> error


def errors(panels: Mapping[str, Series], *, xlabel: str) -> Any:
    """A panel for each kind of numbers: errors of each series, on one logarithmic scale, at places in the order given.

    Raises InputError for no panels, MissingExtraError without matplotlib.
    """
    _some("panels", panels)
    with style.look():
        figure, axes = style.canvas(len(panels), size=(2.6 * len(panels) + 0.4, 3.4), sharey=True, squeeze=False)
        for ax, (title, series) in zip(axes[0], panels.items(), strict=True):
            for n, (label, found) in enumerate(series.items()):
                ax.plot(range(len(found)), list(found.values()), "-o", color=_colour(n), label=label, **_LINE)
                ax.set_xticks(range(len(found)), [str(place) for place in found])
            ax.set_title(title)
            ax.set_xlabel(xlabel)
            _logarithmic(ax)
        axes[0, 0].set_ylabel("relative L1 error")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure


def lengths(series: Series, *, xlabel: str = "keys") -> Any:
    """Errors of each series against a length, both logarithmic.

    Raises InputError for no series, MissingExtraError without matplotlib.
    """
    _some("series", series)
    with style.look():
        figure, ax = style.canvas(size=(7.2, 3.4))
        for n, (label, found) in enumerate(series.items()):
            ax.plot(list(found), list(found.values()), "-o", color=_colour(n), **_LINE)
            end = list(found)[-1]
            ax.annotate(
                label, (end, found[end]), (7, 0), textcoords="offset points", va="center", fontsize=8.5,
                color=_colour(n), annotation_clip=False,
            )  # fmt: skip
        ticks = sorted({length for found in series.values() for length in found})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel(xlabel)
        ax.set_ylabel("relative L1 error")
        _logarithmic(ax)
    return figure


def codes(panels: Mapping[str, Sequence[int]], *, largest: int = 127, columns: int = 2) -> Any:
    """A histogram a panel: how many numbers have which code, from -largest to largest, and above it how many of the
    codes are taken by more than one number in a thousand.

    Args:
        panels: title -> 2 * largest + 1 counts.

    Raises InputError for no panels or another number of counts, MissingExtraError without matplotlib.
    """
    _some("panels", panels)
    for title, counts in panels.items():
        if len(counts) != 2 * largest + 1:
            expected = f"{2 * largest + 1}, one for each code"
            raise InputError(title, got=f"{len(counts)} counts", expected=expected, hint="torch.bincount(codes + 127)")
    rows = -(-len(panels) // columns)
    with style.look():
        size = (3.6 * columns, 1.9 * rows)
        figure, axes = style.canvas(columns, rows, size=size, sharex=True, squeeze=False)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for ax, (title, counts) in zip(axes.flat, panels.items(), strict=False):
            share = np.asarray(counts, dtype=float) / max(1, sum(counts))
            ax.fill_between(range(-largest, largest + 1), share, step="mid", color=style.FULL, linewidth=0)
            ax.set_title(f"{title}: {int((share > 1e-3).sum())} of {2 * largest + 1}", fontsize=9)
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
            ax.set_xticks([-largest, 0, largest])
            ax.set_ylim(0)
    return figure


_LINE = {"linewidth": 1.8, "markersize": 4.5, "markeredgecolor": "white"}


def _colour(n: int) -> str:
    return style.SERIES[1:][n % (len(style.SERIES) - 1)]


def _logarithmic(ax: Any) -> None:
    ax.set_yscale("log")
    ax.grid(axis="y", color=style.HAIRLINE, linewidth=0.7)
    ax.set_axisbelow(True)


def _some(name: str, given: Mapping[str, Any]) -> None:
    if not given:
        raise InputError(name, got="none", expected="at least one", hint="a mapping from labels to what is drawn")
