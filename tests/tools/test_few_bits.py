"""The benchmark of attention in few bits, at sizes that a CPU has done with in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import few_bits
from tests.tools.running import quick
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_every_scheme_is_measured_beside_exact_attention(tmp_path: Path) -> None:
    found = quick("few_bits", tmp_path)
    assert {record.question for record in found} == set(few_bits.QUESTIONS)
    forward = [record for record in found if record.question == few_bits.FORWARD]
    assert {record.impl for record in forward} == {
        "tilewise.cpu_tiled", "sdpa", *(f"tilewise.cpu_codes.{name}" for name in few_bits.SCHEMES),
    }  # fmt: skip
    for record in forward:
        assert record.error is not None
        in_few_bits = record.impl.startswith("tilewise.cpu_codes")
        assert (1e-3 < record.error["value"] < 0.1) is in_few_bits, record.impl
        assert record.sources == (FAMILIES["attention_codes_cpu"].hash() if in_few_bits else record.sources)
    encode = [record for record in found if record.question == few_bits.ENCODE]
    assert {record.problem["operation"] for record in encode} == set(few_bits.SCHEMES)
    assert all(record.gbps for record in encode)
