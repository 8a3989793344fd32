"""Benchmark records: JSON lines that are appended, checked against a schema, and never edited.

One line is one contender on one problem. Every document that states a measured number takes it from here.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, Environment

RESULTS = ROOT / "benchmarks" / "results"


class RecordError(ValueError):
    """A line that breaks the schema; the message names the file, the line and the key."""


@dataclass(frozen=True)
class Record:
    """One measured contender; None where something was not measured.

    Times are in milliseconds, rates in TFLOP/s and GB/s, memory in MiB, shares in percent.

    `p20_ms p50_ms p80_ms` are quantiles over single calls, as is `p99_ms` where there are many. `tokens_per_s` counts
    tokens of answers, `total_tokens_per_s` those of prompts too. `ceiling_tflops` and `ceiling_gbps` are this run's
    matrix product and copy. `error` is {"metric": str, "value": float} against the reference, or {"metric": "failure",
    "message": str} with no times where the contender could not do the problem ("not applicable" in the place of
    "failure" where it says so itself: one of our rows whose needs are not met). `includes` says what the time includes.
    `sources` is the hash of the kernel family's files (tools/families.py), None for contenders that are not ours.
    """

    run: str
    question: str
    problem: dict[str, Any]
    impl: str
    p20_ms: float | None
    p50_ms: float | None
    p80_ms: float | None
    tflops: float | None
    gbps: float | None
    ceiling_tflops: float | None
    ceiling_gbps: float | None
    error: dict[str, Any] | None
    includes: str
    commit: str
    sources: str | None
    device: str
    driver: str | None
    torch: str
    triton: str | None
    method: str
    command: str
    date: str
    peak_mib: float | None = field(default=None)
    count: int | None = field(default=None)
    percent: float | None = field(default=None)
    p99_ms: float | None = field(default=None)
    tokens_per_s: float | None = field(default=None)
    total_tokens_per_s: float | None = field(default=None)

    @property
    def failed(self) -> bool:
        """Whether the contender could not do the problem, or was never meant to."""
        return self.error is not None and self.error.get("metric") in NO_RESULT

    @property
    def steady(self) -> bool:
        """Whether who times it again may find the median: it is within half as much again of the fastest fifth, or it
        is that of many requests, which differ.
        """
        return self.p99_ms is not None or not self.p20_ms or not self.p50_ms or self.p50_ms <= 1.5 * self.p20_ms


NO_RESULT = ("failure", "not applicable")  # metrics of an `error` that has a message in the place of a value
_OPTIONAL_NUMBERS = {"peak_mib", "percent", "p99_ms", "tokens_per_s", "total_tokens_per_s"}
_OPTIONAL = {"count", *_OPTIONAL_NUMBERS}
_KEYS = {entry.name for entry in fields(Record)}
_NUMBERS = {"p20_ms", "p50_ms", "p80_ms", "tflops", "gbps", "ceiling_tflops", "ceiling_gbps", *_OPTIONAL_NUMBERS}
_TEXTS = {"run", "question", "impl", "includes", "commit", "device", "torch", "method", "command", "date"}
_NULLABLE_TEXTS = {"sources", "driver", "triton"}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RecordError(message)


def validate(data: dict[str, Any]) -> Record:
    """The record that `data` holds; RecordError names the first key that breaks the schema."""
    missing, unknown = sorted(_KEYS - _OPTIONAL - data.keys()), sorted(data.keys() - _KEYS)
    _require(not missing, f"missing keys {missing}")
    _require(not unknown, f"unknown keys {unknown}")
    for key in _TEXTS:
        _require(isinstance(data[key], str) and data[key] != "", f"{key}: expected a text, got {data[key]!r}")
    for key in _NULLABLE_TEXTS:
        _require(data[key] is None or isinstance(data[key], str), f"{key}: expected a text or null")
    for key in _NUMBERS:
        value = data.get(key)
        good = value is None or (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        )
        _require(good, f"{key}: expected a finite number >= 0 or null, got {value!r}")
    count = data.get("count")
    _require(count is None or type(count) is int, f"count: expected an integer or null, got {count!r}")
    _require(isinstance(data["problem"], dict) and bool(data["problem"]), "problem: expected an object with keys")
    times = [data["p20_ms"], data["p50_ms"], data["p80_ms"]]
    if any(time is not None for time in times):
        _require(None not in times and times == sorted(times), f"p20_ms <= p50_ms <= p80_ms does not hold: {times}")
    last = data.get("p99_ms")
    _require(last is None or (times[2] is not None and last >= times[2]), f"p99_ms: {last} is less than {times[2]}")
    error = data["error"]
    if error is not None:
        _require(isinstance(error, dict) and isinstance(error.get("metric"), str), "error: expected {metric, value}")
        if error["metric"] in NO_RESULT:
            _require(isinstance(error.get("message"), str) and times == [None] * 3, "error: a failure has no times")
        else:
            _require(isinstance(error.get("value"), int | float), "error: expected a numeric value")
    nothing = not any(value is not None for value in (*times, count, data.get("peak_mib"), data.get("percent")))
    _require(error is not None or not nothing, "the record states no time, count, memory, share or failure")
    return Record(**data)


def read(path: Path) -> list[Record]:
    """All records of one file, in the order they were written; RecordError names the line that breaks the schema."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(validate(json.loads(line)))
        except (ValueError, TypeError) as problem:
            raise RecordError(f"{path}:{number}: {problem}") from problem
    return found


