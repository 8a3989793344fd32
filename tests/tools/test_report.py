from __future__ import annotations

from pathlib import Path

from benchmarks import report
from benchmarks.records import append
from tests.tools.samples import sample
from tools.families import FAMILIES


def _fill(results: Path) -> None:
    problem = {"formula": "causal", "seqlen_q": 8192, "head_dim": 128}
    append(sample(run="old", problem=problem, p20_ms=9.0, p50_ms=9.0, p80_ms=9.0), results)
    new = {"run": "new", "problem": problem, "date": "2026-02-01T00:00:00Z"}
    append(sample(**new, p50_ms=2.0, tflops=500.0), results)
    append(sample(**new, impl="flex", sources=None, p50_ms=2.5, tflops=400.0, error=None), results)
    failure = {"metric": "failure", "message": "OutOfMemoryError: 17 GB"}
    append(
        sample(**new, impl="fa2", p20_ms=None, p50_ms=None, p80_ms=None, tflops=None, sources=None, error=failure),
        results,
    )


def test_the_newest_run_is_shown_side_by_side_with_the_ratio(tmp_path: Path) -> None:
    _fill(tmp_path)
    text = report.generate(tmp_path, tmp_path / "plots")
    assert (
        "| causal, 8,192 tokens | **2.00 ms**, 500 TFLOP/s "
        "| fails: OutOfMemoryError: 17 GB | 2.50 ms, 400 TFLOP/s | 1.25 |" in text
    )
    assert "9 ms" not in text
    assert "head_dim 128" in text
    assert "1.0e-03 (tilewise.triton" in text


def test_report_and_plots_are_the_same_bytes_twice(tmp_path: Path) -> None:
    _fill(tmp_path)
    texts = [report.generate(tmp_path, tmp_path / name) for name in ("one", "two")]
    assert texts[0] == texts[1]
    plots = [sorted((tmp_path / name).glob("*.svg")) for name in ("one", "two")]
    assert [path.name for path in plots[0]] == ["h200-attention_forward.svg"]
    assert plots[0][0].read_bytes() == plots[1][0].read_bytes()


def test_records_of_other_sources_are_marked(tmp_path: Path) -> None:
    append(sample(), tmp_path / "old")
    append(sample(sources=FAMILIES["attention_triton"].hash()), tmp_path / "new")
    texts = {name: report.generate(tmp_path / name, tmp_path / "plots") for name in ("old", "new")}
    assert {name: "other sources than today's" in text for name, text in texts.items()} == {"old": True, "new": False}


def test_no_ratio_without_a_peer(tmp_path: Path) -> None:
    append(sample(), tmp_path)
    assert "x peer" not in report.generate(tmp_path, tmp_path / "plots").split("###")[1]


def test_a_bar_in_a_formula_does_not_split_the_row(tmp_path: Path) -> None:
    append(sample(problem={"formula": "causal | prefix"}), tmp_path)
    assert "| causal \\| prefix |" in report.generate(tmp_path, tmp_path / "plots")


def test_without_records_the_report_says_so(tmp_path: Path) -> None:
    assert "No records yet" in report.generate(tmp_path, tmp_path / "plots")
