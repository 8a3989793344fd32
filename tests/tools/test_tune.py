"""The tuning tool: candidates take the place of the table's rows, and a proposal reads as a row."""

from __future__ import annotations

import argparse

import pytest
import torch

from tilewise.ops.attention.configs import Config
from tilewise.ops.attention.problem import make_call
from tilewise.testing.offline import compiling_for
from tools import tune


@pytest.mark.parametrize("kernel", ["forward", "hopper forward", "hopper backward"])
def test_a_candidate_takes_the_place_of_the_tables_row(kernel: str) -> None:
    from tilewise.ops.attention import gluon_attention, triton_plans

    q = torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16)
    call = make_call(q, q, q)
    config_of = lambda name: (gluon_attention if "hopper" in name else triton_plans).config_of(name, call)  # noqa: E731
    candidate = Config(192, 32, 2, 7)
    others = {name: config_of(name) for name in ("forward", "keys", "hopper forward", "hopper backward")}
    with compiling_for(90), tune.using(kernel, candidate):
        for name in others:
            assert (config_of(name) == candidate) == (name == kernel)
    assert {name: config_of(name) for name in others} == others


def test_what_cannot_be_compiled_says_why() -> None:
    given = argparse.Namespace(kernel="hopper forward", head_dim=64, seqlen=256, tokens=256, mask="causal", sm=90)
    assert tune.compiled((given, Config(128, 64, 4, 2, True))) == ""
    assert tune.compiled((given, Config(128, 100, 4, 2, True))) != ""


def test_a_proposal_is_a_row() -> None:
    assert tune.proposal("forward", 64, Config(128, 64, 4, 2, True)) == "forward: Row(64, Config(128, 64, 4, 2, True))"
    assert tune.proposal("keys", 128, Config(32, 64, 8, 1)) == "keys: Row(128, Config(32, 64, 8, 1))"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["forward"]) == 2
    assert "no GPU" in capsys.readouterr().err
