"""A slow memory that counts: indexing one of its arrays is traffic, everything else is free.

A rung keeps its operands here and works on copies ("fast memory"). `x[...]` loads elements and `x[...] = y` stores
them, so a rung reads like NumPy and its traffic is counted by what it does, not by what it claims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.core.errors import InputError

Array = npt.NDArray[np.float64]


class Counts(NamedTuple):
    """Elements moved from (`loads`) and to (`stores`) slow memory."""

    loads: int
    stores: int

    @property
    def total(self) -> int:
        """Elements moved in either direction."""
        return self.loads + self.stores


class SlowArray:
    """An array in slow memory. Indexing it loads or stores, and is counted."""

    def __init__(self, memory: SlowMemory, data: Array) -> None:
        self._memory, self._data = memory, data
        self.shape: tuple[int, ...] = data.shape

    def __getitem__(self, index: Any) -> Array:
        loaded = np.array(self._data[index])
        self._memory.loads += loaded.size
        return loaded

    def __setitem__(self, index: Any, value: Any) -> None:
        self._memory.stores += self._data[index].size
        self._data[index] = value

    def peek(self) -> Array:
        """The contents, uncounted: for the caller who reads the result, not for the algorithm."""
        return self._data


class SlowMemory:
    """A large memory that is slow to reach; `loads` and `stores` count the elements that crossed its boundary.

    Example:
        >>> from tilewise.explain.ladder.slow_memory import SlowMemory
        >>> memory = SlowMemory()
        >>> row = memory.put([[1.0, 2.0], [3.0, 4.0]])[0]  # a load of two elements
        >>> memory.counts
        Counts(loads=2, stores=0)
    """

    def __init__(self) -> None:
        self.loads = 0
        self.stores = 0

    def put(self, array: npt.ArrayLike) -> SlowArray:
        """Place an input. Inputs are there before an algorithm starts, so this is not counted.

        Args:
            array: any shape; stored as float64.

        Returns:
            A `SlowArray`, whose indexing is counted.
        """
        return SlowArray(self, np.array(array, dtype=np.float64))

    def empty(self, *shape: int) -> SlowArray:
        """Room for an output, which is NaN until it is stored.

        Args:
            shape: its sizes.

        Returns:
            A `SlowArray`, whose indexing is counted.
        """
        return SlowArray(self, np.full(shape, np.nan))

    @property
    def counts(self) -> Counts:
        """Traffic so far."""
        return Counts(self.loads, self.stores)


def ceil_div(a: int, b: int) -> int:
    """Tiles of b needed to cover a."""
    return -(-a // b)


def positive(**sizes: int) -> None:
    """Raise InputError for the first tile size or count that is not at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise InputError(name, got=size, expected="an integer of at least 1", hint="leave it out for the default")
