"""The interpret tier: one process per file, because Triton's interpreter replaces Triton in the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tools.shards import TIERS, units

TESTS = Path(__file__).parent
FILES = sorted((TESTS / "interpret").glob("test_*.py"))
GROUPS = 4  # processes of which each runs some files
SILENCE_S = 1800  # without a test that ends: the longest takes a hundredth of that where nothing else runs


def groups() -> list[list[str]]:
    """The files in parts that take about as long as each other; new ones, not measured yet, come last."""
    known = {unit.name: unit.seconds for unit in units() if unit.tier == "interpret"}
    parts: list[list[str]] = [[] for _ in range(GROUPS)]
    names = [path.relative_to(TESTS.parent).as_posix() for path in FILES]
    for name in sorted(names, key=lambda name: -known.get(name, 0.0)):
        min(parts, key=lambda part: sum(known.get(one, 0.0) for one in part)).append(name)
    return parts


@pytest.mark.timeout(0)  # what hangs is ended here
@pytest.mark.parametrize("group", range(GROUPS))
def test_kernels_in_the_interpreter(group: int, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", *groups()[group], "-n", "0", "-v", "--color=no", "--timeout=0"]
    command += [name for name in ("--full", "--all-kernels") if pytestconfig.getoption(name)]
    env = {**os.environ, **TIERS["interpret"], "PYTHONUNBUFFERED": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST"):
        env.pop(name, None)
    status, text = _until_silent(command, env)
    assert status == 0, f"{' '.join(command)}\n{text[-15000:]}"


def _until_silent(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a process, which is ended once it has said nothing for SILENCE_S seconds."""
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=TESTS.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        watch = threading.Timer(SILENCE_S, process.kill)
        watch.start()
        for line in process.stdout:
            lines.append(line)
            watch.cancel()
            watch = threading.Timer(SILENCE_S, process.kill)
            watch.start()
        watch.cancel()
    return process.returncode, "".join(lines)


def test_new_memory_holds_nan() -> None:
    assert torch.empty(3).isnan().all()


def test_every_tier_has_tests() -> None:
    """An empty folder would turn a tier off without a word."""
    missing = [tier for tier in ("interpret", "compile", "gpu") if not list((TESTS / tier).glob("test_*.py"))]
    assert not missing
