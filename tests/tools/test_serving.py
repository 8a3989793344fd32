"""The cases about serving, on tiny problems on the CPU: who is compared, what is refused, what the report shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from benchmarks import records, report, serving_report, steps
from benchmarks.cases import paged, planning, serving
from benchmarks.records import Record, Writer
from benchmarks.steps import Contender
from tests.tools.running import ENVIRONMENT, quick
from tests.tools.samples import sample
from tilewise.adapters import flashinfer
from tilewise.quant import KINDS
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def _writer(out: Path) -> Writer:
    return Writer(ENVIRONMENT, method="m", ceilings=(None, None), results=out)


def _errors(found: list[Record]) -> list[float]:
    return [record.error["value"] for record in found if record.error is not None and not record.failed]


# serving -------------------------------------------------------------------------------------------------------------


def test_pages_and_codes_are_compared(tmp_path: Path) -> None:
    found = quick("serving", tmp_path, "decode_encoded")
    assert {record.question for record in found} == {"decode_encoded"}
    of_codes = [f"tilewise.cpu_tiled.{kind}" for kind in KINDS]
    every = [name for kind in of_codes for name in (kind, f"{kind}.NHD")]
    assert [record.impl for record in found] == 3 * ["tilewise.cpu_tiled", *every]
    # beside float64 over the codes themselves: a reference over what was encoded would be 1 % off
    assert max(_errors(found)) < 1e-5
    read = {record.impl: record.gbps * record.p50_ms for record in found[:7] if record.gbps and record.p50_ms}
    int8, fp8, int4 = (read[name] / read["tilewise.cpu_tiled"] for name in of_codes)
    assert (int8, fp8) == (pytest.approx(20 / 64, rel=1e-3), pytest.approx(20 / 64, rel=1e-3))
    assert int4 == pytest.approx(12 / 64, rel=1e-3)  # 8 bytes of codes and 4 of the scale, of 16 numbers of 4 bytes
    assert {record.sources for record in found} == {FAMILIES["attention_cpu"].hash()}


def test_what_the_table_refuses_is_said_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.ROWS, "cpu", ("cpu_tiled", "hopper_decode"))
    found = quick("serving", tmp_path, "decode_encoded")
    refused = [record for record in found if record.impl.startswith("tilewise.hopper_decode")]
    assert len(refused) == len(found) // 2
    assert all(record.error is not None and record.error["metric"] == "not applicable" for record in refused)
    assert all("needs a Hopper GPU (sm_90); got cpu" in str(record.error) for record in refused)


def test_prefixes_are_shared_where_this_version_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, eq=False)
    class Sharing(tw.Paged):
        share_prefixes: bool = False

    names = {}
    for version, layout in {"without": tw.Paged, "with": Sharing}.items():
        with monkeypatch.context() as patch:
            patch.setattr(tw, "Paged", layout)
            if version == "without" and serving.shares_prefixes():
                continue
            found = quick("serving", tmp_path / version, "decode_shared")
        assert max(_errors(found)) < 1e-5
        names[version] = {(record.problem["shared"] > 0, record.impl.split(".", 1)[1]) for record in found}
    plain = {(True, "cpu_tiled"), (True, "cpu_tiled.cascade"), (True, "cpu_tiled.copies"), (False, "cpu_tiled")}
    assert names["with"] == plain | {(True, "cpu_tiled.shared"), (False, "cpu_tiled.shared")}
    assert names.get("without", plain) == plain


def test_sharing_keeps_the_pages() -> None:
    @dataclass(frozen=True, eq=False)
    class Sharing(tw.Paged):
        share_prefixes: bool = False

    layout = Sharing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    shared = serving.sharing(layout)
    assert isinstance(shared, Sharing)
    assert shared.share_prefixes
    assert shared.block_table is layout.block_table
    assert shared.seqlens_k is layout.seqlens_k


def test_shared_tokens_lie_in_the_same_pages() -> None:
    batch = paged.Batch((40, 50), "equal", 16, heads_q=4, heads_kv=2, head_dim=16, shared=32)
    given = paged.tensors(batch, torch.float32, "cpu")
    table = given.layout.block_table
    assert isinstance(table, torch.Tensor)
    assert table[0, :2].tolist() == table[1, :2].tolist()
    assert sorted({*table[0, :3].tolist(), *table[1, :4].tolist()}) == list(range(5))  # 2 shared, 1 and 2 more
    assert len(given.pool) == 5
    assert batch.distinct == 32 + 8 + 18
    keys = [paged.rows_of(batch, given, request)[0] for request in (0, 1)]
    assert torch.equal(keys[0][:32], keys[1][:32])
    assert not torch.equal(keys[0][32:], keys[1][32:40])


def test_a_mixed_batch_in_one_call_and_in_two(tmp_path: Path) -> None:
    found = quick("serving", tmp_path, "mixed")
    assert [record.impl for record in found] == ["tilewise.cpu_tiled", "tilewise.cpu_tiled.two_calls"]
    assert max(_errors(found)) < 1e-5
    assert found[0].problem["workload"] == "128 new tokens, 3 × 64 that decode"


def test_the_problems_are_those_of_the_docstring() -> None:
    sizes = {
        question: [(len(batch.lengths), batch.lengths[-1], batch.shared) for batch in problems(False)]
        for question, (problems, _) in serving.QUESTIONS.items()
    }
    assert sizes == {
        "decode_encoded": [(64, 4096, 0), (16, 8192, 0), (128, 1024, 0)],
        "decode_shared": [(32, 8192 + 128, 8192), (64, 4096, 0), (128, 1024, 0)],
        "mixed": [(64, 4096, 0)],
    }
    (mixed,) = serving.QUESTIONS["mixed"][0](False)
    assert mixed.lengths == (8192,) + (4096,) * 63


def test_paged_decodes_and_prefills(tmp_path: Path) -> None:
    found = quick("paged", tmp_path, "zipf", "prefill")
    assert {record.question for record in found} == {paged.DECODE, paged.PREFILL}
    assert max(_errors(found)) < 1e-5


# steps ---------------------------------------------------------------------------------------------------------------


def test_one_that_fails_and_one_that_is_wrong_have_no_times(tmp_path: Path) -> None:
    def broken() -> float:
        raise ValueError("no")

    contenders = {"right": Contender(lambda: 0.5), "nan": Contender(lambda: float("nan")), "broken": Contender(broken)}
    steps.measure(
        "q", {"workload": "w"}, contenders, _writer(tmp_path), device="cpu", rounds=1, includes="i",
        error=lambda _, value: value,
    )  # fmt: skip
    found = {record.impl: record for _, record in records.read_all(tmp_path)}
    assert [name for name, record in found.items() if not record.failed] == ["right"]
    assert "its error is nan" in str(found["nan"].error)
    assert "ValueError: no" in str(found["broken"].error)


def test_times_and_rates_are_those_of_one_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = {"x": steps.Timed([8.0, 8.0, 8.0])}
    monkeypatch.setattr(steps, "interleaved", lambda *_, **__: timed)
    contenders = {"x": Contender(lambda: None, repeats=4, nbytes=10**9)}
    steps.measure("q", {"workload": "w"}, contenders, _writer(tmp_path), device="cpu", rounds=1, includes="i")
    ((_, record),) = records.read_all(tmp_path)
    assert (record.p50_ms, record.gbps) == (2.0, 500.0)


# planning ------------------------------------------------------------------------------------------------------------


def test_plans_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_flashinfer", lambda device: (flashinfer, "the adapter"))
    found = quick("planning", tmp_path, "plan")
    assert not any(record.failed for record in found)
    assert {record.problem["on"] for record in found} == {"host"}
    assert [record.impl for record in found] == 3 * ["tilewise.cpu_tiled", "tilewise.worklist", "flashinfer"]


def test_updates_of_a_plan_are_timed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.ROWS, "cpu", ("cpu_tiled", "hopper_decode"))
    updates = []
    monkeypatch.setattr(tw.AttentionPlan, "update", lambda plan: updates.append(plan))
    monkeypatch.setattr(steps, "interleaved", lambda calls, **_: {name: _once(call) for name, call in calls.items()})
    batch = serving.equal(True, (64, 4096, 0))[0]
    given = planning.lengths_alone(batch, torch.float32, "cpu")
    planning.plan_on_gpu(batch, given, _writer(tmp_path), "cpu", rounds=1)
    found = {record.impl: record for _, record in records.read_all(tmp_path)}
    assert len(updates) == planning.UPDATES
    assert found["tilewise.cpu_tiled"].p50_ms == pytest.approx(1 / planning.UPDATES)
    assert found["tilewise.hopper_decode"].failed


def _once(call: Any) -> steps.Timed:
    call()
    return steps.Timed([1.0])


def test_layers_plan_once_or_each_for_itself(tmp_path: Path) -> None:
    found = quick("planning", tmp_path, "decode_layers")
    assert [record.impl for record in found] == 2 * ["tilewise.cpu_tiled", "tilewise.cpu_tiled.planned"]
    assert max(_errors(found)) < 1e-5
    assert all(record.problem["layers"] == planning.LAYERS for record in found)


def test_the_host_knows_where_each_program_begins() -> None:
    batch = paged.Batch((256,) * 4, "equal", 16)
    unit, head, tile = planning.worklist(batch, [1] * len(batch.lengths), batch.lengths)
    assert len(unit) == planning.PROGRAMS + 1
    assert (unit[1], head[1], tile[1]) == (0, 0, 1)  # 64 tiles of 128 keys: one for each program
    assert unit[-1] == 4


# the report ----------------------------------------------------------------------------------------------------------


def _row(**times: float | None) -> dict[str, Record]:
    refused = {"metric": "not applicable", "message": "codes"}
    return {
        f"tilewise.{name.replace('__', '.')}": sample(p20_ms=time, p50_ms=time, p80_ms=time)
        if time
        else sample(p20_ms=None, p50_ms=None, p80_ms=None, error=refused)
        for name, time in times.items()
    }


def test_contenders_stand_beside_their_baseline() -> None:
    row = _row(hopper_decode=2.0, triton_paged=3.0, hopper_decode__int8=None, triton_paged__int8=1.0)
    found = {impl.split(".", 1)[1]: serving_report.speedup("decode_encoded", impl, row) for impl in row}
    assert found == {"hopper_decode": None, "triton_paged": None, "hopper_decode.int8": None, "triton_paged.int8": 2.0}
    row = _row(hopper_decode=2.0, triton_paged=3.0, hopper_decode__shared=4.0, triton_paged__shared=1.0)
    found = {impl.split(".", 1)[1]: serving_report.speedup("decode_shared", impl, row) for impl in row}
    assert found == {"hopper_decode": None, "triton_paged": None, "hopper_decode.shared": 0.5, "triton_paged.shared": 3}
    row = _row(hopper=2.0, hopper__two_calls=1.0)
    assert serving_report.speedup("mixed", "tilewise.hopper", row) == 0.5
    assert serving_report.speedup("decode", "tilewise.hopper", row) is None


def test_rows_have_names_and_cells_their_speedup(tmp_path: Path) -> None:
    problem = {"workload": "64 × 4,096 tokens", "batch": 64, "tokens": 64 * 4096}
    for impl, time in {"tilewise.hopper_decode": 2.0, "tilewise.hopper_decode.int8": 1.0}.items():
        times = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), time)
        changes: dict[str, Any] = {**times, "tflops": None, "gbps": 3000.0}
        records.append(sample(question="decode_encoded", problem=problem, impl=impl, **changes), tmp_path)
    decoding = {"batch": 16, "tokens": 16 * 8192, "lengths": "zipf", "page_size": 1, "seqlen_q": 1}
    records.append(sample(question="decode", problem=decoding, tflops=None), tmp_path)
    text = report.generate(tmp_path, tmp_path / "plots")
    assert "| 64 × 4,096 tokens | 2.00 ms, 3,000 GB/s | **1.00 ms**, 2.00 x, 3,000 GB/s |" in text
    assert "x: the time of the fastest row of ours over keys that are not encoded, over this one." in text
    assert "| 16 × 8,192 tokens, zipf, pages of 1 |" in text
    assert serving_report.label({"workload": "w", "on": "GPU"}) == "w, on the GPU"
