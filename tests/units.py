"""What a test belongs to: a tier, a unit that is never cut between two shards, the rows whose kernels it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kernel_tests import INTERPRETER

TESTS = Path(__file__).parent


def tier_of(path: Path) -> str:
    """The tier a test file belongs to: the name of its folder where that is a tier, else cpu."""
    first = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return first if first in ("interpret", "compile", "gpu") else "cpu"


def unit_of(nodeid: str) -> str:
    """A test's class where it has one, else its file."""
    return nodeid.partition("[")[0].rpartition("::")[0]


def compiled_rows(item: pytest.Item) -> tuple[str, ...]:
    """The rows of `tools.kernel_tests` that a test is of: of its variant, of its mark, or of the interpreter."""
    if tier_of(item.path) == "interpret":
        return (INTERPRETER,)
    found, mark = getattr(item, "callspec", None), item.get_closest_marker("rows")
    row = getattr(found.params.get("variant"), "row", None) if found and tier_of(item.path) == "compile" else None
    return (row,) if row else tuple(mark.args) if mark else ()
