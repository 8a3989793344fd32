"""A picture of block tables: which page of the pool holds which tokens of each sequence, and who shares it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.core.errors import InputError
from tilewise.explain.draw import style
from tilewise.kv.allocator import PageAllocator

MOST_PAGES, MOST_SEQUENCES = 40, 24  # that a picture has room for


def pages(allocator: PageAllocator, names: Sequence[str] | None = None) -> Any:
    """A figure of the block tables of all live sequences, and of the pool.

    A line is a sequence and a box is a page of its block table, numbered as in the pool and filled in proportion to its
    used slots. Each page that several sequences share has its own colour. The line below is the pool: used, cached and
    free pages.

    Args:
        allocator: the pages; sequences are drawn in the order in which they were created.
        names: of the sequences; None numbers them.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: more than 40 pages or 24 sequences, or another number of names.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> allocator = tw.kv.PageAllocator(num_pages=8, page_size=4)
        >>> prompt = allocator.create()
        >>> _, fork = allocator.append(prompt, 6), allocator.fork(prompt)
        >>> figure = draw.pages(allocator, ["prompt", "fork"])
    """
    sequences = allocator.sequences
    longest = max((len(sequence.pages) for sequence in sequences), default=0)
    for name, count, most in (
        ("pages", max(longest, allocator.num_pages), MOST_PAGES),
        ("sequences", len(sequences), MOST_SEQUENCES),
    ):
        if count > most:
            raise InputError(name, got=count, expected=f"at most {most}", hint="a picture of fewer shows the same")
    names = [f"sequence {n}" for n in range(len(sequences))] if names is None else names
    if len(names) != len(sequences):
        raise InputError(
            "names", got=len(names), expected=f"{len(sequences)}, one each", hint="see PageAllocator.sequences"
        )
    shared = [page for page in range(allocator.num_pages) if allocator.holders(page) > 1]
    colours = dict(
        zip(shared, (style.SERIES[1 + n % (len(style.SERIES) - 1)] for n in range(len(shared))), strict=True)
    )
    wide = max(longest, allocator.num_pages)
    with style.look():
        figure, ax = style.canvas(size=(1.6 + 0.42 * wide, 0.9 + 0.42 * (len(sequences) + 1.5)))
        for row, sequence in enumerate(sequences):
            for column, page in enumerate(sequence.pages):
                taken = min(sequence.length - column * sequence.page_size, sequence.page_size) / sequence.page_size
                _box(ax, column, row, page, colours.get(page, style.SERIES[0]), taken)
        pool = len(sequences) + 0.5
        cached = {page for page in allocator.kept if allocator.holders(page) == 0}
        for page in range(allocator.num_pages):
            used = allocator.holders(page) > 0
            colour = style.PARTIAL_PALE if page in cached else colours.get(page, style.SERIES[0])
            _box(ax, page, pool, page, colour, 1.0 if used or page in cached else 0.0)
        ax.set_yticks([*range(len(sequences)), pool], [*names, "pool"])
        ax.set_xticks([])
        for side in ax.spines.values():
            side.set_visible(False)
        ax.tick_params(length=0)
        ax.set_xlim(-0.55, wide - 0.45)
        ax.set_ylim(pool + 0.55, -0.55)
        held = f"{allocator.num_used} pages used, {len(shared)} of them shared"
        ax.set_title(f"{held}, {len(cached)} cached, {allocator.num_free} free")
    return figure


def _box(ax: Any, x: float, y: float, page: int, colour: str, taken: float) -> None:
    """One page, of whose width `taken` is filled."""
    ax.barh(y, 0.9 * taken, left=x - 0.45, height=0.8, color=colour, alpha=0.75)
    ax.barh(y, 0.9, left=x - 0.45, height=0.8, color="none", edgecolor=style.MUTED, linewidth=0.8)
    ax.text(x, y, str(page), ha="center", va="center", fontsize=8.0, color=style.INK)
