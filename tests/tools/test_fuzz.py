"""The fuzzer: a fixed set of its cases passes, faults on purpose are found, and workers that die or hang are told."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.environment import ROOT, current
from tools.fuzz import __main__ as command
from tools.fuzz import twins
from tools.fuzz.draw import Draw, Name
from tools.fuzz.exact import Rules, survivors
from tools.fuzz.judge import judge
from tools.fuzz.kinds import KINDS, builder, kind_of
from tools.fuzz.report import Finding, Kept, Tally
from tools.fuzz.workers import Fleet, Plan, run_one

SEED = "tests"
# Names of cases of SEED that fail for a fault of the library that is known, each with what it is.
KNOWN: dict[str, str] = {}


@functools.cache
def names_by_kind() -> dict[str, list[Name]]:
    """The first cases of each kind, five for each time that it is drawn, six at least."""
    found: dict[str, list[Name]] = {kind: [] for kind in KINDS}
    for case in range(4000):
        name = Name(SEED, 0, case)
        kind = kind_of(Draw(name, "cpu", small=True))
        if len(found[kind]) < max(6, 5 * KINDS[kind][0]):
            found[kind].append(name)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_cases(kind: str) -> None:
    """Again: `python -m tools.fuzz --device cpu --small --replay NAME`."""
    verdicts = Counter[str]()
    failures = []
    for name in names_by_kind()[kind]:
        if str(name) in KNOWN:
            continue
        found = judge(builder(name, "cpu", small=True)[1])
        verdicts[found.verdict] += 1
        if found.verdict == "failed":
            failures.append(f"{name}: {found.text}")
    assert not failures, "\n".join(failures)
    assert verdicts["ok"] > verdicts["refused"]


@pytest.mark.parametrize("kind", KINDS)
def test_faults_on_purpose_are_found(kind: str) -> None:
    assert sum(kind in twin.kinds for twin in twins.TWINS) >= 2
    assert twins.check(kinds=(kind,)) == []


def test_what_raises_has_failed_and_what_is_refused_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewise as tw

    def breaks(*args: object, **given: object) -> None:
        raise RuntimeError("broken")

    def refuses(*args: object, **given: object) -> None:
        tw.attention(torch.zeros(1), torch.zeros(1), torch.zeros(1))

    build = twins.of_kind("softmax", 0, "cpu")
    for name in ("softmax", "log_softmax"):
        monkeypatch.setattr(tw, name, breaks)
    found = judge(build)
    assert found.verdict == "failed"
    assert "raised RuntimeError: broken" in found.text
    for name in ("softmax", "log_softmax"):
        monkeypatch.setattr(tw, name, refuses)
    found = judge(twins.of_kind("softmax", 0, "cpu"))
    assert found.verdict == "refused"
    assert found.reason.startswith("InputError q")


def test_a_name_is_all_that_a_case_depends_on() -> None:
    for case in (0, 7, 40):
        name = Name("again", 2, case)
        assert Name.of(str(name)) == name
        one, two = (builder(name, "cpu", small=True)[1]() for _ in range(2))
        assert one.text == two.text
        for x, y in zip(one.inputs.values(), two.inputs.values(), strict=True):
            assert torch.equal(x.double().nan_to_num(), y.double().nan_to_num())


def test_dropout_leaves_about_as_many_as_it_says() -> None:
    kept = survivors(Rules(1.0, dropout=0.25, seed=3), 1, 4, torch.arange(-5, 95)[:, None], 101)
    assert kept.shape == (4, 100, 101)
    assert abs(float(kept.double().mean()) - 0.75) < 0.01
    assert not torch.equal(kept[0], kept[1])


FAKE = """
import json, sys, time
plan, worker, first = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def say(**what):
    print(json.dumps(what), flush=True)
if first == 0:
    say(name=f"{plan['seed']}:{worker}:0", stage="dense")
    ENDS
