"""`tilewise bench` and `tilewise bench neighbours`: what they time, and that both sides compute the same."""

from __future__ import annotations

import pytest

from tests.commands import call, data, refusal
from tilewise.explain.neighbours import NEIGHBOURS


def test_bench_times_both_and_finds_them_equal() -> None:
    shape = ("--seqlen=48", "--seqlen=64", "--heads-q=4", "--heads-kv=2", "--head-dim=16")
    found = data("bench", *shape, "--mask=causal & window(8)", "--device=cpu", "--seconds=0.01")
    assert [row["direction"] for row in found["rows"]] == 2 * ["forward", "forward", "backward", "backward"]
    assert [row["impl"] for row in found["rows"]][:2] == ["tilewise.cpu_tiled", "torch"]
    pairs = 4 * sum(min(8, i + 1) for i in range(48))
    for row, flops in zip(found["rows"][:4], (4, 4, 10, 10), strict=True):
        assert row["tflops"] == pytest.approx(flops * pairs * 16 / row["p50_ms"] / 1e9)
    for row in found["rows"]:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["difference"] is None or row["difference"] < 1e-5


def test_bench_prints_a_table() -> None:
    options = ("--seqlen=32", "--head-dim=8", "--mask=causal", "--device=cpu", "--seconds=0.01", "--direction=forward")
    lines = call("bench", *options).splitlines()
    assert lines[0] == "batch 1, 8 query heads of 8, fp32 on cpu, mask causal"
    assert "median ms" in lines[1]
    assert len(lines) == 4


def test_bench_times_neighbours_and_finds_them_equal() -> None:
    sizes = ("--rows=24", "--width=512", "--classes=96", "--device=cpu", "--seconds=0.01")
    found = data("bench", "neighbours", *sizes)
    rows = found["rows"]
    assert {row["operation"] for row in rows} == set(NEIGHBOURS)
    for row in rows:
        loss = row["operation"] == "cross_entropy"
        assert (row["rows"], row["width"]) == ((128, 96) if loss else (24, 512))
        numbers = (2 if row["operation"] == "swiglu" else 1) * 24 * 512
        tensors = getattr(NEIGHBOURS[row["operation"]], row["direction"])
        assert row["gbps"] == pytest.approx(4 * numbers * tensors / row["p50_ms"] / 1e6)
        assert row["of_copy"] == pytest.approx(row["gbps"] / found["copy_gbps"])
        assert (row["difference"] is None) == (row["impl"] == "torch")
        assert row["difference"] is None or row["difference"] < 1e-4
    chosen = data("bench", "neighbours", "-o", "rope", "--impl=reference", *sizes)["rows"]
    assert [row["impl"] for row in chosen] == 2 * ["tilewise.reference", "torch"]


def test_bench_neighbours_prints_a_table() -> None:
    options = ("--operation=swiglu", "--rows=8", "--width=64", "--device=cpu", "--seconds=0.01")
    lines = call("bench", "neighbours", *options).splitlines()
    assert lines[0].startswith("fp32 on cpu, where a copy moves ")
    assert "of a copy" in lines[1]
    assert len(lines) == 6
    assert "Example: tilewise bench neighbours" in " ".join(call("bench", "neighbours", "--help").split())
    assert "impl" in refusal("bench", "neighbours", "--impl=nothing", *options)
