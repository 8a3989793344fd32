"""Plots of what attention costs: the roofline, traffic against fast memory, the ladder's rungs, an SM over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain import traffic as hbm
from tilewise.explain.draw import style
from tilewise.explain.ladder import Report
from tilewise.explain.roofline import Roofline
from tilewise.explain.timeline import Schedule, Trip, period, simulate

_KINDS = {
    "keys": style.SERIES[0],
    "values": style.HAIRLINE,
    "scores": style.FULL,
    "output": style.SERIES[3],
    "rest": style.PARTIAL_PALE,
    "exponentials": style.PARTIAL,
}


def roofline(points: Mapping[str, Roofline], measured: Mapping[str, float] | None = None) -> Any:
    """A roofline of one GPU, both axes logarithmic: a roof for each dtype, and a dot for each problem.

    Args:
        points: label -> estimate, all on one GPU.
        measured: label -> seconds of a run, drawn as a diamond at the rate that it reached.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no points, or several GPUs.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> from tilewise.explain.roofline import Problem, estimate
        >>> figure = draw.roofline({"prefill": estimate(Problem(8192, causal=True), "H200")})
    """
    gpus = {point.gpu.name: point.gpu for point in points.values()}
    if len(gpus) != 1:
        hint = "draw one figure for each GPU"
        raise InputError("points", got=sorted(gpus) or "none", expected="estimates on one GPU", hint=hint)
    (gpu,) = gpus.values()
    dtypes = sorted({point.problem.dtype for point in points.values()}, key=gpu.peak)
    low = min(1.0, *(point.intensity / 2 for point in points.values()))
    high = max(4 * gpu.ridge(dtypes[-1]), *(point.intensity * 4 for point in points.values()))
    with style.look():
        figure, ax = style.canvas(size=(7.2, 4.2))
        for index, dtype in enumerate(dtypes):
            ridge, peak = gpu.ridge(dtype), gpu.peak(dtype) / 1e12
            roof = np.array([low, ridge, high])
            rates = np.minimum(roof * gpu.memory_bandwidth / 1e12, peak)
            ax.plot(roof, rates, color=style.INK, linewidth=1.6, zorder=2)
            ax.fill_between(roof, rates, 1e-6, color=style.FULL, alpha=0.06, linewidth=0, zorder=0)
            ax.annotate(
                f"{peak:,.0f} TFLOP/s {dtype}",
                (high, peak),
                (-2, 4),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=style.MUTED,
            )
            ax.plot([ridge, ridge], [1e-6, peak], color=style.HAIRLINE, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
            ax.annotate(
                f"ridge {ridge:,.0f}",
                (ridge, 0),
                (4, 6 + 11 * index),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=8,
                color=style.MUTED,
            )
        for index, (label, point) in enumerate(points.items()):
            colour, rate = style.SERIES[1:][index % 5], point.attainable / 1e12
            ax.plot(point.intensity, rate, "o", markersize=7, color=colour, markeredgecolor="white", zorder=4)
            left = point.bound == "memory"
            below = -20 if measured and label in measured else -9  # of the second dot
            ax.annotate(
                f"{label}\n{_time(point.floor_seconds)}",
                (point.intensity, rate),
                (8 if left else 0, -5 if left else below),
                textcoords="offset points",
                ha="left" if left else "center",
                va="top",
                fontsize=8,
                color=colour,
                linespacing=1.3,
                zorder=5,
            )
            if measured and label in measured:
                reached = point.flops / measured[label] / 1e12
                ax.plot(point.intensity, reached, "D", markersize=5, color=colour, markeredgecolor="white", zorder=4)
        floor = min(point.attainable for point in points.values()) / 1e12
        ax.set(xscale="log", yscale="log", xlim=(low, high))
        ax.set_ylim(min(floor / 4, gpu.memory_bandwidth * low / 1e12), gpu.peak(dtypes[-1]) / 1e12 * 2.2)
        slope = f"{gpu.memory_bandwidth / 1e12:.2f} TB/s"
        middle = np.sqrt(low * gpu.ridge(dtypes[0]))
        ax.annotate(
            slope,
            (middle, middle * gpu.memory_bandwidth / 1e12),
            (-6, 6),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=style.MUTED,
        )
        ax.set_title(f"The floor of each problem on one {gpu.name}")
        ax.set_xlabel("arithmetic intensity, FLOP per byte of compulsory traffic")
        ax.set_ylabel("TFLOP/s")
    return figure


def traffic(seqlen: int, head_dim: int, *, kibibytes: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024)) -> Any:
    """Memory traffic of one head against the fast memory of a tile, a line for each algorithm, in 16 bits.

    Args:
        seqlen: queries and keys.
        head_dim: of q, k and v.
        kibibytes: sizes of the fast memory.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: a fast memory that is too small for one query.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> figure = draw.traffic(8192, 64)
    """
    sizes = [size * 1024 // 2 for size in kibibytes]
    tables = [hbm.compare(seqlen, seqlen, head_dim, fast_memory=size) for size in sizes]
    compulsory = 4 * seqlen * head_dim * 2 / 1e6
    with style.look():
        figure, ax = style.canvas(size=(7.2, 3.9))
        for index, name in enumerate(row.algorithm for row in tables[0]):
            values = [table[index].bytes / 1e6 for table in tables]
            colour = style.SERIES[index]
            ax.plot(kibibytes, values, "-o", color=colour, linewidth=2, markersize=4.5, markeredgecolor="white")
            ax.annotate(
                name,
                (kibibytes[-1], values[-1]),
                (7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=colour if index else style.MUTED,
                annotation_clip=False,
            )
        ax.axhline(compulsory, color=style.HAIRLINE, linewidth=1.2, linestyle=(0, (3, 3)), zorder=0)
        ax.annotate(
            f"q, k, v, o once: {compulsory:.1f} MB",
            (kibibytes[0], compulsory),
            (0, 4),
            textcoords="offset points",
            fontsize=8,
            color=style.MUTED,
        )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(list(kibibytes), [str(size) for size in kibibytes])
        ax.minorticks_off()
        ax.set_title(f"Memory traffic of one head, {seqlen:,} tokens, head_dim {head_dim}")
        ax.set_xlabel("fast memory a tile may use, KiB")
        ax.set_ylabel("MB moved")
    return figure


def ladder(reports: Sequence[Report]) -> Any:
    """Loads and stores of rungs of the ladder as bars.

    Args:
        reports: what `climb` returned, for rungs with the same problem, in the order of the bars.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no reports.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> from tilewise.explain.ladder import climb
        >>> figure = draw.ladder([climb(name) for name in ("attention_two_pass", "attention_one_pass")])
    """
    if not reports:
        hint = "tilewise.explain.ladder.climb(name) makes one"
        raise InputError("reports", got="none", expected="at least one rung's report", hint=hint)
    with style.look():
        figure, ax = style.canvas(size=(7.2, 0.42 * len(reports) + 1.1))
        places = np.arange(len(reports))
        loads = np.array([report.counts.loads for report in reports])
        stores = np.array([report.counts.stores for report in reports])
        ax.barh(places, loads, height=0.62, color=style.FULL, label="loads")
        ax.barh(places, stores, height=0.62, left=loads, color=style.PARTIAL, label="stores")
        for place, total in zip(places, loads + stores, strict=True):
            ax.annotate(f"{total:,}", (total, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_yticks(places, [report.label for report in reports])
        ax.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=style.INK)
        ax.invert_yaxis()
        ax.spines[["bottom", "left"]].set_visible(False)
        ax.set_xticks([])
        ax.set_xlim(0, (loads + stores).max() * 1.1)
        ax.set_title(f"Elements moved: {reports[0].problem}")
        ax.legend(loc="lower right", frameon=False, ncols=2, fontsize=8, handlelength=1.1)
    return figure


def timeline(trip: Trip, schedules: Sequence[Schedule], *, tiles: int = 4, warpgroups: int = 2) -> Any:
    """What the warpgroups of an SM do over time, a panel for each schedule.

    Numbers are tiles. A gap in a lane means that its warpgroup waits.

    Args:
        trip: clocks of a warpgroup's work on one tile.
        schedules: names in `timeline.SCHEDULES`.
        tiles: tiles of keys to simulate.
        warpgroups: consumer warpgroups.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no schedules, or an unknown one.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> from tilewise.explain.timeline import SCHEDULES, Trip
        >>> figure = draw.timeline(Trip.of(block_n=128, head_dim=128), SCHEDULES)
    """
    if not schedules:
        raise InputError("schedules", got="none", expected="at least one", hint="timeline.SCHEDULES names them")
    lanes = ["fetch", *(f"warpgroup {c}: {what}" for c in range(warpgroups) for what in ("products", "softmax"))]
    with style.look():
        size = (7.2, len(schedules) * (0.2 * len(lanes) + 0.55) + 0.5)
        figure, axes = style.canvas(rows=len(schedules), size=size, sharex=True, squeeze=False)
        for schedule, ax in zip(schedules, axes[:, 0], strict=True):
            for span in simulate(trip, tiles, schedule, warpgroups=warpgroups):
                lane = 1 + 2 * span.warpgroup + (span.kind in ("rest", "exponentials")) if span.warpgroup >= 0 else 0
                width = span.end - span.begin
                ax.barh(lane, width, 0.8, span.begin, color=_KINDS[span.kind], edgecolor="white", linewidth=0.6)
                if span.kind != "rest":
                    dark = span.kind in ("scores", "output")
                    middle, colour = span.begin + width / 2, "white" if dark else style.INK
                    ax.text(middle, lane, str(span.tile), ha="center", va="center", fontsize=6.5, color=colour)
            clocks = period(trip, schedule, warpgroups=warpgroups)
            busy = warpgroups * (trip.scores + trip.output) / clocks
            ax.set_title(f"{schedule}: {clocks:,.0f} clocks a tile, products in {busy:.0%} of them")
            ax.set_yticks(range(len(lanes)), lanes)
            ax.tick_params(axis="y", length=0)
            ax.spines[["left"]].set_visible(False)
            ax.invert_yaxis()
        axes[-1, 0].set_xlabel("clocks")
        handles = [axes[0, 0].barh(0, 0, color=colour, label=kind) for kind, colour in _KINDS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(_KINDS), frameon=False, fontsize=8)
    return figure


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
