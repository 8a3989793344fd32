"""Cases of the benchmarks on tiny problems, as tests run them."""

from __future__ import annotations

import functools
from pathlib import Path
from unittest import mock

from benchmarks import records
from benchmarks.__main__ import main
from benchmarks.environment import Environment
from benchmarks.records import Record
from tools.families import Family

ENVIRONMENT = Environment(
    device="cpu: x, 2 cores",
    driver=None,
    torch="2",
    triton=None,
    commit="abc",
    command="c",
    date="2026-01-01T00:00:00Z",
)


def quick(case: str, out: Path, *only: str) -> list[Record]:
    """The records of a quick run of these parts, of all where none is named."""
    parts = ["--only", *only] if only else []
    # Each record asks for the hash of its sources, which looks at all files; a run changes none.
    with mock.patch.object(Family, "hash", functools.cache(Family.hash)):
        assert main([case, "--quick", "--rounds", "1", "--out", str(out), *parts]) == 0
    return [record for _, record in records.read_all(out)]
