"""The pins of constraints.txt, without a network: one for each package and Python; and how faults of them are found."""

from __future__ import annotations

import re

import pytest

from tools import check_constraints
from tools.check_constraints import CONSTRAINTS, PYTHONS, faults, pins
from tools.families import ROOT

LINES = CONSTRAINTS.read_text().splitlines()


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_has_one_pin_for_a_python(python: str) -> None:
    found = pins(LINES, python)
    assert {name: versions for name, versions in found.items() if len(versions) != 1} == {}
    assert {"torch", "numpy", "triton", "pytest", "hatchling"} <= set(found)
    assert all(re.fullmatch(r"[\w.]+", versions[0]) for versions in found.values()), "an exact version"


def test_every_python_of_the_package_is_resolved() -> None:
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert [".".join(python.split(".")[:2]) for python in PYTHONS] == classifiers


def test_markers_choose_the_pin() -> None:
    lines = ["# a comment", "", "a==1; python_version < '3.11'", "A==2; python_version >= '3.11'  # why", "b==3"]
    assert pins(lines, "3.10") == {"a": ["1"], "b": ["3"]}
    assert pins(lines, "3.11.5") == {"a": ["2"], "b": ["3"]}
    assert pins([*lines, "a==4"], "3.13")["a"] == ["2", "4"]


def test_what_has_no_pin_and_what_is_not_used_is_named() -> None:
    taken = {"a": "1", "b": "2", "nvidia-cublas": "13"}
    assert faults(taken, {"a": ["1"], "c": ["3"]}) == ["b 2 has no pin", "c is pinned, not used"]
    assert faults(taken, {"a": ["1"], "b": ["2"]}) == []


def test_a_python_without_a_solution_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def resolved(python: str, constraints: object) -> dict[str, str]:
        if python == "3.10":
            raise RuntimeError("numpy has no wheel")
        return {name: versions[0] for name, versions in pins(LINES, python).items()}

    monkeypatch.setattr(check_constraints, "resolved", resolved)
    monkeypatch.setattr(check_constraints.shutil, "which", lambda name: name)
    assert check_constraints.main(["3.12", "3.13"]) == 0
    assert check_constraints.main(["3.10", "3.12"]) == 1
    said = capsys.readouterr().out
    assert "Python 3.10: numpy has no wheel" in said
    assert "Python 3.12: resolved" in said
