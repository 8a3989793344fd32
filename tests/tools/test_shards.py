"""The plan of continuous integration: each test in a shard, each implementation in the first ones, no silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import kernel_tests, shards, support_matrix
from tools.families import ROOT
from tools.shards import Clock, Shard, Unit

UNITS = shards.units()
KNOWN = {tier: kernel_tests.rows() for tier in ("compile", "newest", "interpret")}  # no kernel has changed
NO_KERNEL_HERE = {"tilewise.ops.attention.gluon_mixed"}  # which no test without a GPU launches through its row


def budget() -> dict[str, int]:
    """Seconds by tier, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return {tier: int(seconds) for tier, seconds in re.findall(r"^\| (\w+) \| (\d+) s \|", text, re.MULTILINE)}


def test_every_test_file_is_measured_and_no_other() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    files = {file for file in files if not file.startswith("tests/gpu/")}
    measured = {unit.name.partition("::")[0] for unit in UNITS}
    assert measured == files, "python -m tools.shards --measure FILE ..."


def test_each_unit_is_in_one_shard_of_its_tier() -> None:
    planned = [(shard.tier, unit) for shard in shards.plan(UNITS, newest=True, known=KNOWN) for unit in shard.units]
    own = [(unit.tier, unit.name) for unit in UNITS]
    newest = [("newest", name) for tier, name in own if any(file in name for file in kernel_tests.OF_NEWEST)]
    assert len(newest) >= 5
    assert sorted(planned) == sorted(own + newest)
    assert "newest" not in {shard.tier for shard in shards.plan(UNITS, newest=False)}


def test_the_first_shards_run_every_implementation() -> None:
    rows = [row for operation in support_matrix.OPERATIONS for row in support_matrix.rows(operation)]
    first = [unit for shard in shards.plan(UNITS, newest=True, known=KNOWN) if shard.always for unit in shard.units]
    runs = set().union(*(unit.runs for unit in UNITS if unit.name in first))
    assert {row.module for row in rows} - runs <= NO_KERNEL_HERE


def test_the_plan_keeps_the_budget_of_each_tier() -> None:
    planned = dict.fromkeys(shards.TIERS, 0.0)
    for shard in shards.plan(UNITS, newest=True, known=KNOWN):
        planned[shard.tier] += shard.seconds + shards.START_S
    allowed = budget()
    assert set(planned) <= set(allowed)
    assert {tier: seconds for tier, seconds in planned.items() if seconds > allowed[tier]} == {}
    assert sum(allowed.values()) < 15 * 60, "of a quiet run, all of it"


def test_tests_of_unchanged_kernels_take_turns() -> None:
    units = [Unit("tests/compile/test_kernels.py", 80.0, frozenset(), frozenset({"merge", "norm"}))]
    all_of_it, part, some = (
        [shard.seconds for shard in shards.plan(units, newest=True, known={"compile": rows, "newest": rows})]
        for rows in ((), ("merge", "norm", "rope"), ("merge",))
    )
    assert all_of_it == some == [40.0, 40.0 * shards.NEWEST_SHARE]
    assert part == [seconds / kernel_tests.TURNS for seconds in all_of_it]


TOY = [Unit(f"tests/a/test_{n}.py", 60.0, frozenset({f"row{n % 2}"})) for n in range(6)]


def test_what_runs_most_new_implementations_a_second_is_first() -> None:
    quick = Unit("tests/b/test_quick.py", 1.0, frozenset({"row0", "row1"}))
    assert shards.every_implementation([*TOY, quick]) == [quick]
    assert [unit.name for unit in shards.every_implementation(TOY)] == ["tests/a/test_0.py", "tests/a/test_1.py"]


def test_each_commit_begins_elsewhere_and_what_was_left_out_comes_first() -> None:
    plan = [Shard("cpu", ("all",), 1.0, True), *(Shard("cpu", (name,), 1.0) for name in "abc")]
    orders = ["".join(shard.units[0] for shard in shards.in_order(plan, commits)[1:]) for commits in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]
    later = shards.in_order(plan, 0, [plan[3].name])
    assert [shard.units[0] for shard in later] == ["all", "c", "a", "b"]


def test_time_decides_what_is_left_out_but_never_the_first_shards() -> None:
    first, other = Shard("cpu", ("a",), 100.0, True), Shard("cpu", ("b",), 100.0)
    clock = Clock(300.0, 1.0)
    assert clock.fits(first)
    assert clock.fits(other)
    clock.took(first, 250.0)
    assert clock.fits(first)
    assert not clock.fits(other), "50 s are left"
    slow = Clock(300.0, 3.0)
    assert not slow.fits(other), "a slow machine is known before the first shard"
    found_slow = Clock(900.0, 1.0)
    found_slow.took(first, 600.0)
    assert not found_slow.fits(other), "others run beside this"


@pytest.mark.parametrize("left", [True, False])
def test_what_failed_and_what_was_left_out_is_named(
    left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for n, status in enumerate(("True", "False", "True")):
        (tmp_path / f"test_{n}.py").write_text(f"def test_it():\n    assert {status}\n")
    plan = [Shard("cpu", (str(tmp_path / f"test_{n}.py"),), 1.0, n == 0) for n in range(3)]
    monkeypatch.setattr(shards, "plan", lambda found, newest, known: plan)
    monkeypatch.setattr(shards, "LEFT_OUT", tmp_path / "state" / "left_out.json")
    monkeypatch.setattr(shards, "slowness", lambda: 1.0)
    monkeypatch.setattr(kernel_tests, "commits", lambda: 0)
    monkeypatch.setattr(
        shards, "command", lambda shard: ["python", "-c", f"exec(open({shard.units[0]!r}).read()); test_it()"]
    )
    status = shards.main(["--budget", "0" if left else "900"])
    said = capsys.readouterr().out
    assert status == (0 if left else 1)
    assert f"{1 if left else 3} of 3 shards ran, {0 if left else 1} failed" in said
    assert ("left out, no time" in said) is left
    assert ("FAILED: cpu: " in said) is not left
    assert (plan[1].name in shards.LEFT_OUT.read_text()) is left
