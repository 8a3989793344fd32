"""Which tests of kernels wait: those of kernels that have not changed since the tests passed.

What a kernel compiles to, and what the interpreter computes with it, is a function of its sources, of the tests and of
Triton's version. tests/passed.json has, by version and row, the hash of the sources with which all tests of the row's
kernels passed; the interpreter's tests are of one row, of all kernels. Where a hash is today's, one in eight of those
tests runs, another one for each commit, and one of each file and row at least.
`python -m tools.kernel_tests` runs what has changed and notes what passed; `--newest DIR` does so with another Triton.
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

TABLE = ROOT / "tests" / "passed.json"
TURNS = 8
INTERPRETER = "interpreter"  # the row of the interpreter's tests
_INTERPRETED = ("tests/interpret/*.py", "src/tilewise/testing/*.py")
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
    """The hash of all that says what the row's kernels do, but for Triton."""
    interpreted = row == INTERPRETER
    of_row = [one for one in FAMILIES.values() if one.rows and (row in one.compiled or (interpreted and one.compiled))]
    patterns = (_INTERPRETED, ()) if interpreted else (TESTS, (f"src/tilewise/testing/{row}.py",))
    files = [sorted({path for pattern in part for path in root.glob(pattern)}) for part in patterns]
    parts = [*(family.hash(root) for family in of_row), *(sources_hash(part, root) for part in files)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def rows() -> list[str]:
    """All rows of `tools.variants`, and that of the interpreter's tests."""
    return sorted({INTERPRETER, *(row for family in FAMILIES.values() for row in family.compiled)})


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
    before, known = {row: key(row) for row in rows()}, read_table().get(version, {})
    changed = [row for row in before if known.get(row) != before[row]]
    print(f"triton {version}: {len(changed)} rows to run: {' '.join(changed)}", flush=True)
    compiled = [row for row in changed if row != INTERPRETER]
    files = [f"tests/compile/{name}.py" for name in OF_NEWEST] if given.newest else ["tests/compile"]
    failed = bool(compiled) and _fails([*files, "--dist", "load"], env, compiled, version, before)
    if INTERPRETER in changed and not given.newest:
        interpreted = {**env, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        failed |= _fails(["tests/interpret"], interpreted, [INTERPRETER], version, before)
    return int(failed)


def _fails(tests: list[str], env: Mapping[str, str], of: list[str], version: str, before: Mapping[str, str]) -> bool:
    """Whether a test fails; else what passed is noted, unless sources have changed meanwhile."""
    command = [sys.executable, "-m", "pytest", *tests, "-n", "2", "-q"]
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        return True
    key.cache_clear()
    if all(key(row) == before[row] for row in of):
        TABLE.write_text(json.dumps(note(read_table(), version, of), indent=2) + "\n")
    return False


if __name__ == "__main__":
    sys.exit(main())
