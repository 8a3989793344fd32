"""The interpret tier: one process per file, because Triton's interpreter replaces Triton in the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
FILES = sorted((TESTS / "interpret").glob("test_*.py"))
LIMIT_S = 900


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(path), "-n", "0", "-q", "--color=no", f"--timeout={LIMIT_S}"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST"):
        env.pop(name, None)
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-12000:]}\n{done.stderr[-3000:]}"


def test_new_memory_holds_nan() -> None:
    assert torch.empty(3).isnan().all()


def test_every_tier_has_tests() -> None:
    """An empty folder would turn a tier off without a word."""
    missing = [tier for tier in ("interpret", "compile", "gpu") if not list((TESTS / tier).glob("test_*.py"))]
    assert not missing
