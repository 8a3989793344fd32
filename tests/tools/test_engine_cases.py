"""The cases about the engine, on tiny problems on the CPU: what is asked, how it is timed, counted and compared."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import engine_report, records, report
from benchmarks.cases import Options, engine
from benchmarks.engines import measured, ours, peers, roof, workloads
from benchmarks.engines.driver import Answered, drive
from benchmarks.engines.measured import Asked, Measured, results, workloads_of
from benchmarks.engines.workloads import CPU, GPU, QUICK, Request, Workload
from benchmarks.records import Record
from tests.tools.running import quick
from tests.tools.samples import sample
from tilewise.core.errors import InputError
from tilewise.engine.models.load import config_of, decoder_of
from tilewise.explain.engine_tracer import Span, TracedStep
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")
ASKED = Asked("tilewise", "random:tiny", "float32", "cpu", "quick", ("nano_small", "agent"), 1)


# workloads -----------------------------------------------------------------------------------------------------------


def test_nano_is_the_bench_of_nano_vllm() -> None:
    whole = workloads.nano(GPU, 256)
    assert whole.output_tokens == 133_966  # as it prints
    assert all(100 <= len(request.prompt) <= 1024 for request in whole.requests)
    few = workloads.nano(GPU, 64, 4)
    assert [request.prompt for request in few.requests] == [request.prompt for request in whole.requests[:64]]
    assert [request.count for request in few.requests] == [request.count // 4 for request in whole.requests[:64]]


def test_requests_come_at_the_rate_that_is_asked_for() -> None:
    found = workloads.poisson(dataclasses.replace(GPU, few=256), 8.0)
    arrivals = [request.arrival for request in found.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / 255 == pytest.approx(1 / 8, rel=0.2)
    faster = [request.arrival for request in workloads.poisson(dataclasses.replace(GPU, few=256), 16.0).requests]
    assert faster == pytest.approx([each / 2 for each in arrivals])


def test_prefixes_are_shared_and_other_tokens_share_none_with_them() -> None:
    one = workloads.shared_prefix(GPU)
    prefixes = {request.prompt[: one.shared] for request in one.requests}
    assert (len(prefixes), len(one.requests), one.shared) == (1, 64, 8192)
    assert len({request.prompt for request in one.requests}) == 64
    other = one.with_other_tokens(3, 4096)
    assert all(token < 4096 for request in other.requests for token in request.prompt)
    assert all(a != b for a, b in zip(other.requests[0].prompt, one.requests[0].prompt, strict=True))


@pytest.mark.parametrize("sizes", [GPU, CPU, QUICK])
def test_workloads_fit_their_models_and_say_how_large_they_are(sizes: workloads.Sizes) -> None:
    for name, workload in workloads_of([*engine.PARTS, "smollm2"], sizes, "random:tiny").items():
        assert workload.longest <= 9000
        assert f"{workload.output_tokens:,} out" in workload.says, name
        assert all(request.count >= 2 for request in workload.requests)


class Script:
    """A contender that gives the tokens 7, 7, … in its n-th steps; `short` leaves out the last one."""

    def __init__(self, short: bool = False) -> None:
        self.asked: list[Request] = []
        self._live: dict[int, list[int]] = {}
        self._short = short

    def add(self, key: int, request: Request) -> None:
        assert key == len(self.asked)
        self.asked.append(request)
        self._live[key] = []

    def step(self, wait: float) -> Sequence[Answered]:
        found = []
        for key, tokens in list(self._live.items()):
            tokens.append(7)
            ends = len(tokens) == self.asked[key].count
            answer = tokens[: -1 if self._short else None] if ends else None
            found.append(Answered(key, [float(len(tokens))], answer))
            if ends:
                del self._live[key]
        return found


def test_turns_follow_from_answers() -> None:
    workload = workloads.agent(QUICK)
    script = Script()
    found = drive(script, workload)
    assert [len(request.prompt) for request in script.asked[:2]] == [16, 16]
    for request, following in zip(script.asked[:2], script.asked[2:], strict=True):
        assert following.prompt == (*request.prompt, 7, 7, *request.turns[0])
        assert following.turns == ()
    assert len(found.first) == 4
    assert found.between == [1.0] * 4
    turns = list(workload.turns())
    assert [(turn.known, turn.prompt, turn.count) for turn in turns] == [(0, 16, 2), (17, 22, 2)] * 2
    assert (workload.prompt_tokens, workload.output_tokens, workload.longest, workload.tokens) == (76, 8, 24, 48)


def test_requests_are_not_sent_before_they_come_and_count_from_then() -> None:
    requests = tuple(Request((1, 2), 2, arrival=at) for at in (0.05, 0.0))
    script = Script()
    found = drive(script, Workload("", requests))
    assert [request.arrival for request in script.asked] == [0.0, 0.05]
    assert found.seconds >= 0.05
    assert found.first[0] - found.first[1] == pytest.approx(0.05, abs=1e-9)  # both have their tokens at moment 1


def test_an_answer_that_is_too_short_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 tokens, 2 times, 2 asked for"):
        drive(Script(short=True), Workload("", (Request((1,), 2),)))


# what bounds them ----------------------------------------------------------------------------------------------------


def test_the_roof_counts_what_must_be_read_and_multiplied() -> None:
    config = config_of("random:tiny")
    weights = sum(x.numel() for name, x in decoder_of("random:tiny", device="cpu").named().items() if x.ndim == 2)
    assert roof.step_bytes(config, 2) == 2 * weights
    assert roof.token_bytes(config, 2) == 2 * 2 * 4 * 2 * 64

    def seconds(workload: Workload, tflops: float, gbps: float) -> Any:
        return pytest.approx(roof.seconds(config, 2, workload, tflops=tflops, gbps=gbps))

    one = Workload("", (Request((1,) * 10, 4),))  # three steps, which read 10, 11 and 12 tokens
    assert seconds(one, 1e30, 1e-9) == 3 * 2 * weights + 33 * 2048
    pairs, layers = 10 * 11 // 2, 2 * (weights - config.vocab_size * config.hidden_size)
    assert seconds(one, 1e-12, 1e30) == 10 * layers + pairs * 4 * 4 * 4 * 64
    two = Workload("", (one.requests[0], Request((1,) * 10, 3)), shared=8)
    assert seconds(two, 1e30, 1e-9) == 3 * 2 * weights + (33 + 21 - 2 * 8) * 2048
    assert seconds(two, 1e-12, 1e30) == 12 * layers + (pairs + 2 * 8 + 3) * 4 * 4 * 4 * 64
    agent = workloads.agent(QUICK)
    assert seconds(agent, 1e30, 1e-9) == 2 * 2 * weights + 2 * (16 + 22) * 2048


def test_time_that_kernels_cover_counts_once() -> None:
    assert ours.busy_ms([]) == 0
    assert ours.busy_ms([(5, 6), (0, 2), (1, 3), (1.5, 2.5)]) == 4


def test_a_gpu_waits_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [TracedStep(float(n), n + 0.9, (1,), (Span("host", "wait", n, n + 0.5),)) for n in range(200)]
    asked = []

    def profiled(contender: Any, workload: Any, first: int, last: int) -> list[tuple[float, float]]:
        asked.append((first, last))
        return [(n, n + 0.75) for n in range(first, last)]

    monkeypatch.setattr(ours, "profiled", profiled)
    assert ours.waited_on_gpu(None, steps, None) == pytest.approx(0.25)  # type: ignore[arg-type]
    assert asked == [(100, 164)]
    assert ours.waited_on_gpu(None, steps[:100], None) is None  # type: ignore[arg-type]
    assert ours.host_ms(steps[0], "cuda") == pytest.approx(0.4)


# contenders ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return quick("engine", tmp_path_factory.mktemp("engine"), "shared_prefix", "smollm2")


def test_every_contender_answers_and_ours_is_counted(found: list[Record]) -> None:
    assert not [record for record in found if record.failed]
    by_question: dict[str, set[str]] = {}
    for record in found:
        by_question.setdefault(record.question, set()).add(record.impl)
        assert "nano-vllm left out: no kernels for cpu" in record.method
        assert record.sources == (FAMILIES["engine"].hash() if record.impl == "tilewise" else None)
    peers_here = {"transformers.continuous", "transformers.generate.batch1", "transformers.generate.batch8"}
    timed = {"engine_throughput", "engine_first_token", "engine_between_tokens"}
    assert by_question == {
        **{question: {"tilewise", *peers_here} for question in timed},
        **{question: {"tilewise"} for question in ("engine_step", "engine_prefix", "engine_pages")},
    }
    assert set(by_question) <= set(engine_report.QUESTIONS)


def test_who_takes_part_in_what() -> None:
    rest = ("nano_small", "poisson", "shared_prefix", "agent")
    on_gpu = {"tilewise": engine.PARTS, "transformers.continuous": rest, "nano-vllm": engine.PARTS}
    assert engine._contenders(engine.PARTS, "cuda", nano=True) == on_gpu
    assert engine._contenders(("nano",), "cuda", nano=False) == {"tilewise": ("nano",)}
    generate = {f"transformers.generate.batch{n}": ("nano_small",) for n in (1, 8)}
    found = engine._contenders(engine.PARTS, "cpu", nano=False)
    assert found == {"tilewise": engine.PARTS, "transformers.continuous": rest} | generate


def test_rates_and_shares_follow_from_times(found: list[Record]) -> None:
    for record in (record for record in found if record.question == "engine_throughput"):
        assert record.p50_ms is not None
        assert record.tokens_per_s is not None
        assert record.total_tokens_per_s is not None
        assert record.tokens_per_s == pytest.approx(1e3 * record.problem["output_tokens"] / record.p50_ms, rel=1e-3)
        total = record.problem["output_tokens"] + record.problem["prompt_tokens"]
        assert record.total_tokens_per_s == pytest.approx(1e3 * total / record.p50_ms, rel=1e-3)
        assert record.percent is not None
        assert record.percent > 0


def test_a_prefix_is_computed_and_kept_once(found: list[Record]) -> None:
    kept = {record.question: record for record in found if "after one prefix" in record.problem["workload"]}
    # 40 tokens and 2 of its own in the first; two pages of 16 are found, the rest of each prompt and an answer's first
    assert kept["engine_prefix"].count == 42 + 2 * 10 + 3
    assert kept["engine_prefix"].percent == pytest.approx(100 * 2 * 32 / 126, rel=1e-3)
    assert kept["engine_pages"].count == 2 + 3
    assert kept["engine_pages"].percent == pytest.approx(100 * (1 - 5 / 9), rel=1e-3)


def test_the_report_names_models_and_shows_rates(tmp_path: Path) -> None:
    problem = {"model": "random:tiny", "workload": "batch 8: 56 tokens in, 16 out"}
    plain: dict[str, Any] = {"problem": problem, "tflops": None, "error": None, "sources": None}
    rates = {"tokens_per_s": 12_345.0, "total_tokens_per_s": 20_000.0, "percent": 55.0}
    records.append(sample(question="engine_throughput", impl="tilewise", **plain, **rates), tmp_path)
    spread = {"p20_ms": 1.0, "p50_ms": 5.0, "p80_ms": 6.0, "p99_ms": 7.0}
    for impl in ("tilewise", "nano-vllm"):
        records.append(sample(question="engine_first_token", impl=impl, **plain | spread), tmp_path)
    text = report.generate(tmp_path, tmp_path / "plots")
    assert "| random:tiny, batch 8: 56 tokens in, 16 out | **2.00 ms**, 12,345 tokens/s, 55 % |" in text
    assert "| **5.00 ms**, 99 % 7.00 ms | **5.00 ms**, 99 % 7.00 ms | 1.00 |" in text  # many requests differ


def test_a_process_that_dies_leaves_its_answers_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    line = json.dumps({"part": "nano_small", "runs_ms": [2.0]})
    program.write_text(f"#!/bin/sh\necho noise\necho 'RESULT {line}'\necho 'Traceback' >&2\necho 'OSError: gone' >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(measured.sys, "executable", str(program))
    first, second = results(ASKED, isolated=True)
    assert (first.part, list(first.runs_ms), first.failure) == ("nano_small", [2.0], None)
    assert second == Measured("agent", failure="OSError: gone")
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    assert [each.failure for each in results(ASKED, isolated=True, limit_s=0.1)] == [
        "TimeoutExpired: not done after 0 s"
    ] * 2


def test_a_process_gets_what_is_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(measured, "measure", lambda given: asked.append(given) or [Measured("agent", (1.0,))])
    measured.main([json.dumps(dataclasses.asdict(ASKED))])
    assert asked == [ASKED]
    assert json.loads(capsys.readouterr().out.removeprefix("RESULT "))["runs_ms"] == [1.0]


def test_who_cannot_start_says_so_for_all_its_workloads() -> None:
    nano = dataclasses.replace(ASKED, contender="nano-vllm")
    assert [(each.part, each.applies) for each in measured.measure(nano)] == [("nano_small", False), ("agent", False)]
    unknown = dataclasses.replace(ASKED, model="random:tiny", dtype="float7")
    assert all("UnsupportedError" in str(each.failure) for each in measured.measure(unknown))


def test_without_smollm2_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(model: str) -> Any:
        raise InputError("SmolLM2", got="no download", expected="the wheel", hint="a network")

    monkeypatch.setattr(engine, "config_of", missing)
    monkeypatch.setattr(engine, "ceilings", lambda device: (1.0, 1.0))
    monkeypatch.setattr(engine, "_write", lambda *_: None)
    engine.run(Options(tmp_path))
    assert "smollm2 left out: InputError: SmolLM2: got no download" in capsys.readouterr().out
    with pytest.raises(InputError, match="no download"):
        engine.run(Options(tmp_path, only=("smollm2",)))


def test_nano_vllm_is_driven_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with the names that its revision bb823b3 has."""

    class Sequence:
        def __init__(self, prompt: list[int], params: Any) -> None:
            self.tokens, self.params = list(prompt), params
            self.length = len(prompt)

        num_completion_tokens = property(lambda self: len(self.tokens) - self.length)
        completion_token_ids = property(lambda self: self.tokens[self.length :])
        is_finished = property(lambda self: self.num_completion_tokens == self.params.max_tokens)

    class LLM:
        def __init__(self, folder: str, **options: Any) -> None:
            config = json.loads((Path(folder) / "config.json").read_text())
            assert config["model_type"] == "qwen3"
            assert options == {"max_model_len": 9, "max_num_seqs": 2, "kvcache_block_size": 256}
            self.scheduler = SimpleNamespace(waiting=[])

        def add_request(self, prompt: list[int], params: Any) -> None:
            self.scheduler.waiting.append(Sequence(prompt, params))

        def step(self) -> None:
            for sequence in self.scheduler.waiting:
                if not sequence.is_finished:
                    sequence.tokens.append(1)

    modules = {
        "nanovllm": SimpleNamespace(LLM=LLM, SamplingParams=lambda **params: SimpleNamespace(**params)),
        "nanovllm.engine.model_runner": SimpleNamespace(),
        "nanovllm.engine.llm_engine": SimpleNamespace(),
    }
    monkeypatch.setitem(peers.sys.modules, "flash_attn", None)  # not installed
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", lambda name: modules[name])
        contender = peers.NanoVllm("random:qwen3-0.6b", 9, 2)
    ran = drive(contender, Workload("", (Request((1, 2), 3), Request((3,), 2))))
    assert (len(ran.first), len(ran.between)) == (2, 3)
    weights = torch.nn.Linear(16, 64)
    weights.bias.data.fill_(7.0)
    modules["nanovllm.engine.model_runner"].load_model(weights, "")
    assert float(weights.weight.detach().std()) == pytest.approx(0.25, rel=0.1)
    assert bool((weights.bias == 7.0).all())
    assert {"flash_attn_varlen_func", "flash_attn_with_kvcache"} <= set(vars(peers.sys.modules["flash_attn"]))
    assert peers.transformers_model("random:tiny", torch.float32, "cpu") is not None  # which looks for it


def test_models_of_transformers_have_our_weights() -> None:
    model = peers.transformers_model("random:tiny", torch.float32, "cpu")
    decoder = decoder_of("random:tiny", device="cpu")
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in decoder.named().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_repeats_are_the_timed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[int] = []
    monkeypatch.setattr(peers, "transformers_model", lambda *_: None)

    def generate(model: Any, workload: Workload, batch: int) -> Any:
        prompts.append(workload.requests[0].prompt[0])
        return SimpleNamespace(seconds=float(len(prompts)), first=[1.0, 2.0], between=[])

    monkeypatch.setattr(peers, "generate", generate)
    asked = dataclasses.replace(ASKED, contender="transformers.generate.batch8", parts=("nano_small",), rounds=3)
    (one,) = measured.measure(asked)
    assert one.runs_ms == (2000.0, 3000.0, 4000.0)
    assert one.first == pytest.approx((1000, 1500, 2000, 2000), rel=0.01)
    assert one.between is None
    assert all(a != b for a, b in itertools.combinations(prompts, 2))
