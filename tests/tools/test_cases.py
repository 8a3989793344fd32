"""The cases that compare attention, on tiny problems on the CPU: what they record, and how peers are called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise as tw
from benchmarks import contenders, records
from benchmarks.__main__ import main as benchmark
from benchmarks.cases import cpu, cpu_formulas, exact_grid
from benchmarks.records import Writer
from benchmarks.reference import head_slice, visible_pairs
from benchmarks.timing import Timed
from tests.tools.running import ENVIRONMENT, quick
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_the_grid_runs_on_a_cpu(tmp_path: Path) -> None:
    found = quick("exact_grid", tmp_path, "d16", "gqa", "packed")
    assert {record.question for record in found} == set(exact_grid.QUESTIONS)
    cells = [cell for cell in exact_grid.cells(quick=True) if cell.part != "d8"]
    assert len(found) == 2 * sum(2 if cell.packed else 3 + cell.repeats for cell in cells)
    assert any(record.impl == "tilewise.cpu_tiled.deterministic" for record in found)
    refused = [record for record in found if record.failed]
    assert {(record.impl, record.problem["part"]) for record in refused} == {("tilewise.cpu_sdpa", "packed")}
    assert all(record.error is not None and record.error["metric"] == "not applicable" for record in refused)
    for record in found:
        assert record.ceiling_tflops is not None
        assert "fa4 left out" in record.method
        assert record.sources == (FAMILIES["attention_cpu"].hash() if record.impl.startswith("tilewise.") else None)
        if not record.failed:
            assert record.error is not None
            assert record.error["value"] < 1e-5


def test_a_part_that_no_case_has_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kv_memory", "--quick", "--out", str(tmp_path), "--only", "sharing"]
    assert benchmark([*arguments, "decode"]) == 2
    assert capsys.readouterr().err == "--only: got decode; parts of kv_memory: operations, sharing, waste\n"
    assert benchmark(arguments) == 0


def test_the_rate_counts_what_a_query_sees(tmp_path: Path) -> None:
    for record in quick("exact_grid", tmp_path, "gqa"):
        pairs = visible_pairs(lambda b, h, i, j: i >= j, record.problem["seqlen_q"], "cpu")
        operations = 4 * record.problem["head_dim"] * record.problem["num_heads_q"] * record.problem["batch"] * pairs
        operations *= 2.5 if record.question == "exact_backward" else 1
        assert record.p50_ms is not None
        assert record.tflops == pytest.approx(operations / record.p50_ms / 1e9, rel=1e-3)


def test_the_grid_is_the_one_that_its_docstring_names() -> None:
    cells = list(exact_grid.cells(quick=False))
    grid = [cell for cell in cells if cell.part.startswith("d")]
    assert len(set(grid)) == 3 * 2 * 4
    assert {sum(cell.lengths) for cell in grid} == {16_384}
    assert {cell.heads_q * cell.head_dim for cell in grid} == {2048}
    gqa, packed = cells[-2:]
    assert (gqa.shape, gqa.heads_kv) == ((2, 8192, 32, 128), 8)
    assert (packed.shape, len(packed.lengths)) == ((65_536, 16, 128), 32)
    assert max(packed.lengths) == pytest.approx(32 * min(packed.lengths), rel=0.05)


def test_formulas_run_on_a_cpu(tmp_path: Path) -> None:
    found = quick("attention_formula", tmp_path, "causal", "prefix")
    ours = [record for record in found if record.impl == "tilewise.cpu_tiled"]
    assert sorted((record.question, record.problem["formula"].split()[0]) for record in ours) == [
        (question, formula)
        for question in ("attention_backward", "attention_forward")
        for formula in ("causal", "prefix")
    ]
    assert all(record.sources == FAMILIES["attention_cpu"].hash() and not record.failed for record in ours)


def test_the_cpu_case_times_forwards_without_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: dict[str, list[bool]] = {}

    def interleaved(calls: dict[str, Any], **_: Any) -> dict[str, Timed]:
        for name, call in calls.items():
            result = call()
            timed.setdefault(name, []).append(isinstance(result, torch.Tensor) and result.requires_grad)
        return {name: Timed([1.0, 1.0, 1.0], None) for name in calls}

    monkeypatch.setattr(contenders, "interleaved", interleaved)
    found = quick("cpu", tmp_path, "full")
    assert {(record.question, record.impl) for record in found} == {
        (question, impl) for question in cpu.QUESTIONS for impl in cpu.IMPLS
    }
    assert timed == {impl: [False, False] for impl in cpu.IMPLS}
    for record in found:
        assert record.sources == (FAMILIES["attention_cpu"].hash() if record.impl == "tilewise.cpu" else None)


def test_sources_are_those_of_the_rows_family() -> None:
    rows = {
        "triton": "attention_triton",
        "triton_paged": "attention_paged",
        "hopper": "attention_hopper",
        "cpu_sdpa": "attention_cpu",
    }
    for row, family in rows.items():
        assert contenders.sources_of(f"tilewise.{row}") == FAMILIES[family].hash()
    assert contenders.sources_of("tilewise.hopper.deterministic") == contenders.sources_of("tilewise.hopper")
    assert contenders.sources_of("fa4") is None


def test_a_contender_keeps_what_it_did_before_it_failed(tmp_path: Path) -> None:
    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tw.attention(q, k, v)

        @staticmethod
        def backward(ctx: Any, do: torch.Tensor) -> Any:
            raise NotImplementedError("no backward here")

    tensors = contenders.inputs((1, 32, 4, 16), torch.float32, "cpu")
    want = head_slice(*tensors, mask=None, score=None, batch=0, head=contenders.HEAD[1])
    contenders.measure(
        contenders.Comparison({"formula": "full"}, 1, want),
        {"forward": OnlyForward.apply, "nan": lambda q, k, v: tw.attention(q, k, v) * float("nan")},
        lambda name: contenders.inputs((1, 32, 4, 16), torch.float32, "cpu"),
        exact_grid.QUESTIONS,
        Writer(ENVIRONMENT, method="m", ceilings=(1.0, None), results=tmp_path),
        device="cpu",
        rounds=1,
    )
    found = {(record.question, record.impl): record for _, record in records.read_all(tmp_path)}
    assert {key for key, record in found.items() if not record.failed} == {("exact_forward", "forward")}
    messages = {key: str(record.error["message"]) for key, record in found.items() if record.error and record.failed}
    assert messages["exact_backward", "forward"] == "NotImplementedError: no backward here"
    assert "nan" in messages["exact_forward", "nan"]


def test_an_absent_flash_attention_4_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert contenders.find_fa4("cuda") == (None, "fa4 left out: not installed")


@pytest.mark.parametrize("returns_lse", [False, True])
def test_flash_attention_4_is_called_by_its_names(monkeypatch: pytest.MonkeyPatch, returns_lse: bool) -> None:
    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Any:
        o, lse = tw.attention_with_lse(q, k, v, mask=tw.causal if causal else None)
        return (o, lse) if returns_lse else o

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, **lengths: Any) -> Any:
        assert lengths["max_seqlen_q"] == lengths["max_seqlen_k"] == 5
        layout = tw.Packed(lengths["cu_seqlens_q"], lengths["cu_seqlens_k"])
        return tw.attention(q, k, v, mask=tw.causal if causal else None, layout=layout)

    fake = SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=fake))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    module, says = contenders.find_fa4("cuda")
    assert module is fake
    assert says.startswith("fa4 is flash-attn-4")
    q, k, v, _ = contenders.inputs((2, 8, 4, 16), torch.float32, "cpu")
    assert torch.equal(contenders.fa4(module, True)(q, k, v), tw.attention(q, k, v, mask=tw.causal))
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    one = [t[0] for t in (q, k, v)]
    got = contenders.fa4(module, True, (cu_seqlens, 5))(*one)
    assert torch.equal(got, tw.attention(*one, mask=tw.causal, layout=tw.Packed(cu_seqlens)))


@pytest.mark.parametrize("named", ["window_size", "is_causal"])
def test_torchs_varlen_is_called_as_its_version_wants(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    def by_window(q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, *, window_size: tuple[int, int]) -> Any:
        return f"window {window_size}"

    def by_flag(q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, is_causal: bool = False) -> Any:
        return f"causal {is_causal}"

    fake = SimpleNamespace(varlen_attn={"window_size": by_window, "is_causal": by_flag}[named])
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    packed = (torch.tensor([0, 3]), 3)
    full, causal = (contenders.torch_varlen(flag, packed)(*[torch.zeros(1)] * 3) for flag in (False, True))
    expected = {"window_size": ("window (-1, -1)", "window (-1, 0)"), "is_causal": ("causal False", "causal True")}
    assert (full, causal) == expected[named]


def test_formulas_on_a_cpu(tmp_path: Path) -> None:
    """SDPA with a dense tensor computes what the formula says; its fused kernel takes 2 or 4 axes."""
    found = quick("cpu_formulas", tmp_path, "alibi", "softcap", "documents")
    assert {record.question for record in found} == set(cpu_formulas.QUESTIONS)
    for record in found:
        assert record.error is not None
        if record.impl != "sdpa.zero_bias":
            assert record.error["value"] < 1e-5
    assert {formula.dense(64, 4).ndim for formula in cpu_formulas.formulas(64, 4)} == {2, 4}
