"""Processes of their own, for what only a fresh one has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.environment import ROOT


def printed_by(words: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    """What `python -m` with these words prints on stdout, run in the repository's folder.

    Raises:
        RuntimeError: it failed; the last line that it printed on stderr.
        subprocess.TimeoutExpired: it takes longer.
    """
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        said = done.stderr.strip()
        raise RuntimeError(said.splitlines()[-1] if said else f"exit {done.returncode}")
    return done.stdout
