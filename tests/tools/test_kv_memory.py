"""The simulation of a KV cache's memory: small requests worked out by hand, and what it records."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.__main__ import main
from benchmarks.cases import kv_memory
from tools.families import FAMILIES


def test_contiguous_schemes_reserve_what_their_names_say() -> None:
    assert kv_memory.contiguous(100, 25) == {
        "contiguous_max": 2048,
        "contiguous_pow2": 256,  # 100 + 32 slots in a block of 256
        "contiguous_oracle": 128,
    }
    assert kv_memory.contiguous(7, 1)["contiguous_oracle"] == 8


@pytest.mark.parametrize(("page_size", "slots"), [(1, 5 + 6 + 7), (2, 6 + 6 + 8), (4, 8 + 8 + 8), (16, 3 * 16)])
def test_slots_are_summed_over_the_steps(page_size: int, slots: int) -> None:
    assert kv_memory.paged_slots(page_size, 4, 3) == slots


@pytest.mark.parametrize("grow", [kv_memory.sampled, kv_memory.beams])
def test_what_is_shared_is_the_prompts_full_pages_and_at_first_no_more(grow: kv_memory.Grow) -> None:
    assert kv_memory.saved(grow, [(32, 1)], 2) == pytest.approx(1 - 4 / 6)
    assert kv_memory.saved(grow, [(35, 1)], 2) == pytest.approx(1 - 4 / 6)
    assert kv_memory.saved(grow, [(15, 1)], 6) == 0.0
    assert kv_memory.saved(grow, [(32, 1)], 1) == 0.0


def test_beams_share_what_their_last_common_beam_wrote() -> None:
    samples, beams = (kv_memory.saved(grow, [(16, 200)], 4) for grow in (kv_memory.sampled, kv_memory.beams))
    assert samples < 0.2 < 0.5 < beams < 0.75


def test_lengths_have_the_means_that_were_published() -> None:
    drawn = kv_memory.lengths("Alpaca", 0.5, 4000)
    assert drawn == kv_memory.lengths("Alpaca", 0.5, 4000)
    for values, mean in zip(zip(*drawn, strict=True), kv_memory.MEANS["Alpaca"], strict=True):
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)
    assert max(map(sum, kv_memory.lengths("ShareGPT", 1.5, 1000))) <= kv_memory.MAX_LENGTH


def test_the_case_records_shares_and_times(tmp_path: Path) -> None:
    assert main(["kv_memory", "--quick", "--out", str(tmp_path)]) == 0
    found = [record for _, record in records.read_all(tmp_path)]
    waste = [record for record in found if record.question == "kv_waste"]
    assert len(waste) == 2 * 3 * (5 + 3)
    for record in found:
        assert record.sources == (FAMILIES["kv"].hash() if record.impl.startswith("tilewise.") else None)
        assert (record.percent is None) == (record.question == "kv_operations") == (record.p50_ms is not None)
    assert {record.percent for record in waste if record.impl == "tilewise.page1"} == {0.0}
    sharing = [record.problem["decoding"] for record in found if record.question == "kv_sharing"]
    assert sorted(sharing) == sorted(2 * [f"{n} {name}" for n in (2, 4, 6) for name in ("samples", "beams")])
