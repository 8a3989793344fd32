"""The benchmark of what stands beside attention, on tiny problems on the CPU: who is compared, and how near all are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import neighbours
from tests.tools.running import quick
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_every_operation_is_compared_with_pytorch(tmp_path: Path) -> None:
    found = quick("neighbours", tmp_path)
    assert {record.question for record in found} == set(neighbours.QUESTIONS)
    for question in neighbours.QUESTIONS[:2]:
        named = {record.problem["operation"] for record in found if record.question == question}
        assert named == {*neighbours.SUBJECTS, "cross_entropy"}
    for record in found:
        assert record.error is not None
        assert record.error["value"] < 1e-6
        ours = record.impl == "tilewise.cpu"
        assert ours or record.impl in ("eager", "eager.float32_logits")
        folder = {"swiglu": "glu", "linear_cross_entropy": "cross_entropy"}.get(
            record.problem["operation"], record.problem["operation"].split(",")[0]
        )
        folder = "norm" if folder.endswith("_norm") else folder
        assert record.sources == (FAMILIES[f"{folder}_cpu"].hash() if ours else None)


def test_rates_count_what_must_be_read_and_written(tmp_path: Path) -> None:
    for record in quick("neighbours", tmp_path, "rms_norm", "cross_entropy"):
        tensors = {"rms_norm": (2, 3), "rms_norm, residual": (4, 4), "cross_entropy": (1, 2)}
        backward = record.question == "neighbours_backward"
        rows, width = (int(n) for n in record.problem["shape"].split(" × "))
        nbytes = tensors[record.problem["operation"]][backward] * rows * width * 4
        assert record.p50_ms is not None
        assert record.gbps == pytest.approx(nbytes / record.p50_ms / 1e6, rel=1e-3)
