"""Tests of unchanged kernels run in rotation by commit; tests of changed kernels, and all other tests, always run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tools import kernel_tests
from tools.families import FAMILIES, ROOT, Family

FILE = "tests/compile/test_toy.py"


def test_within_eight_commits_every_test_runs_once() -> None:
    tests = [(FILE, ("toy",))] * 19
    runs = [set(range(19)) - set(kernel_tests.waiting(tests, {"toy"}, turn)) for turn in range(5, 13)]
    assert all(2 <= len(run) <= 3 for run in runs)
    assert sorted(index for run in runs for index in run) == list(range(19))


def test_one_of_each_file_and_row_always_runs() -> None:
    tests = [(FILE, ("toy",)), (FILE, ("other",)), ("tests/compile/test_more.py", ("toy",))] * 3
    for turn in range(20):
        runs = set(range(9)) - set(kernel_tests.waiting(tests, {"toy", "other"}, turn))
        assert sorted(index % 3 for index in runs) == [0, 1, 2]


def test_what_changed_and_what_compiles_nothing_never_waits() -> None:
    tests = [(FILE, ("toy",)), (FILE, ("toy", "changed")), (FILE, ())] * 20
    waiting = kernel_tests.waiting(tests, {"toy"}, 0)
    assert {index % 3 for index in waiting} == {0}
    assert not kernel_tests.waiting(tests, set(), 0)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a row's kernel, the inputs of its tests, and a test."""
    for path in ("src/tilewise/ops/triton_toy.py", "src/tilewise/testing/toy.py", FILE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("value = 1\n")
    family = Family("toy", ("src/tilewise/ops/triton_*.py",), (), ("triton",), compiled=("toy",))
    monkeypatch.setitem(FAMILIES, "toy", family)
    return tmp_path


@pytest.mark.parametrize("path", ["src/tilewise/ops/triton_toy.py", "src/tilewise/testing/toy.py", FILE])
def test_kernels_inputs_and_tests_are_in_a_rows_key(toy: Path, path: str) -> None:
    def key() -> str:
        kernel_tests.key.cache_clear()
        return kernel_tests.key("toy", toy)

    before = key()
    (toy / path).write_text("# a word\nvalue = 1\n")
    assert key() == before
    (toy / path).write_text("value = 2\n")
    assert key() != before


def test_a_row_is_known_by_the_hash_of_today_alone() -> None:
    today = {row: kernel_tests.key(row) for row in kernel_tests.rows()}
    assert kernel_tests.unchanged(today) == set(kernel_tests.rows())
    assert kernel_tests.unchanged({**today, "merge": "of other sources"}) == set(kernel_tests.rows()) - {"merge"}
    assert kernel_tests.unchanged({}) == set()


@pytest.mark.parametrize("failing", ["", "tests/compile", "tests/interpret"])
def test_only_what_passed_is_noted(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, ran = tmp_path / "passed.json", []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=int(bool(failing) and failing in command), stdout="3.6.0\n")

    monkeypatch.setattr(kernel_tests, "TABLE", table)
    monkeypatch.setattr(kernel_tests, "read_table", lambda: json.loads(table.read_text()) if table.exists() else {})
    monkeypatch.setattr(subprocess, "run", run)
    assert kernel_tests.main([]) == (1 if failing else 0)
    noted = json.loads(table.read_text())["3.6.0"]
    assert (kernel_tests.INTERPRETER in noted) is (failing != "tests/interpret")
    assert ("merge" in noted) is (failing != "tests/compile")
    ran.clear()
    kernel_tests.main([])
    assert [path for command in ran for path in command if path.startswith("tests/")] == [failing] * bool(failing)


def test_the_interpreters_tests_are_of_all_kernels() -> None:
    assert kernel_tests.key(kernel_tests.INTERPRETER) != kernel_tests.key("merge")
    assert kernel_tests.INTERPRETER in kernel_tests.rows()


def test_a_version_with_nothing_of_today_goes() -> None:
    today = {"merge": kernel_tests.key("merge")}
    found = kernel_tests.note({"3.6.0": {**today, "norm": "a"}, "3.8.0": {"merge": "b"}}, "3.9.0", ["merge"])
    assert found == {"3.6.0": {**today, "norm": "a"}, "3.9.0": today}


class Item:
    """A collected test that compiles one row's kernels."""

    def __init__(self, number: int) -> None:
        self.name = f"test_it[{number}]"
        self.path = ROOT / FILE
        self.nodeid = f"{FILE}::{self.name}"
        self.callspec = SimpleNamespace(params={"variant": SimpleNamespace(row="toy"), "number": number})

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.compile.mark if name == "compile" else None


@pytest.mark.parametrize(("options", "args", "left"), [
    ({}, [], 2), ({"--all-kernels"}, [], 16), ({"--full"}, [], 16), ({}, [f"{FILE}::test_it[3]"], 16),
])  # fmt: skip
def test_pytest_leaves_out_what_waits(
    options: set[str], args: list[str], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_unchanged", lambda tests: {row for _, rows in tests for row in rows})
    config: Any = SimpleNamespace(
        getoption=lambda name: name in options or None,
        option=SimpleNamespace(keyword=""),
        args=args,
        stash={conftest.not_run: {}},
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    items: list[Any] = [Item(number) for number in range(16)]
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) == left
    assert config.stash[conftest.not_run].get("compile", 0) == 16 - left
