"""The comparison of the engine's tokens, on a tiny model: every line agrees, and faults are found."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import engine_equality as case
from benchmarks.engines import equality
from benchmarks.engines.equality import CHUNKS, PAGES, Difference, Line, compared, greedy_lines, sampled_lines
from benchmarks.records import Record, Writer, read_all
from tests.engine.tiny import VOCAB, pair
from tests.tools.running import ENVIRONMENT
from tilewise.engine import SamplingParams
from tilewise.engine.models.decoder import Decoder
from tools.families import FAMILIES

COUNT, REQUESTS = 4, 4


class Uneven:
    """A decoder whose logits are others if a step samples for several requests."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._decoder.logits(hidden)
        return found if len(found) == 1 else found.roll(1, 1)


def setting(path: Path | None = None, decoder: Any = None) -> case.Setting:
    model, own = pair("llama")
    asked = equality.prompts(REQUESTS, VOCAB)
    return case.Setting(decoder or own, model, asked, COUNT, case.Kept(path, {"run": 1}))


def measured(tmp_path: Path, part: str, rule: str = "equal", stride: int = 31, **more: Any) -> tuple[Any, Record]:
    writer = Writer(ENVIRONMENT, method="m", ceilings=(None, None), results=tmp_path)
    found = case.measure(setting(**more), "tiny", part, "tilewise", rule, writer, stride=stride)
    return found, [record for _, record in read_all(tmp_path)][-1]


@pytest.mark.parametrize("lines", [list(greedy_lines(64)), list(sampled_lines(64))], ids=["greedy", "sampled"])
def test_some_lines_have_all_pairs_of_values(lines: list[Line]) -> None:
    some = equality.covering(lines)
    assert len(set(some)) == len(some) < len(lines) / 3
    for one, other in itertools.combinations([field.name for field in dataclasses.fields(Line)], 2):
        pairs = [{(getattr(line, one), getattr(line, other)) for line in each} for each in (some, lines)]
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize("part", ["greedy", "sampled"])
def test_lines_agree(part: str, tmp_path: Path) -> None:
    found, record = measured(tmp_path, part)
    assert found == []
    assert record.error == {"metric": "answers that differ", "value": 0}
    assert record.percent == 100
    assert record.problem["batches"] == [1, REQUESTS]
    assert record.count == REQUESTS * record.problem["lines"]
    assert record.problem["workload"] == f"{part}, {REQUESTS} prompts × {COUNT} tokens"
    assert record.sources == FAMILIES["engine"].hash()


@pytest.mark.parametrize("part", ["greedy", "sampled"])
def test_tokens_that_depend_on_others_are_found(part: str, tmp_path: Path) -> None:
    found, record = measured(tmp_path, part, stride=95 if part == "greedy" else 31, decoder=Uneven(pair("llama")[1]))
    assert found
    assert record.error == {"metric": "answers that differ", "value": len(found)}
    assert record.percent == pytest.approx(100 * (1 - len(found) / (record.count or 0)), rel=1e-4)


def test_the_product_is_whole() -> None:
    greedy, sampled = list(greedy_lines(64)), list(sampled_lines(64))
    assert len(set(greedy)) == len(greedy) == 2 * len(CHUNKS) * len(PAGES) * 4 == 96
    assert len(set(sampled)) == len(sampled) == 3 * len(CHUNKS) * 4 == 48
    assert len({line.name for line in [*greedy, *sampled]}) == 96 + 48
    assert (min(CHUNKS), max(CHUNKS)) == (16, 8192)


