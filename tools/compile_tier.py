"""Which tests of the compile tier wait: those of kernels that have not changed since the tests passed.

What a kernel compiles to is a function of its sources, of the tests and of Triton's version. tests/compile/passed.json
has, by version and row, the hash of the sources with which all tests of the row's kernels passed. Where it is today's,
one in eight of those tests runs, another one for each commit, and one of each file and row at least.
`python -m tools.compile_tier` runs what has changed and notes what passed; `--newest DIR` does so with another Triton.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.families import FAMILIES, ROOT
from tools.syntax import sources_hash

TABLE = ROOT / "tests" / "compile" / "passed.json"
TURNS = 8
# what the tests are and how they compile, beside the inputs of each row
_HOW = ("barriers", "cases", "offline", "instructions", "uniform_registers")
TESTS = (
    "tests/compile/*.py",
    "tools/variants.py",
    *(f"src/tilewise/testing/{name}.py" for name in _HOW),
)
OF_NEWEST = ("test_kernels", "test_gluon", "test_barriers")  # the files that run with the newest Triton
Test = tuple[str, tuple[str, ...]]  # its unit, a file or a class of one, and the rows whose kernels it compiles


def read_table(path: Path = TABLE) -> dict[str, dict[str, str]]:
    """{version of Triton: {row: hash}}."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return found


@functools.cache
def key(row: str, root: Path = ROOT) -> str:
    """The hash of all that says what the row's kernels compile to, but for Triton."""
    parts = [family.hash(root) for family in FAMILIES.values() if family.rows and row in family.compiled]
    tests = sorted({path for pattern in TESTS for path in root.glob(pattern)})
    inputs = list(root.glob(f"src/tilewise/testing/{row}.py"))
    parts += [sources_hash(tests, root), sources_hash(inputs, root)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def rows() -> list[str]:
    """All rows of `tools.variants`."""
    return sorted({row for family in FAMILIES.values() for row in family.compiled})


def unchanged(passed: Mapping[str, str]) -> set[str]:
    """The rows whose tests have passed with today's sources; `passed` are hashes by row."""
    return {row for row in rows() if passed.get(row) == key(row)}


def waiting(tests: Sequence[Test], known: set[str], turn: int) -> list[int]:
    """Indices of the tests that need not run this time.

    Args:
        tests: all of the tier, in order. One without rows never waits.
        known: rows whose kernels have not changed.
        turn: the number of commits.
    """
    groups: dict[Test, list[int]] = defaultdict(list)
    for index, test in enumerate(tests):
        if test[1] and known.issuperset(test[1]):
            groups[test].append(index)
    found = []
    for own in groups.values():
        every = min(TURNS, len(own))
        found += [index for place, index in enumerate(own) if place % every != turn % every]
    return sorted(found)


def commits() -> int:
    """How many commits led here; 0 where git does not know."""
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def environment(newest: str | None) -> dict[str, str]:
    """Of a process that uses the Triton in the folder `newest`."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, **({"PYTHONPATH": os.pathsep.join(filter(None, [newest, before]))} if newest else {})}


def note(table: Mapping[str, Mapping[str, str]], version: str, passed: Iterable[str]) -> dict[str, dict[str, str]]:
    """The table once tests of these rows have passed, without versions that say nothing about today's sources."""
    found = {**table, version: {**table.get(version, {}), **{row: key(row) for row in passed}}}
    return {known: dict(sorted(rows.items())) for known, rows in sorted(found.items()) if unchanged(rows)}


def main(argv: list[str] | None = None) -> int:
    """Run the tests of rows that have changed; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--newest", metavar="DIR", help="folder of another Triton, for the files that run with it")
    given = parser.parse_args(argv)
    env = environment(given.newest)
    asked = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    version = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout.strip()
    table = read_table()
    before = {row: key(row) for row in rows()}
    changed = [row for row in rows() if table.get(version, {}).get(row) != before[row]]
    print(f"triton {version}: {len(changed)} rows to compile: {' '.join(changed)}", flush=True)
    files = [f"tests/compile/{name}.py" for name in OF_NEWEST] if given.newest else ["tests/compile"]
    command = [sys.executable, "-m", "pytest", *files, "-n", "2", "-q", "--dist", "load"]
    status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode if changed else 0
    key.cache_clear()
    if status == 0 and {row: key(row) for row in rows()} == before:
        TABLE.write_text(json.dumps(note(table, version, changed), indent=2) + "\n")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
