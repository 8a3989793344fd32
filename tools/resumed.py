"""Tests that runs of the same code have passed before they were cut short, and a pytest plugin that leaves them out."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.families import ROOT, Family

if TYPE_CHECKING:  # which imports PyTorch
    from benchmarks.environment import Environment

LEFT_OUT = "TILEWISE_LEFT_OUT"  # the environment variable that tells pytest's processes where the names are
TESTS = ("tests/gpu/*.py", "tests/*.py", "src/tilewise/testing/*.py")


def name_of(location: tuple[str, int | None, str]) -> str:
    """A test's name by what pytest calls its location: the same in all of xdist's processes."""
    file, _, test = location
    return f"{file}::{test}"


def state_of(chosen: Iterable[Family], environment: Environment, root: Path = ROOT) -> str:
    """A digest of what a test that passed says something about: kernels, tests, device and versions."""
    families = {family.name: family.hash(root) for family in (*chosen, Family("tests", TESTS, (), ()))}
    versions = (environment.device, environment.driver, environment.torch, environment.triton)
    return hashlib.sha256(repr((sorted(families.items()), versions)).encode()).hexdigest()[:12]


class Passed:
    """A file of names, one line each, of which those of one state count."""

    def __init__(self, path: Path, state: str) -> None:
        self.path, self.state = path, state
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not text.endswith("\n") and text:  # cut short while a line was written
            path.write_text(text + "\n", encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        self.names = {line["test"] for line in found if line["state"] == state}

    def add(self, name: str) -> None:
        """Write the name at once: nobody knows when a run is cut short."""
        if name not in self.names:
            self.names.add(name)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"state": self.state, "test": name}) + "\n")

    def leave_out(self) -> list[str]:
        """Options with which pytest, started by this process, leaves them out: those that are known now."""
        known = self.path.with_suffix(".known")
        known.write_text("\n".join(sorted(self.names)), encoding="utf-8")
        os.environ[LEFT_OUT] = str(known)
        return ["-p", __name__]


class Noting:
    """A pytest plugin that notes which tests pass, tear-down included."""

    def __init__(self, passed: Passed) -> None:
        self.passed = passed
        self._ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = name_of(report.location)
        if report.passed and report.when == "call":
            self._ran.add(name)
        elif report.passed and report.when == "teardown" and name in self._ran:
            self.passed.add(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that the file names."""
    names = set(Path(os.environ[LEFT_OUT]).read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if name_of(item.location) in names])
    items[:] = [item for item in items if name_of(item.location) not in names]
