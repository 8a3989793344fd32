"""Layers of a model that keep the same keys: they share block tables, and pages hold keys and values of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SPARE = 8  # at most one in so many layers of a page may lie idle


class Group(NamedTuple):
    """Layers whose queries see equally many keys.

    Attributes:
        layers: their numbers.
        window: keys that a query sees, itself included; None is all.
    """

    layers: tuple[int, ...]
    window: int | None

    def pages(self, length: int, step: int, page_size: int) -> int:
        """Pages that a sequence of `length` tokens holds at most, of which a step computes at most `step`."""
        whole = -(-length // page_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + min(step, length)) // page_size) + 1)


def groups_of(windows: Sequence[int | None]) -> tuple[Group, ...]:
    """The fewest groups of which all pages have the same number of layers, so that any group can take any page.

    Where the numbers of layers have no common divisor, the last group of a window has fewer, and its pages lie partly
    idle.

    Args:
        windows: of each layer.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    for size in range(max(map(len, kinds.values())), 0, -1):
        count = sum(-(-len(layers) // size) for layers in kinds.values())
        if (count * size - len(windows)) * _SPARE <= len(windows):
            break
    return tuple(
        Group(tuple(layers[start : start + size]), window)
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )
