"""`tilewise bench`: attention and what stands beside it, timed beside PyTorch on tiny problems."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from tests.commands import call, data, refusal
from tilewise.explain.neighbours import LOSS, SUBJECTS


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


SMALL = ("--rows=6", "--width=512", "--classes=40", "--device=cpu", "--seconds=0.01")


def test_bench_neighbours_counts_the_fewest_bytes() -> None:
    found = data("bench", "neighbours", *SMALL)
    fewest = {
        name: (subject.forward, subject.backward) for name, subject in (*SUBJECTS.items(), ("cross_entropy", LOSS))
    }
    assert [row["operation"] for row in found["rows"][::4]] == [*fewest, "linear_cross_entropy"]
    for row in found["rows"]:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["impl"] in ("tilewise.cpu", "eager")
        assert (row["difference"] is None) == (row["impl"] == "eager")
        assert row["difference"] is None or row["difference"] < 1e-4
        assert row["share"] == pytest.approx(row["gbps"] / found["copy_gbps"])
        if row["direction"] == "step":
            assert row["shape"] == [6, 512, 40]
            nbytes = 2 * 4 * (6 + 40) * 512
        else:
            assert row["shape"] == [6, 40 if row["operation"] == "cross_entropy" else 512]
            halves = 2 if row["operation"] == "swiglu" else 1
            nbytes = fewest[row["operation"]][row["direction"] == "backward"] * halves * 4 * math.prod(row["shape"])
        assert row["gbps"] == pytest.approx(nbytes / row["p50_ms"] / 1e6)
    ours, eager = found["rows"][:2]
    assert ours["speedup"] == pytest.approx(eager["p50_ms"] / ours["p50_ms"])
    assert eager["speedup"] == 1


def test_bench_neighbours_prints_a_table_of_what_was_asked_for() -> None:
    lines = call("bench", "neighbours", *SMALL, "-o", "softmax", "--operation", "rms_norm", "--dtype=bf16").splitlines()
    assert lines[0].startswith("bf16 on cpu, copy ")
    assert "of copy" in lines[1]
    assert [line.split("  ")[0] for line in lines[2::4]] == ["rms_norm", "rms_norm, residual", "softmax"]
    assert len(lines) == 2 + 3 * 4


def test_bench_neighbours_compiles_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("bench", "neighbours", *SMALL, "-o", "swiglu", "-o", "linear_cross_entropy", "--compile")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = data(*command)["rows"]
    assert [row["impl"] for row in found] == 3 * ["tilewise.cpu", "eager", "compile"]
    assert all(row["difference"] < 1e-5 for row in found if row["impl"] == "compile")
    broken = functools.partial(torch.compile, backend=lambda graph, inputs: None)
    monkeypatch.setattr(torch, "compile", lambda plain, dynamic: broken(plain))
    assert "leave --compile out" in refusal(*command)


def test_bench_neighbours_refuses() -> None:
    assert "--width" in refusal("bench", "neighbours", "--width", "500")
    assert "Error" in refusal("bench", "neighbours", "-o", "attention")
    assert "options of neighbours behind its name" in refusal("bench", "--seqlen", "64", "neighbours")


def test_bench_neighbours_says_what_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.nn.functional, "silu", full)
    assert "a problem that fits" in refusal("bench", "neighbours", *SMALL, "-o", "swiglu")
