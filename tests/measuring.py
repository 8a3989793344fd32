"""A pytest plugin: what each test file, or class, takes, which implementations it runs, and whose kernels it compiles.

With `-p tests.measuring` each process writes a file into the folder that the environment variable names; `python -m
tools.shards --measure` makes tests/seconds.json of them.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.units import compiled_rows, unit_of
from tilewise.core.dispatch import Row

FOLDER = "TILEWISE_MEASURED"

_seconds: dict[str, float] = defaultdict(float)
_modules: dict[str, set[str]] = defaultdict(set)
_compiled: dict[str, set[str]] = defaultdict(set)
_current = ""


def pytest_configure() -> None:
    function = Row.function

    def watched(self: Row[Any], name: str) -> Any:
        _modules[_current].add(self.module)
        return function(self, name)

    Row.function = watched  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _current
    _current, start = unit_of(item.nodeid), time.perf_counter()
    result = yield
    _seconds[_current] += time.perf_counter() - start
    _compiled[_current].update(compiled_rows(item))
    _current = ""
    return result


def pytest_sessionfinish() -> None:
    found = {
        unit: {"seconds": seconds, "runs": sorted(_modules[unit]), "compiles": sorted(_compiled[unit])}
        for unit, seconds in _seconds.items()
    }
    if found:
        path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
        path.write_text(json.dumps(found))
