"""The benchmark of the commands that tune: whole processes are timed, and what they settled for is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import tuning
from tests.tools.running import quick
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_processes_are_timed_and_errors_kept(tmp_path: Path) -> None:
    found = quick("tuning", tmp_path, "dumps")
    assert [record.impl for record in found] == ["tilewise.tune_sparse", "tilewise.tune_quant"]
    assert [record.sources for record in found] == [FAMILIES[name].hash() for name in ("select_cpu", "quantize_cpu")]
    for record in found:
        assert record.p50_ms is not None
        assert record.error is not None
        assert record.p50_ms > 500.0, "a process takes that long to import PyTorch"
        assert 0.0 < record.error["value"] <= tuning.MOST
    assert found[0].error is not None
    assert "of the tiles computed" in found[0].error["metric"]


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="tune-sparse --json: tilewise: FILES"):
        tuning._process(["tune-sparse", "--json"])
