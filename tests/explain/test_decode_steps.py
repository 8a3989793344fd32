"""Steps that verify proposed tokens, as they are shown."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.engine.small import engine_of
from tilewise.cli.app import app
from tilewise.core.errors import InputError
from tilewise.engine import SamplingParams
from tilewise.engine.decoding.methods import Speculation
from tilewise.engine.decoding.tree import TokenTree
from tilewise.explain.decode_steps import TreeStep, trace

PROMPT = [5, 6, 7, 8] * 4


def test_a_tree_is_drawn_by_branches() -> None:
    tree = TokenTree((7, 1, 2, 3, 4), (-1, 0, 1, 0, 1), (1.0, 0.8, 0.5, 0.2, 0.1))
    step = TreeStep(tree, 10, (1, 2), (1, 2, 9, 9, 9))
    assert step.emitted == (1, 2, 9)
    assert step.lines(str) == [
        "    10  7            pending",
        "    11  ├ 1    0.80  ✓",
        "    12  │ ├ 2  0.50  ✓",
        "    12  │ └ 4  0.10",
        "    11  └ 3    0.20",
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_tell_the_answer(temperature: float) -> None:
    few = list(range(5, 9))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, allowed_token_ids=few, ignore_eos=True)
    plain = engine_of(num_pages=40)
    name = plain.add(PROMPT, params)
    while plain.has_unfinished:
        tokens = {out.request_id: out.outputs[0].token_ids for out in plain.step()}
    engine = engine_of(num_pages=40, speculative=Speculation("ngram", {"longest": 1}, learned=False))
    steps = trace(engine, PROMPT, params=params, steps=99)
    assert not engine.has_unfinished
    whole = PROMPT + tokens[name]
    assert steps
    for step in steps:
        assert step.tree.tokens[0] == whole[step.position]
        came = whole[step.position + 1 : step.position + 1 + len(step.emitted)]
        assert list(step.emitted[: len(came)]) == came  # the last step may give more than was asked for


def test_an_engine_must_propose_and_be_idle() -> None:
    with pytest.raises(InputError, match="engine: got speculative=None"):
        trace(engine_of(), PROMPT)
    engine = engine_of(speculative="ngram")
    engine.add(PROMPT)
    with pytest.raises(InputError, match="engine: got one with requests"):
        trace(engine, PROMPT)


def test_the_command() -> None:
    words = ["explain", "decode", "random:tiny", "5 6 7 5 6 7 5 6", "--steps", "2", "--max-model-len", "64"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert told.output.startswith("step 1: ")
    assert "pending" in told.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert len(found["steps"]) == 2
    wrong = CliRunner().invoke(app, [*words[:3], "five six"])
    assert wrong.exit_code != 0
    assert "PROMPT: got 'five six'" in wrong.output
