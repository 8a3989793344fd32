"""Steps of an engine, traced from outside: every part is seen, nothing stays replaced, and what is shown is true."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.commands import call, data, refusal
from tilewise.core.errors import InputError
from tilewise.engine import Engine, EngineConfig, SamplingParams, runner
from tilewise.engine.models import decoder as decoders
from tilewise.engine.models.shapes import SHAPES, random_decoder
from tilewise.explain import draw, engine_steps, engine_tracer
from tilewise.explain.engine_steps import summary, timeline, trace
from tilewise.explain.engine_tracer import COMPUTE, ROTATION, Span, TracedStep, Tracer

LAYERS = SHAPES["tiny"]["num_hidden_layers"]


def engine_of(**options: Any) -> Engine:
    config = EngineConfig(**{"max_model_len": 128, "num_pages": 64} | options)
    return Engine(random_decoder("tiny", dtype=torch.float32), config=config)


@pytest.fixture(scope="module")
def traced() -> list[TracedStep]:
    return trace(engine_of(max_batch_tokens=20), decoding=2, context=5, prompt=30, steps=4)


def test_the_prompt_arrives_in_parts_beside_requests_that_decode(traced: list[TracedStep]) -> None:
    assert [step.counts for step in traced] == [(1, 1, 18), (1, 1, 12), (1, 1, 1), (1, 1, 1)]
    assert [(step.decoding, step.prompt_tokens) for step in traced] == [(2, 18), (2, 12), (3, 0), (3, 0)]


def test_every_call_of_a_step_is_noted_once(traced: list[TracedStep]) -> None:
    pieces = {"embedding": 1, "norm": 2 * LAYERS + 1, "projections": 2 * LAYERS, ROTATION: LAYERS}
    pieces |= {"attention": LAYERS + 1, "MLP": 3 * LAYERS, "head": 1, "sampling": 1}
    for step in traced:
        found = Counter(span.kind for span in step.spans if span.lane == "compute")
        assert found == pieces
        assert {"plan", "send", "launch", "take"} <= {span.kind for span in step.spans if span.lane == "host"}


def test_pieces_follow_each_other_without_gaps(traced: list[TracedStep]) -> None:
    for step in traced:
        assert step.begin <= step.spans[0].begin
        assert step.spans[-1].end <= step.end
        for one, other in itertools.pairwise(step.spans):
            assert one.end == pytest.approx(other.begin, abs=1e-4)
    assert all(one.end <= other.begin for one, other in itertools.pairwise(traced))


def test_nothing_stays_replaced_and_tokens_are_the_same() -> None:
    places = (runner, decoders, runner.Step)
    before = [dict(vars(place)) for place in places]
    engine = engine_of()
    objects = (engine, engine.scheduler, engine.runner, engine.decoder)
    names = [set(vars(each)) for each in objects]

    def answer() -> list[int]:
        engine.add([3, 1, 4], SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True))
        found: list[int] = []
        while engine.has_unfinished:
            for output in engine.step():
                found = output.outputs[0].token_ids
        return found

    want = answer()
    with Tracer(engine) as tracer:
        assert decoders.F is not F
        assert answer() == want
    assert len(tracer.steps) == 4
    assert [set(vars(each)) for each in objects] == names
    assert [dict(vars(place)) for place in places] == before
    with pytest.raises(ZeroDivisionError), Tracer(engine):
        _ = 1 / 0
    assert [dict(vars(place)) for place in places] == before


def test_without_the_model_only_the_host_is_noted() -> None:
    engine = engine_of()
    with Tracer(engine, compute=False) as tracer:
        engine.add([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
    assert {span.lane for span in tracer.steps[0].spans} == {"host"}


@pytest.mark.parametrize("captures", [False, True])
def test_on_a_gpu_the_models_parts_lie_between_events(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    clock = itertools.count()  # ticks when it is asked, so that how busy the machine is does not matter

    class Event:
        def __init__(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(engine_tracer, "_event", Event)
    monkeypatch.setattr(engine_tracer, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    engine = engine_of()
    engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.decoder.device = torch.device("cuda")
    with Tracer(engine) as tracer:
        engine.step()
    (step,) = tracer.steps
    kinds = {span.kind for span in step.spans if span.lane == "compute"}
    assert kinds == (set() if captures else set(COMPUTE))
    launching = [span for span in step.spans if span.kind == "launch"]
    device = [span for span in step.spans if span.lane == "compute"]
    assert all(launching[0].begin <= span.begin and span.end <= launching[-1].end for span in device)


def test_an_engine_has_no_requests_afterwards() -> None:
    engine = engine_of(lag=1)
    trace(engine, decoding=1, context=3, prompt=0, steps=2)
    assert not engine.has_unfinished
    assert engine.pages.allocator.num_used == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoding": 0, "prompt": 0}, "decoding: got 0, and no prompt"),
        ({"decoding": -1}, "decoding: got -1"),
        ({"steps": 0}, "steps: got 0"),
        ({"prompt": 127}, "prompt: got 133 tokens; expected at most max_model_len, 128"),
        ({"context": 120}, "prompt: got "),
        ({"decoding": 300}, "room in max_running, 256"),
        ({"decoding": 100}, "those of all pages"),
    ],
)
def test_workloads_that_cannot_be_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        trace(engine_of(), **{"decoding": 2, "context": 5, "prompt": 9, "steps": 4} | changes)


def test_an_engine_in_use_is_refused() -> None:
    engine = engine_of()
    engine.add([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(InputError, match="engine: got one in use"):
        trace(engine)


# what is shown -------------------------------------------------------------------------------------------------------


def made() -> list[TracedStep]:
    """Two steps, of which the device ends the first while the second runs."""
    first = (
        Span("host", "plan", 0, 2), Span("host", "launch", 2, 8), Span("host", "take", 8, 8.4),
        Span("compute", "attention", 4, 10), Span("compute", "MLP", 10, 14),
    )  # fmt: skip
    second = (Span("host", "plan", 10, 11), Span("host", "wait", 11, 18), Span("compute", "attention", 16, 20))
    return [TracedStep(0, 9, (1, 1, 7), first), TracedStep(10, 18, (1, 1, 1), second)]


def test_the_timeline_shows_who_takes_most_of_a_cell() -> None:
    assert timeline(made(), width=10) == "\n".join(
        (
            "step 1: 2 decode, 7 tokens of prompts, 9.00 ms",
            "  host    ppllllll..",
            "  compute ....AAAAAA",
            "step 2: 3 decode, 8.00 ms",
            "  host    pwwwwwww..",
            "  compute MMMM..AAAA",
            "a character is 1 ms",
            "  host    p plan, l launch, w wait, t take",
            "  compute A attention, M MLP",
        )
    )


def test_the_summary_separates_steps_with_a_prompt() -> None:
    found = {kind: (prompt, decoding, share) for kind, prompt, decoding, share in summary(made())}
    assert found["plan"] == (2, 1, pytest.approx(3 / 17))
    assert found["attention"] == (6, 4, pytest.approx(10 / 17))
    assert found["wait"] == (0, 7, pytest.approx(7 / 17))
    assert [*found] == ["plan", "launch", "wait", "take", "attention", "MLP"]


def test_every_kind_has_a_glyph_and_a_colour_of_its_own() -> None:
    assert len(set(engine_steps.GLYPHS.values())) == len(engine_steps.GLYPHS) == len(draw.engine._COLOURS)
    assert len(set(draw.engine._COLOURS.values())) == len(draw.engine._COLOURS)


def test_the_picture_has_a_panel_for_each_step(tmp_path: Path) -> None:
    figure = draw.engine_steps(made())
    assert [ax.get_title("left") for ax in figure.axes] == [
        "step 1: 2 decode, 7 tokens of prompts, 9.00 ms", "step 2: 3 decode, 8.00 ms",
    ]  # fmt: skip
    files = [draw.save(draw.engine_steps(made()), tmp_path / f"{n}.svg").read_bytes() for n in range(2)]
    assert files[0] == files[1]
    for steps in ([], made() * 9):
        with pytest.raises(InputError, match="steps"):
            draw.engine_steps(steps)


def test_the_command_prints_draws_and_gives_json(tmp_path: Path) -> None:
    out = tmp_path / "steps.svg"
    small = ("--decoding", "1", "--context", "3", "--prompt", "5", "--steps", "2", "--device", "cpu")
    text = call("explain", "step", "random:tiny", *small, "--out", str(out))
    assert "step 1: 1 decode, 5 tokens of prompts" in text
    assert "\nattention " in text
    assert out.read_text(encoding="utf-8").startswith("<?xml")
    found = data("explain", "step", "random:tiny", *small)
    assert [(step["decoding"], step["prompt_tokens"]) for step in found["steps"]] == [(1, 5), (2, 0)]
    assert sum(kind["share"] for kind in found["kinds"].values()) <= 1 + 1e-6
    assert {span["lane"] for span in found["steps"][0]["spans"]} == {"host", "compute"}


def test_the_command_refuses() -> None:
    assert "shape: got 'huge'; expected tiny" in refusal("explain", "step", "random:huge", "--device", "cpu")
    assert "model: got " in refusal("explain", "step", "/nowhere", "--device", "cpu")
    assert "path: got " in refusal("explain", "step", "random:tiny", "--out", "steps.txt")
