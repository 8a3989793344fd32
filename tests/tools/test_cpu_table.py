"""The table of formulas on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.records import RESULTS
from tools.cpu_table import table


def test_a_cell_is_the_range_of_the_peers_time_over_ours(tmp_path: Path) -> None:
    source = RESULTS / "cpu" / "cpu_formula_forward.jsonl"
    times = {"tilewise.cpu": 2.0, "sdpa": 1.0, "eager": 3.0, "sdpa.zero_bias": 9.0}
    lines = []
    for line in source.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        time = times[record["impl"]] * (3.0 if record["impl"] == "sdpa" and record["problem"]["head_dim"] == 128 else 1)
        lines.append(json.dumps(record | {"p20_ms": time, "p50_ms": time, "p80_ms": time}))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / source.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = table(tmp_path)
    assert "| alibi | forward | 0.50–1.50 | 0.50–1.50 | 0.50–1.50 | 0.50–1.50 |" in text
    assert "| softcap | forward | 1.50–1.50 | 1.50–1.50 |" in text
    assert "| alibi | forward and backward |  |  |  |  |" in text  # no such records


def test_without_records(tmp_path: Path) -> None:
    assert table(tmp_path) == "No records yet."
