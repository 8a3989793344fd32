"""One look for every picture, and files that come out byte for byte the same each time.

matplotlib is imported when a picture is drawn, not before, and without pyplot: no global state, no window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewise.core.errors import InputError
from tilewise.core.optional import importing

INK, MUTED, HAIRLINE, PAPER = "#1d2733", "#66717e", "#d5dae0", "#ffffff"
EMPTY, PARTIAL, PARTIAL_PALE, FULL = "#eef0f3", "#f2a93b", "#fcebcd", "#2a6f97"
SERIES = ("#9aa5b1", "#d1495b", "#2a6f97", "#3c9d6b", "#7c5cbf", "#f2a93b")

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "svg.hashsalt": "tilewise",
    "svg.fonttype": "path",
}


def matplotlib() -> Any:
    """The matplotlib package; raises MissingExtraError naming the extra that installs it."""
    with importing("matplotlib>=3.8", "draw", name="tilewise.explain.draw"):
        import matplotlib
    return matplotlib


@contextmanager
def look() -> Iterator[None]:
    """The house style, whatever the caller's matplotlibrc says."""
    package = matplotlib()
    with package.rc_context():
        package.rcdefaults()
        package.rcParams.update(_RC)
        yield


def canvas(columns: int = 1, rows: int = 1, *, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of `size` inches and its axes (an array unless 1 × 1); call it inside `look()`."""
    matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    return figure, figure.subplots(rows, columns, **options)


def check_target(path: str | Path) -> Path:
    """Check the path of a picture before it is drawn.

    Args:
        path: of a .svg or .png file in a folder that exists.

    Returns:
        The path.

    Raises:
        InputError: another suffix, or no such folder.

    Example:
        >>> from tilewise.explain import draw
        >>> draw.check_target("mask.svg").name
        'mask.svg'
    """
    target = Path(path)
    if target.suffix not in (".svg", ".png"):
        hint = "the ending chooses the format"
        raise InputError("path", got=str(path), expected="a name ending in .svg or .png", hint=hint)
    if not target.parent.is_dir():
        raise InputError("path", got=str(path), expected="a file in a folder that exists", hint="make the folder first")
    return target


def save(figure: Any, path: str | Path) -> Path:
    """Write a figure to a file. The same figure gives the same bytes, without a date.

    Args:
        figure: a matplotlib figure.
        path: of a .svg or .png file (200 dots per inch).

    Returns:
        The path.

    Raises:
        InputError: another suffix, or no such folder.

    Example:
        >>> import pathlib, tempfile
        >>> from tilewise.explain import draw
        >>> figure = draw.mask(tw.causal, seqlen_q=256, seqlen_k=256)
        >>> draw.save(figure, pathlib.Path(tempfile.mkdtemp(), "causal.svg")).name
        'causal.svg'
    """
    target = check_target(path)
    metadata = {"Date": None} if target.suffix == ".svg" else {}
    with look():
        figure.savefig(target, dpi=200, metadata=metadata)
    return target
