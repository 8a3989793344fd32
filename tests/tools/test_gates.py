"""Every gate runs, whatever the others say, and one that fails says why."""

from __future__ import annotations

import sys

import pytest

from tools import gates


def test_all_run_and_one_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    toy = {
        "bad": (sys.executable, "-c", "raise SystemExit('a reason')"),
        "good": (sys.executable, "-c", "print('nothing to say')"),
        "worse": (sys.executable, "-c", "print('another'); raise SystemExit(2)"),
    }
    assert gates.run(toy) == ["bad", "worse"]
    said = capsys.readouterr().out
    assert "a reason" in said
    assert "another" in said
    assert "nothing to say" not in said
    assert said.count("FAILED") == 2
    assert said.count("passed") == 1


def test_every_generated_page_has_a_gate() -> None:
    checked = {part for command in gates.GATES.values() for part in command}
    assert {"mypy", "lint-imports", "tools.size_gate", "tools.readme", "benchmarks.report"} <= checked
    assert {"ruff", "check", "format"} <= checked
