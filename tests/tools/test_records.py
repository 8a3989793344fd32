from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment, records
from benchmarks.environment import Environment
from benchmarks.records import RecordError, Writer
from tests.tools.samples import sample

ENVIRONMENT = Environment(
    device="NVIDIA H200", driver="1.0", torch="2.0", triton="3.0", commit="abc", command="python -m benchmarks x",
    date="2026-01-01T00:00:00Z",
)  # fmt: skip


def test_what_is_written_is_read_back_and_appending_keeps_earlier_lines(tmp_path: Path) -> None:
    first, second = sample(), sample(impl="flex", sources=None, peak_mib=12.5)
    path = records.append(first, tmp_path)
    before = path.read_text()
    assert records.append(second, tmp_path) == path == tmp_path / "h200" / "attention_forward.jsonl"
    assert path.read_text().startswith(before)
    assert records.read(path) == [first, second]
    assert list(records.read_all(tmp_path)) == [("h200", first), ("h200", second)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"p50_ms": None}, "p20_ms <= p50_ms"),
        ({"p20_ms": 5.0}, "p20_ms <= p50_ms"),
        ({"tflops": float("nan")}, "tflops"),
        ({"tflops": -1.0}, "tflops"),
        ({"tflops": True}, "tflops"),
        ({"impl": ""}, "impl"),
        ({"problem": {}}, "problem"),
        ({"count": 1.5}, "count"),
        ({"percent": -0.1}, "percent"),
        ({"tokens_per_s": -1.0}, "tokens_per_s"),
        ({"p99_ms": 2.9}, "p99_ms: 2.9 is less than 3.0"),
        ({"error": {"value": 1.0}}, "error"),
        ({"error": {"metric": "failure", "message": "out of memory"}}, "a failure has no times"),
        ({"error": {"metric": "not applicable", "message": "needs the dense layout"}}, "a failure has no times"),
        ({"p20_ms": None, "p50_ms": None, "p80_ms": None, "error": None}, "states no time"),
        ({"extra": 1}, "unknown keys"),
    ],
)
def test_the_schema_refuses(change: dict[str, Any], complaint: str) -> None:
    data = {**asdict(sample()), **change}
    with pytest.raises(RecordError, match=complaint):
        records.validate(data)


@pytest.mark.parametrize("key", sorted(records._KEYS - records._OPTIONAL))
def test_every_key_of_the_schema_is_required(key: str) -> None:
    data = asdict(sample())
    del data[key]
    with pytest.raises(RecordError, match=key):
        records.validate(data)


def test_an_invalid_record_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        records.append(sample(p20_ms=9.0), tmp_path)
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_a_share_is_a_result(tmp_path: Path) -> None:
    share = sample(p20_ms=None, p50_ms=None, p80_ms=None, error=None, percent=0.0)
    assert records.read(records.append(share, tmp_path)) == [share]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = records.append(sample(), tmp_path)
    path.write_text(path.read_text() + "{not json\n")
    with pytest.raises(RecordError, match=r"attention_forward\.jsonl:2"):
        records.read(path)


def test_merge_adds_what_is_new_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    records.append(sample(), here)
    records.append(sample(), there)
    records.append(sample(run="other"), there)
    assert (records.merge(there, here), records.merge(there, here)) == (1, 0)
    assert [record.run for _, record in records.read_all(here)] == ["r", "other"]


@pytest.mark.parametrize(
    ("device", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100sxm480gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("cpu: Some Processor, 2 cores", "cpu"),
    ],
)
def test_device_folders(device: str, slug: str) -> None:
    assert records.device_slug(device) == slug


def test_writer_stamps_one_run_and_keeps_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(ENVIRONMENT, method="events", ceilings=(694.123456, None), results=tmp_path)
    writer.write(
        "q", {"formula": "full"}, "tilewise.triton", times_ms=(1.0, 2.00000049, 3.0), includes="all", sources="f00"
    )
    writer.write(
        "q", {"formula": "full"}, "flex", error={"metric": "failure", "message": "out of memory"}, includes="all"
    )
    ours, flex = records.read(tmp_path / "h200" / "q.jsonl")
    assert ours.run == flex.run == writer.run
    assert (ours.p50_ms, ours.ceiling_tflops, ours.commit) == (2.0, 694.12, "abc")
    assert flex.failed
    assert not ours.failed
    assert "failed: out of memory" in capsys.readouterr().out


def test_records_name_a_commit_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_COMMIT", "7d2cdbc")
    assert environment.commit() == "7d2cdbc"
    monkeypatch.setenv("TILEWISE_COMMIT", "HEAD")
    with pytest.raises(ValueError, match="got 'HEAD', expected a commit id"):
        environment.commit()


def test_committed_records_are_valid_and_say_nothing_of_private_places() -> None:
    found = list(records.read_all())
    assert all(json.dumps(asdict(record)).find("/root/") == -1 for _, record in found)
    assert all(records.device_slug(record.device) == folder for folder, record in found)


def test_a_command_names_no_place_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["x", "--workers", "2", "--resume", "/somewhere/a", "--families", "b", "--out", "/c"]
    )
    assert environment.command().endswith(" --workers 2 --families b")
    monkeypatch.setattr("sys.argv", ["x", "engine", "--model", "random:tiny"])
    assert environment.command().endswith("engine --model random:tiny")
    monkeypatch.setattr("sys.argv", ["x", "engine", "--model", str(Path(__file__).parent), "--quick"])
    assert environment.command().endswith("engine --quick")