def test_requests_have_all_processors_at_all_temperatures() -> None:
    asked = equality.sampled(equality.prompts(64, VOCAB), COUNT, VOCAB)
    off = SamplingParams()
    names = (
        "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "bad_token_ids", "allowed_token_ids", "min_tokens", "stop_token_ids",
    )  # fmt: skip
    for name in names:
        temperatures = {params.temperature for _, params in asked if getattr(params, name) != getattr(off, name)}
        assert temperatures == {0.5, 1.0, 1.5}, name
    assert all(getattr(asked[0][1], name) != getattr(off, name) for name in names)
    assert len({params.seed for _, params in asked}) == 64
    prompts = [tokens for tokens, _ in asked]
    assert all(prompts[n][: len(prompts[n - 1]) // 2] == prompts[n - 1][: len(prompts[n - 1]) // 2] for n in (3, 7))


@pytest.mark.parametrize("line", [Line("p", 1, 16, 4, True, True), Line("p", 3, 16, 4, False, True)], ids=str)
def test_a_request_loses_its_pages_in_each_step(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = []
    preempt = equality.Engine.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        preempt(self, *args, **kwargs)
        own = self.scheduler.preempt
        self.scheduler.preempt = lambda sample: (lost.append(sample.request.number), own(sample))[1]

    monkeypatch.setattr(equality.Engine, "__init__", made)
    asked = equality.greedy(equality.prompts(3, VOCAB), COUNT)
    answers = equality.answers(pair("llama")[1], line, asked)
    assert [len(tokens) for tokens in answers] == [COUNT] * 3
    # after each token but the last, which ends its request
    assert len(lost) == 3 * (COUNT - 1) if line.batch == 1 else len(set(lost)) == 3


def test_the_first_difference_is_named_and_judged() -> None:
    want = [[1, 2, 3], [4, 5, 6], [7, 8]]
    found = [[1, 2, 3], [4, 9, 9], [7, 8, 9]]
    assert compared(found, want) == [Difference(1, 1, None), Difference(2, 2, None)]
    judged = compared(found, want, lambda request, position: request == 1)
    assert judged == [Difference(1, 1, True), Difference(2, 2, False)]


class Model:
    """Gives logits of two tokens, and notes what it was asked."""

    device = torch.device("cpu")

    def __init__(self, first: float, second: float) -> None:
        self.values, self.asked = (first, second), list[Any]()

    def __call__(self, tokens: torch.Tensor, logits_to_keep: int) -> Any:
        self.asked.append(tokens.tolist())
        return type("Output", (), {"logits": torch.tensor([[[0.0, *self.values]]])})


@pytest.mark.parametrize(("values", "near"), [((64.0, 63.5), True), ((63.5, 64.0), True), ((64.0, 62.9), False)])
def test_near_ties_are_within_a_64th_of_the_logit(values: tuple[float, float], near: bool) -> None:
    model = Model(*values)
    assert equality.near_tie(model, [3, 1]) is near
    assert model.asked == [[[3, 1]]]


@pytest.mark.parametrize("gap", [0.5, 5.0])
def test_on_a_gpu_differences_count_unless_they_are_near_ties(gap: float, tmp_path: Path) -> None:
    given = setting(decoder=Uneven(pair("llama")[1]))
    want = given.want("tilewise", [], "greedy", "near")
    given = case.Setting(given.decoder, Model(64.0, 64.0 - gap), given.prompts, COUNT, given.kept)
    writer = Writer(ENVIRONMENT, method="m", ceilings=(None, None), results=tmp_path)
    found = case.measure(given, "tiny", "greedy", "tilewise", "near", writer, stride=95)
    assert {each.near_tie for each in found} == {gap < 1}
    ((_, record),) = read_all(tmp_path)
    assert record.error is not None
    assert record.error["metric"] == case.RULES["near"]
    assert record.error["value"] == (0 if gap < 1 else len(found))
    first = found[0]
    assert given.peer.asked[0] == [given.prompts[first.request] + want[first.request][: first.position]]


def test_who_is_judged_by_what() -> None:
    assert case.rules("greedy", "cpu") == case.rules("sampled", "cpu") == {"tilewise": "equal"}
    assert case.rules("greedy", "cuda") == {"tilewise.deterministic": "equal", "tilewise": "near"}
    assert case.rules("sampled", "cuda") == {"tilewise.deterministic": "equal", "tilewise": "counted"}


def test_a_mode_that_is_not_there_does_not_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise case.UnsupportedError("deterministic", got="True on a GPU", expected="False", hint="wait")

    monkeypatch.setattr(equality, "answers", refused)
    _, record = measured(tmp_path, "sampled")
    assert record.error is not None
    assert record.error["metric"] == "not applicable"
    assert "True on a GPU" in record.error["message"]


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, own, ran = tmp_path / "kept.jsonl", equality.answers, list[str]()

    def counting(decoder: Any, line: Line, *args: Any, **kwargs: Any) -> Any:
        ran.append(line.name)
        if len(ran) == 4:
            raise KeyboardInterrupt
        return own(decoder, line, *args, **kwargs)

    monkeypatch.setattr(equality, "answers", counting)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "records", "sampled", stride=11, path=file)
    with file.open("a") as half:
        half.write('{"tilewise: sampled, cut sh')
    _, record = measured(tmp_path / "records", "sampled", stride=11, path=file)
    assert record.percent == 100
    assert len(ran) == len(set(ran)) + 1 == 1 + record.problem["lines"] + 1  # the fourth again, and each alone
    measured(tmp_path / "records", "sampled", stride=11, path=file)
    assert len(ran) == record.problem["lines"] + 2
    assert case.Kept(file, {"run": 2}).get("tilewise: sampled, alone", lambda: "anew") == "anew"
