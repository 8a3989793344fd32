"""A pytest plugin: tests that take minutes begin first, so that a run does not wait for one process at its end."""

from __future__ import annotations

import pytest

LONGEST = ("many_operations", "test_sanitizer")  # minutes of the assembler, and of every access looked at


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of the rest stays."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))
