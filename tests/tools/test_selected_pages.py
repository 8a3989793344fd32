"""The benchmark of selected pages, at sizes that a CPU has done with in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.running import quick

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_every_selection_is_measured_beside_all_tokens(tmp_path: Path) -> None:
    found = quick("selected_pages", tmp_path)
    assert not any(record.failed for record in found)
    selected = ("pages", "pages_mean", "pages_summary", "tokens", "tokens_4bits", "tokens_4bits_16th")
    assert {record.impl for record in found} == {"tilewise.cpu_tiled", *(f"tilewise.cpu_tiled.{x}" for x in selected)}
    off = {record.impl: record.error["value"] for record in found if record.problem["tokens"] == 200}
    assert off["tilewise.cpu_tiled"] < 1e-6
    assert off["tilewise.cpu_tiled.pages_summary"] < off["tilewise.cpu_tiled.pages"]
