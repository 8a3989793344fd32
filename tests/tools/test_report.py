from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.records import append
from tests.tools.samples import sample
from tools.families import FAMILIES


def _fill(results: Path) -> None:
    problem = {"formula": "causal", "seqlen_q": 8192, "head_dim": 128}
    append(sample(run="old", problem=problem, p20_ms=9.0, p50_ms=9.0, p80_ms=9.0), results)
    new = {"run": "new", "problem": problem, "date": "2026-02-01T00:00:00Z"}
    append(sample(**new, p20_ms=1.9, p50_ms=2.0, tflops=500.0), results)
    append(sample(**new, impl="flex", sources=None, p20_ms=2.4, p50_ms=2.5, tflops=400.0, error=None), results)
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


GRID = {"batch": 4, "seqlen_q": 4096, "num_heads_q": 16, "num_heads_kv": 16, "head_dim": 128, "causal": True}


def _fill_grid(results: Path, problem: dict[str, Any], times: dict[str, float]) -> None:
    for impl, time in times.items():
        record = sample(
            question="exact_forward", problem=problem, impl=impl, p20_ms=time, p50_ms=time, p80_ms=time,
            tflops=1000 / time, ceiling_tflops=800.0, sources=None,
        )  # fmt: skip
        append(record, results)


def test_the_grid_compares_our_best_row_with_the_best_peer(tmp_path: Path) -> None:
    times = {"tilewise.triton": 4.0, "tilewise.hopper": 2.5, "cudnn": 3.0, "fa2": 5.0, "fa4": 2.0}
    _fill_grid(tmp_path, GRID, times)
    text = report.generate(tmp_path, tmp_path / "plots")
    assert "|  | tilewise.hopper | tilewise.triton | cudnn | fa2 | fa4 | x peer |" in text
    row = next(line for line in text.splitlines() if line.startswith("| D 128"))
    assert row.split(" | ")[0] == "| D 128, 16 heads, causal, 4 × 4,096 tokens"
    assert row.split(" | ")[1] == "2.50 ms, 400 TFLOP/s (50 %)"
    assert row.split(" | ")[-1] == "0.80 |"  # 2.0 / 2.5


def test_the_grids_rows_have_their_order_and_one_of_ours_may_not_apply(tmp_path: Path) -> None:
    packed = {"batch": 32, "total": 65536, "num_heads_q": 16, "num_heads_kv": 16, "head_dim": 128, "causal": True}
    problems = [packed, GRID | {"num_heads_q": 32, "num_heads_kv": 8}, GRID, GRID | {"head_dim": 64}]
    for problem in [*problems, GRID | {"causal": False}, GRID | {"seqlen_q": 512, "batch": 32}]:
        _fill_grid(tmp_path, problem, {"tilewise.triton": 3.0, "fa4": 2.0})
    refusal = {"metric": "not applicable", "message": "UnsupportedError: needs the dense layout"}
    none: dict[str, Any] = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms", "tflops", "sources"))
    append(sample(question="exact_forward", problem=packed, impl="tilewise.hopper", error=refusal, **none), tmp_path)
    text = report.generate(tmp_path, tmp_path / "plots")
    rows = [line for line in text.splitlines() if line.startswith("| D ")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| D 64, 16 heads, causal, 4 × 4,096 tokens",
        "| D 128, 16 heads, full, 4 × 4,096 tokens",
        "| D 128, 16 heads, causal, 32 × 512 tokens",
        "| D 128, 16 heads, causal, 4 × 4,096 tokens",
        "| D 128, 32 heads on 8, causal, 4 × 4,096 tokens",
        "| D 128, 16 heads, causal, 32 documents packed, 65,536 tokens",
    ]
    assert rows[-1].split(" | ")[1:] == [
        "not applicable", "3.00 ms, 333 TFLOP/s (42 %)", "**2.00 ms**, 500 TFLOP/s (62 %)", "0.67 |",
    ]  # fmt: skip


def test_the_grids_plot_is_the_same_bytes_twice(tmp_path: Path) -> None:
    for causal in (False, True):
        for seqlen in (512, 4096):
            _fill_grid(tmp_path, GRID | {"causal": causal, "seqlen_q": seqlen}, {"tilewise.triton": 3.0, "fa4": 2.0})
    for name in ("one", "two"):
        report.generate(tmp_path, tmp_path / name)
    plots = [tmp_path / name / "h200-exact_forward.svg" for name in ("one", "two")]
    assert plots[0].read_bytes() == plots[1].read_bytes()
    assert all(text in plots[0].read_text() for text in ("D 128, full", "D 128, causal", "fa4", "matrix product"))


def test_records_of_other_sources_are_marked(tmp_path: Path) -> None:
    append(sample(), tmp_path / "old")
    append(sample(sources=FAMILIES["attention_triton"].hash()), tmp_path / "new")
    texts = {name: report.generate(tmp_path / name, tmp_path / "plots") for name in ("old", "new")}
    assert {name: "other instructions than today's" in text for name, text in texts.items()} == {
        "old": True,
        "new": False,
    }


def test_no_ratio_without_a_peer(tmp_path: Path) -> None:
    append(sample(), tmp_path)
    assert "x peer" not in report.generate(tmp_path, tmp_path / "plots").split("###")[1]


def test_a_bar_in_a_formula_does_not_split_the_row(tmp_path: Path) -> None:
    append(sample(problem={"formula": "causal | prefix"}), tmp_path)
    assert "| causal \\| prefix |" in report.generate(tmp_path, tmp_path / "plots")


def test_without_records_the_report_says_so(tmp_path: Path) -> None:
    assert "No records yet" in report.generate(tmp_path, tmp_path / "plots")