say(finding={"name": f"{plan['seed']}:{worker}:{first}", "kind": "norm", "verdict": "ok", "reason": "", "text": ""})
say(finished=True)
"""


def fleet(ends: str, hang_s: float = 600.0) -> Fleet:
    plan = Plan("fake", "cpu", seconds=3600.0, jobs=1, hang_s=hang_s)
    return Fleet(plan, [sys.executable, "-c", FAKE.replace("ENDS", ends)])


def test_a_worker_that_dies_has_failed_and_another_goes_on_behind_it() -> None:
    found = list(fleet("sys.exit('gone')").findings())
    assert [(one.name, one.kind, one.verdict) for one in found] == [
        ("fake:0:0", "dense", "failed"),
        ("fake:0:1", "norm", "ok"),
    ]
    assert "gone" in found[0].text


def test_a_worker_goes_on_anew_where_a_case_has_broken_the_gpu() -> None:
    text = {"name": "fake:0:0", "kind": "dense", "verdict": "failed", "reason": "", "text": "CUDA error: gone"}
    found = list(fleet(f"say(finding={text}); sys.exit()").findings())
    assert [(one.name, one.verdict) for one in found] == [("fake:0:0", "failed"), ("fake:0:1", "ok")]


def test_a_worker_that_hangs_has_failed() -> None:
    hung = fleet("time.sleep(10**6)", hang_s=2.0)
    found = next(hung.findings())
    hung.stop()
    assert found.verdict == "failed"
    assert "no progress" in found.text


def is_a_record(record: dict[str, Any]) -> None:
    """A run of the fuzzer: what was asked for, what came of it, and where."""
    kinds: dict[str, Any] = {
        "seed": str, "on": str, "jobs": int, "small": bool, "only": list, "seconds": float, "cases": dict,
        "failures": list, "refusals": dict, "device": str, "driver": (str, type(None)), "torch": str,
        "triton": (str, type(None)), "commit": str, "command": str, "date": str,
    }  # fmt: skip
    assert record.keys() == kinds.keys()
    assert all(isinstance(record[name], kind) for name, kind in kinds.items()), record
    for verdicts in record["cases"].values():
        assert verdicts.keys() <= {"ok", "refused", "failed"}
        assert all(type(count) is int for count in verdicts.values())
    for failure in record["failures"]:
        assert failure.keys() == {"name", "kind", "text"}
        assert str(Name.of(failure["name"])) == failure["name"]


def test_what_is_recorded_are_records() -> None:
    for line in command.RECORDS.read_text().splitlines() if command.RECORDS.exists() else []:
        is_a_record(json.loads(line))


def test_a_record_names_no_place_of_a_machine() -> None:
    tally = Tally()
    tally.add(Finding("a:0:0", "norm", "failed", "", f"File {ROOT}/tools/x.py, {sys.prefix}/lib/torch.py"))
    record = tally.record(
        {"seed": "a", "on": "cpu", "jobs": 1, "small": False, "only": []}, 1.0, current("cpu")
    )  # fmt: skip
    is_a_record(record)
    assert record["failures"] == [{"name": "a:0:0", "kind": "norm", "text": "File tools/x.py, lib/torch.py"}]


def test_workers_run_cases_and_what_they_found_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, out, records = (tmp_path / name for name in ("kept.jsonl", "out.jsonl", "results/fuzz.jsonl"))
    given = ["--seed", "w", "--device", "cpu", "--small", "--jobs", "1", "--seconds", "3600", "--cases", "6"]
    given += ["--no-twins", "--resume", str(kept), "--out", str(out), "--record", "--only", "norm", "glu", "rope"]
    monkeypatch.setattr(command, "RECORDS", records)
    monkeypatch.setattr(sys, "argv", ["fuzz", *given])
    assert command.main() == 0
    assert records.read_text() == out.read_text()
    record = json.loads(out.read_text())
    is_a_record(record)
    assert sum(count for verdicts in record["cases"].values() for count in verdicts.values()) == 6
    assert (record["seed"], record["on"], record["jobs"], record["small"]) == ("w", "cpu", 1, True)
    assert record["failures"] == []
    assert "--seed w" in record["command"]
    assert str(tmp_path) not in out.read_text()
    again = Kept(kept, json.loads(kept.read_text().splitlines()[0]))
    assert again.first_of(0) == max(Name.of(found.name).case for found in again.found) + 1
    assert again.first_of(1) == 0
    assert Kept(kept, {"seed": "other"}).found == []
    assert command.main(["--device", "cpu", "--small", "--replay", again.found[0].name]) == 0
    assert "ok" in capsys.readouterr().out


def test_only_says_which_kinds_run() -> None:
    plan = Plan(SEED, "cpu", 1.0, 1, only=("rope",), small=True)
    found = [run_one(Name(SEED, 0, case), plan) for case in range(60)]
    assert {one.kind for one in found if one is not None} <= {"rope"}


def test_a_tally_counts_by_kind_and_reason() -> None:
    tally = Tally()
    for found in (
        Finding("a:0:0", "dense", "ok"),
        Finding("a:0:1", "dense", "refused", "InputError q: a tensor"),
        Finding("a:0:2", "norm", "failed", "", "o is off by 1.2e-3 :: norm 3 x 4"),
    ):
        tally.add(found)
    assert tally.cases == 3
    assert tally.by_kind() == {"dense": {"ok": 1, "refused": 1}, "norm": {"failed": 1}}
    assert [found.name for found in tally.failures] == ["a:0:2"]
    assert tally.failures[0].likeness == Finding("b", "norm", "failed", "", "o is off by 7 :: norm 1 x 1").likeness
    assert any("dense: InputError q: a tensor" in line for line in tally.lines())
