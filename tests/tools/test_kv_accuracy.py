"""The errors of encoded caches: that they are measured, and what must be larger than what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import records
from benchmarks.__main__ import main
from benchmarks.cases import kv_accuracy
from tools.families import FAMILIES


def test_errors_are_shares() -> None:
    want = torch.tensor([3.0, -4.0])
    assert kv_accuracy.errors(want, want) == {"L2": 0.0, "largest": 0.0}
    assert kv_accuracy.errors(torch.tensor([3.0, -2.0]), want) == {"L2": pytest.approx(0.4), "largest": 0.5}


def test_draws_are_as_described() -> None:
    gaussian, channels, sparse = (kv_accuracy.drawn(name, 512) for name in kv_accuracy.DRAWN)
    means = [x[1].mean(0).abs() > 1.0 for x in (gaussian, channels)]
    assert not means[0].any()
    assert 1 <= means[1].sum() <= 8 * kv_accuracy.HEADS_KV
    for x, y in zip(gaussian, sparse, strict=True):
        assert x.abs().max() < 6 < y.abs().max()
        assert torch.equal(x, x.bfloat16().float())
    assert torch.equal(kv_accuracy.drawn("sparse", 512)[1], sparse[1])


def test_the_case_records_both_measures_of_every_kind(tmp_path: Path) -> None:
    assert main(["kv_accuracy", "--quick", "--out", str(tmp_path)]) == 0
    found = [record for _, record in records.read_all(tmp_path)]
    assert len(found) == 3 * 2 * 8
    by_name = {(record.problem["workload"], record.impl.removeprefix("tilewise.")): record.percent for record in found}
    for measure in ("L2", "largest"):
        errors = [by_name[f"gaussian, {measure}", kind] for kind in ("int8", "fp8", "int4")]
        assert errors == sorted(errors)
        assert 0 < errors[0] < 2 < errors[2]
        assert by_name[f"channels, {measure}", "int4.keys4"] < by_name[f"channels, {measure}", "int4"]
        assert by_name[f"gaussian, {measure}", "int4.keys4"] < by_name[f"gaussian, {measure}", "int4.keys2"]
        assert by_name[f"channels, {measure}", "int4.rotated"] < by_name[f"channels, {measure}", "int4"]
    assert {record.sources for record in found} == {FAMILIES["quant"].hash()}
