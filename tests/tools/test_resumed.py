"""Receipts from runs that were cut short: what has passed is not run again, as long as nothing has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.environment import Environment
from tests import fresh
from tools import gpus_in_turns, longest_first, resumed
from tools.families import ROOT, Family

TESTS = """
import pytest

def test_good():
    pass

def test_broken():
    assert {fixed}

@pytest.mark.xdist_group("alone")
@pytest.mark.parametrize("who", ["a@b", "c"])
def test_grouped(who):
    pass
"""
RUN = """
import json, sys
from pathlib import Path
import pytest
from tools import gpu_receipt, resumed
from tools.families import Family

gpu_receipt.ROOT = Path.cwd()
passed = resumed.Passed(Path("passed.jsonl"), "now")
outcomes = gpu_receipt.Outcomes(passed)
before = len(passed.names)
options = ["-n", "2", "--dist", "loadgroup", "-q", "--rootdir", ".", "-p", "no:cacheprovider", "-p", "xdist.plugin"]
status = pytest.main(["test_some.py", *options, *passed.leave_out()], plugins=[outcomes])
print(json.dumps([before, int(status), outcomes.of(Family("some", (), ("test_some.py",), ()))]))
"""
ENVIRONMENT = Environment("NVIDIA H200", "1", "2", "3", "abc", "c", "2026-01-01T00:00:00Z")


def environment() -> dict[str, str]:
    """With the project's tools at hand; plugins that are not asked for cost each of pytest's processes a second."""
    own = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return os.environ | own


def run(folder: Path, fixed: bool) -> object:
    """(names that were known, pytest's exit status, outcomes) of a run."""
    (folder / "test_some.py").write_text(TESTS.format(fixed=fixed))
    ran = fresh.run(RUN, folder=folder, environment=environment(), first=str(ROOT))
    assert ran.stdout.strip(), ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_only_what_has_not_passed_runs_again(tmp_path: Path) -> None:
    assert run(tmp_path, fixed=False) == [0, 1, {"passed": 3, "failed": 1, "skipped": 0}]
    lines = (tmp_path / "passed.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["test"] for line in lines) == [
        "test_some.py::test_good", "test_some.py::test_grouped[a@b]", "test_some.py::test_grouped[c]",
    ]  # fmt: skip
    (tmp_path / "passed.jsonl").write_text("\n".join(lines) + '\n{"state": "no')  # cut short while it was written
    for known in (3, 4):
        assert run(tmp_path, fixed=True) == [known, 0 if known == 3 else 5, {"passed": 4, "failed": 0, "skipped": 0}]


def test_what_another_state_passed_counts_for_nothing(tmp_path: Path) -> None:
    resumed.Passed(tmp_path / "passed.jsonl", "before").add("test_some.py::test_good")
    assert run(tmp_path, fixed=True) == [0, 0, {"passed": 4, "failed": 0, "skipped": 0}]


@pytest.mark.parametrize("changed", ["kernel", "test", "device"])
def test_a_state_is_of_kernels_tests_and_device(tmp_path: Path, changed: str) -> None:
    files = {"kernel": tmp_path / "src" / "kernel.py", "test": tmp_path / "tests" / "gpu" / "test_some.py"}
    for path in files.values():
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
    family = Family("some", ("src/*.py",), ("tests/gpu/*.py",), ())
    first = resumed.state_of([family], ENVIRONMENT, tmp_path)
    assert resumed.state_of([family], replace(ENVIRONMENT, date="later", commit="def"), tmp_path) == first
    if changed == "device":
        assert resumed.state_of([family], replace(ENVIRONMENT, device="NVIDIA H100"), tmp_path) != first
    else:
        files[changed].write_text("x = 2\n")
        assert resumed.state_of([family], ENVIRONMENT, tmp_path) != first


def test_processes_begin_with_gpus_in_turn() -> None:
    assert [gpus_in_turns.in_turn(f"gw{n}", 3) for n in range(4)] == ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]


def test_what_takes_minutes_begins_first(tmp_path: Path) -> None:
    names = ("test_short", "test_case_many_operations", "test_other", "test_sanitizer")
    (tmp_path / "test_some.py").write_text("".join(f"def {name}():\n    pass\n\n" for name in names))
    options = ("-n", "1", "--dist", "loadgroup", "-v", "--rootdir", ".", "-p", "no:cacheprovider", "-p", "xdist.plugin")
    command = [sys.executable, "-m", "pytest", "test_some.py", "-p", longest_first.__name__, *options]
    ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    began = [line.split("::")[1].split()[0] for line in ran.stdout.splitlines() if "PASSED" in line]
    assert began == ["test_case_many_operations", "test_sanitizer", "test_short", "test_other"], ran.stdout
    sources = [*ROOT.glob("tests/gpu/*.py"), *ROOT.glob("src/tilewise/testing/*.py")]
    assert all(any(name in str(path) or name in path.read_text() for path in sources) for name in longest_first.LONGEST)
