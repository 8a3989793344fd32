"""Pictures of quantisation: errors by kind of numbers and granularity of scales, errors by length, which codes are
used, and a function with its codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.draw import style

Series = Mapping[str, Mapping[Any, float]]  # label -> place on the x axis -> error


def errors(panels: Mapping[str, Series], *, xlabel: str) -> Any:
    """A panel for each kind of numbers with the errors of each series, all on one logarithmic scale.

    Args:
        panels: title -> series, a mapping label -> {place on the x axis: relative L1 error}; places keep their order.
        xlabel: below each panel.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no panels.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> figure = draw.errors({"Gaussian": {"int8": {"block": 0.013, "token": 0.009}}}, xlabel="scale of a")
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

    Args:
        series: label -> {length: relative L1 error}.
        xlabel: below the x axis.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no series.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> figure = draw.lengths({"one accumulator": {4096: 0.0033, 32768: 0.0257}})
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
    """Histograms of codes, each titled with the number of codes that more than one number in a thousand has.

    Args:
        panels: title -> 2 * largest + 1 counts, of the codes from -largest to largest.
        largest: the largest code.
        columns: panels in a row.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no panels, or another number of counts.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> figure = draw.codes({"keys": torch.bincount(torch.randint(255, (1000,)), minlength=255).tolist()})
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


def steps(
    x: Sequence[float], exact: Sequence[float], found: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str
) -> Any:
    """A function and its approximations by codes: one panel with the values, one with their relative errors.

    Args:
        x: places, in order.
        exact: values of the function there, none of them 0.
        found: label -> values of an approximation there.
        xlabel, ylabel: labels of the axes.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no approximation, or one of another length.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> figure = draw.steps([0.0, 1.0], [1.0, 2.0], {"nearest code": [1.0, 1.9]}, xlabel="x", ylabel="2 ** x")
    """
    _some("found", found)
    for name, values in {"exact": exact, **found}.items():
        if len(values) != len(x):
            raise InputError(name, got=f"{len(values)} values", expected=f"{len(x)}, one a place", hint="drawn over x")
    with style.look():
        figure, (values_ax, errors_ax) = style.canvas(2, size=(7.2, 3.0))
        values_ax.plot(x, exact, color=style.INK, linewidth=1.2, zorder=3)
        for n, (label, values) in enumerate(found.items()):
            values_ax.plot(x, values, color=_colour(n), linewidth=1.6, label=label)
            off = np.asarray(values, dtype=float) / np.asarray(exact, dtype=float) - 1
            errors_ax.plot(x, 100 * off, color=_colour(n), linewidth=1.4)
        errors_ax.axhline(0.0, color=style.INK, linewidth=0.8)
        values_ax.set_ylabel(ylabel)
        errors_ax.set_ylabel("off by, %")
        for ax in (values_ax, errors_ax):
            ax.set_xlabel(xlabel)
        figure.legend(loc="outside lower center", ncols=len(found), frameon=False, fontsize=8)
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
