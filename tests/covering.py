"""Which tests of a product of parameters run: a pairwise-covering set, unless pytest is told `--full`.

A test has factors: its function, and the value of each parameter; a setting is an implementation and a dtype. Of the
tests of one file as many run as it takes for each pair of values that meets in some test to meet in one that runs.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

Factors = Mapping[str, str]
Pair = tuple[tuple[str, str], ...]


def pairs(factors: Factors) -> list[Pair]:
    """Every two values of a test's factors, and each alone."""
    values = sorted(factors.items())
    return [*itertools.combinations(values, 2), *((value,) for value in values)]


def covering(tests: Sequence[Factors]) -> list[int]:
    """Indices of tests in which all pairs of the sequence meet."""
    return covering_all([pairs(test) for test in tests])


def covering_all(sets: Sequence[Collection[Hashable]]) -> list[int]:
    """Indices of sets that hold all that any holds: of those that hold most that is new the first."""
    missing = set(itertools.chain.from_iterable(sets))
    heap = [(-len(held), index) for index, held in enumerate(sets)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        bound, index = heapq.heappop(heap)
        new = missing.intersection(sets[index])
        if not new:
            continue
        if -len(new) > bound:  # it covers fewer than when it was put there; another may cover more
            heapq.heappush(heap, (-len(new), index))
            continue
        missing -= new
        chosen.append(index)
    return sorted(chosen)


def factors_of(function: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """A test's factors by name.

    Args:
        function: the test's name without parameters.
        parameters: the value of each.
    """
    found = {"test": function}
    for name, value in parameters.items():
        for part, inner in _parts(name, value):
            found[part] = _text(inner)
    return found


def _parts(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """A setting is its fields that say who is tested at which dtype."""
    if dataclasses.is_dataclass(value) and hasattr(value, "impl") and not isinstance(value, type):
        return [(field, getattr(value, field)) for field in ("impl", "dtype") if hasattr(value, field)]
    return [(name, value)]


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    if callable(value) and hasattr(value, "__qualname__"):
        code = getattr(value, "__code__", None)  # lambdas have one name
        where = f":{code.co_firstlineno}.{zlib.crc32(code.co_code)}" if code else ""
        return f"{value.__module__}.{value.__qualname__}{where}"
    return repr(value)


def of_files(tests: Sequence[tuple[str, Factors]]) -> list[int]:
    """Indices of the covering sets of all files.

    Args:
        tests: the file and the factors of each.
    """
    by_file: dict[str, list[int]] = defaultdict(list)
    for index, (file, _) in enumerate(tests):
        by_file[file].append(index)
    chosen = [[own[n] for n in covering([tests[index][1] for index in own])] for own in by_file.values()]
    return sorted(itertools.chain.from_iterable(chosen))


def count_pairs(tests: Sequence[tuple[str, Factors]]) -> int:
    """How many different pairs of values meet in the tests of each file."""
    return len({(file, pair) for file, factors in tests for pair in pairs(factors)})
