"""What must hold beside the tests, two checks at a time: `python -m tools.gates`. (A test compares the pictures.)"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tools.families import ROOT

AT_ONCE = 2
GATES: dict[str, tuple[str, ...]] = {  # what takes longest first
    "mypy": ("mypy",),
    "README tables": (sys.executable, "-m", "tools.readme", "--check"),
    "benchmark report": (sys.executable, "-m", "benchmarks.report", "--check"),
    "layers": ("lint-imports",),
    "sizes": (sys.executable, "-m", "tools.size_gate"),
    "ruff check": ("ruff", "check", "."),
    "ruff format": ("ruff", "format", "--check", "."),
}


def run(gates: Mapping[str, Sequence[str]]) -> list[str]:
    """Run all and print a line for each, with what it said where it failed; returns the names of those."""

    def one(name: str) -> bool:
        start = time.perf_counter()
        done = subprocess.run(gates[name], cwd=ROOT, capture_output=True, text=True, check=False)
        seconds, failed = time.perf_counter() - start, done.returncode != 0
        said = f"\n{done.stdout}{done.stderr}" if failed else ""
        print(f"{'FAILED' if failed else 'passed'} {seconds:6.1f} s  {name}{said}", flush=True)
        return failed

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [name for name, failed in zip(gates, pool.map(one, gates), strict=True) if failed]


if __name__ == "__main__":
    sys.exit(1 if run(GATES) else 0)