def read_all(results: Path = RESULTS) -> Iterator[tuple[str, Record]]:
    """(device folder, record) for every benchmark record under `results`; receipts are not records."""
    for path in sorted(results.glob("*/*.jsonl")):
        if path.name != "receipts.jsonl":
            for record in read(path):
                yield path.parent.name, record


def append(record: Record, results: Path = RESULTS) -> Path:
    """Validate `record` and add it to <results>/<device>/<question>.jsonl; returns that path."""
    data = asdict(record)
    for key in _OPTIONAL:
        if data[key] is None:
            del data[key]
    validate(json.loads(json.dumps(data)))
    path = results / device_slug(record.device) / f"{record.question}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(data, allow_nan=False) + "\n")
    return path


def merge(source: Path, results: Path = RESULTS) -> int:
    """Append what `results` lacks of `source`, a results folder from another machine; returns the number of lines."""
    added = 0
    for path in sorted(source.glob("*/*.jsonl")):
        if path.name != "receipts.jsonl":
            read(path)
        target = results / path.parent.name / path.name
        known = set(target.read_text(encoding="utf-8").splitlines()) if target.exists() else set()
        new = [line for line in path.read_text(encoding="utf-8").splitlines() if line not in known]
        if new:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("a", encoding="utf-8") as file:
                file.write("\n".join(new) + "\n")
        added += len(new)
    return added


def device_slug(device: str) -> str:
    """The results folder of a device: its name in lower case without the maker, "cpu" for every processor."""
    if device.lower().startswith("cpu"):
        return "cpu"
    words = [word for word in device.lower().replace("(", " ").replace(")", " ").split() if word != "nvidia"]
    return "-".join("".join(letter for letter in word if letter.isalnum()) for word in words)


class Writer:
    """Appends the records of one process run: holds its id, machine, method, command and ceilings."""

    def __init__(
        self, environment: Environment, *, method: str, ceilings: tuple[float | None, float | None], results: Path
    ) -> None:
        self.run = uuid.uuid4().hex[:12]
        self.environment, self.method, self.ceilings, self.results = environment, method, ceilings, results

    def write(
        self,
        question: str,
        problem: dict[str, Any],
        impl: str,
        *,
        times_ms: tuple[float, float, float] | None = None,
        tflops: float | None = None,
        gbps: float | None = None,
        error: dict[str, Any] | None = None,
        includes: str,
        sources: str | None = None,
        peak_mib: float | None = None,
        count: int | None = None,
        percent: float | None = None,
        p99_ms: float | None = None,
        tokens_per_s: float | None = None,
        total_tokens_per_s: float | None = None,
    ) -> Record:
        """Append one record and print it as a short line."""
        p20, p50, p80 = times_ms or (None, None, None)
        env = self.environment
        record = Record(
            run=self.run, question=question, problem=problem, impl=impl,
            p20_ms=_rounded(p20), p50_ms=_rounded(p50), p80_ms=_rounded(p80),
            tflops=_rounded(tflops), gbps=_rounded(gbps),
            ceiling_tflops=_rounded(self.ceilings[0]), ceiling_gbps=_rounded(self.ceilings[1]),
            error=error, includes=includes, commit=env.commit, sources=sources, device=env.device, driver=env.driver,
            torch=env.torch, triton=env.triton, method=self.method, command=env.command, date=env.date,
            peak_mib=_rounded(peak_mib), count=count, percent=_rounded(percent), p99_ms=_rounded(p99_ms),
            tokens_per_s=_rounded(tokens_per_s), total_tokens_per_s=_rounded(total_tokens_per_s),
        )  # fmt: skip
        append(record, self.results)
        print(_line(record), flush=True)
        return record


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more would be noise."""
    return None if value is None else float(f"{value:.5g}")


def _line(record: Record) -> str:
    problem = record.problem
    keys = (
        "part",
        "formula",
        "workload",
        "decoding",
        "caches",
        "change",
        "on",
        *(("seqlen_q",) if "part" in problem else ()),
    )
    what = " ".join(str(problem[key]) for key in keys if key in problem)
    parts = [f"{record.question:<20} {what:<18} {record.impl:<22}"]
    if record.failed and record.error is not None:
        verdict = "failed" if record.error["metric"] == "failure" else record.error["metric"]
        return parts[0] + f" {verdict}: {record.error['message'][:80]}"
    if record.p50_ms is not None:
        parts.append(f"{record.p50_ms:>10.4g} ms")
    if record.p99_ms is not None:
        parts.append(f"{record.p99_ms:>10.4g} ms of 99 %")
    if record.tokens_per_s is not None:
        parts.append(f"{record.tokens_per_s:>8.5g} tokens/s")
    if record.tflops is not None:
        parts.append(f"{record.tflops:>8.4g} TFLOP/s")
    if record.gbps is not None:
        parts.append(f"{record.gbps:>8.4g} GB/s")
    if record.peak_mib is not None:
        parts.append(f"{record.peak_mib:>8.4g} MiB")
    if record.count is not None:
        parts.append(f"{record.count:>6} counted")
    if record.percent is not None:
        parts.append(f"{record.percent:>8.4g} %")
    if record.error is not None:
        parts.append(f"{record.error['metric']} {record.error['value']:.2e}")
    return " ".join(parts)
