"""The benchmark of selected tiles, at sizes that a CPU has done with in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import sparse
from tests.tools.running import quick
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_every_part_is_measured_beside_all_tiles(tmp_path: Path) -> None:
    found = quick("sparse", tmp_path)
    assert {record.question for record in found} == set(sparse.QUESTIONS)
    assert not any(record.failed for record in found)
    for question, impls in (
        (sparse.FORWARD, {"tilewise.cpu_tiled.selected", "tilewise.cpu_tiled.dense"}),
        (sparse.BACKWARD, {"tilewise.cpu_tiled.selected", "tilewise.cpu_tiled.dense"}),
        (sparse.CHOICE, {
            "tilewise.cpu.choice",
            *(f"tilewise.cpu.{what}{more}" for what in ("codes", "codes_choice") for more in ("", "_blocks")),
            *(f"tilewise.{row}.dense" for row in ("cpu_tiled", "cpu_codes")),
        }),
        (sparse.WHOLE, {
            *(f"tilewise.{row}.{what}" for row in ("cpu_tiled", "cpu_codes") for what in ("dense", "selected")),
            "tilewise.cpu_tiled.summary",
        }),
        (sparse.SLIDING, {
            *(f"tilewise.{row}.sliding" for row in ("cpu_tiled", "cpu_codes")),
            *(f"tilewise.cpu_codes.sliding_int8{more}" for more in ("", "_blocks")),
            "tilewise.cpu_tiled.dense", "sdpa",
        }),
    ):  # fmt: skip
        assert {record.impl for record in found if record.question == question} == impls
    for record in (record for record in found if record.impl != "sdpa"):
        of = {"choice": "select_cpu", "codes": "quantize_cpu", "codes_choice": "quantize_cpu"}
        family = "attention_codes_cpu" if "cpu_codes" in record.impl else "attention_cpu"
        assert record.sources == FAMILIES[of.get(record.impl.split(".")[-1].removesuffix("_blocks"), family)].hash()
        if record.question in (sparse.FORWARD, sparse.BACKWARD) and record.impl.endswith("selected"):
            assert record.error is not None
            assert record.error["value"] < 1e-5
    rates = {record.problem["formula"]: record for record in found if record.question == sparse.FORWARD}
    assert set(rates) == {"10% of the tiles", "100% of the tiles"}


def test_summaries_are_nearer_than_nothing(tmp_path: Path) -> None:
    found = {record.impl: record.error for record in quick("sparse", tmp_path, "local")}
    summary, dropped = (found[f"tilewise.cpu_tiled.{name}"] for name in ("summary", "selected"))
    assert summary is not None
    assert dropped is not None
    assert summary["value"] < 0.5 * dropped["value"]


def test_the_demos_model_has_thresholds_that_keep_the_error(tmp_path: Path) -> None:
    found = [record for record in quick("sparse", tmp_path, "demo") if record.impl == "tilewise.cpu_tiled.selected"]
    assert [record.problem["seqlen_q"] for record in found] == [160, 200]
    for record in found:
        assert record.problem["operation"] == "demo"
        assert record.error is not None
        assert 0.0 < record.error["value"] < 2 * sparse.MOST, "in relative L2, of all heads of a layer"
