"""Sampling on a GPU: the cases of the other tiers, whole vocabularies, repeated, replayed, compiled, without a wait."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import sampling as cases
from tilewise.testing.graphs import captured
from tilewise.testing.sampling import SamplingCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = SamplingCase("mixed", "top_k top_p min_p", "repetition presence frequency", True, "masks", "processed 20")


@pytest.mark.parametrize("case", cases.CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_specification(case: SamplingCase, dtype: torch.dtype) -> None:
    for seed in range(3):
        cases.check(cases.make_arguments(case, dtype, DEVICE, seed), "triton")


@pytest.mark.parametrize("truncation", cases.TRUNCATIONS)
@pytest.mark.parametrize("width", [4096, 49_152, 151_936])
def test_whole_vocabularies(truncation: str, width: int) -> None:
    case = SamplingCase("mixed", truncation, "repetition presence frequency", True, "masks", "raw 3", 0, 10, width)
    arguments = cases.make_arguments(case, torch.float32, DEVICE)
    for scale in (0.3, 1.0, 3.0):
        cases.check(arguments | {"logits": scale * arguments["logits"]}, "triton")


def test_many_rows_are_those_of_one() -> None:
    x = 3.0 * torch.randn(4096, 32_000, device=DEVICE).bfloat16()
    seeds = torch.arange(4096, device=DEVICE)
    arguments = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "positions": 3}
    whole = tw.sample(x, seeds=seeds, **arguments)
    for row in (0, 77, 4095):
        one = tw.sample(x[row : row + 1], seeds=seeds[row : row + 1], **arguments)
        assert torch.equal(one.tokens, whole.tokens[row : row + 1])
        assert torch.equal(one.values, whole.values[row : row + 1])


def test_rows_behind_the_reach_of_32_bits() -> None:
    rows, width = 2**31 // 65_536 + 3, 65_536
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = torch.randn(2, width, device=DEVICE)
    found, wanted = (tw.sample(part, seeds=1, positions=2) for part in (x, x[-2:]))
    assert torch.equal(found.tokens[-2:], wanted.tokens)


def test_tokens_come_with_their_probability() -> None:
    draws = 1_000_000
    logits = torch.randn(50, device=DEVICE)
    tokens = tw.sample(
        logits.expand(draws, 50).contiguous(), seeds=7, positions=torch.arange(draws, device=DEVICE)
    ).tokens
    expected = draws * logits.double().softmax(0)
    statistic = float(((torch.bincount(tokens, minlength=50) - expected) ** 2 / expected).sum())
    assert abs(statistic - 49) < 5 * (2 * 49) ** 0.5


def test_bits_repeat() -> None:
    arguments = cases.make_arguments(SamplingCase(**{**vars(ALL), "rows": 30, "width": 50_000}), torch.bfloat16, DEVICE)
    first, *others = (tw.sample(**arguments) for _ in range(4))
    for other in others:
        assert torch.equal(first.tokens, other.tokens)
        assert torch.equal(first.values.nan_to_num(), other.values.nan_to_num())


def test_the_host_waits_for_nothing() -> None:
    arguments = cases.make_arguments(ALL, torch.float32, DEVICE)
    tw.sample(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tw.sample(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_with_other_rows() -> None:
    arguments = cases.make_arguments(ALL, torch.float32, DEVICE)
    graph, found = captured(lambda: tw.sample(**arguments).tokens)
    arguments["logits"].copy_(3.0 * torch.randn_like(arguments["logits"]))
    arguments["positions"].add_(1)
    graph.replay()
    assert torch.equal(found, tw.sample(**arguments).tokens)


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()

    def model(x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return tw.sample(2.0 * x, temperature=0.7, top_p=0.9, seeds=seeds, positions=2).tokens + 1

    x, seeds = torch.randn(3, 4000, device=DEVICE), torch.arange(3, device=DEVICE)
    assert torch.equal(torch.compile(model, fullgraph=True)(x, seeds), model(x, seeds))


@pytest.mark.parametrize("offset", [1e4, 1e9, -1e30])
def test_what_all_logits_have_added_changes_nothing(offset: float) -> None:
    cases.check_far_logits(offset, "triton", DEVICE)
