"""`rope` on a GPU: the cases of the other tiers, at size, repeated, replayed and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import operators
from tilewise.testing import rope as cases
from tilewise.testing.graphs import captured
from tilewise.testing.rope import BY_NAME, CASES, TurnCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = [
    TurnCase("llama", (2, 4096), 32, 8, 128, 128),
    TurnCase("decode", (256, 1), 64, 8, 128, 128, memory="joint"),
    TurnCase("neox", (3000,), 64, 64, 96, 24),
    TurnCase("latent", (4, 1000), 128, 1, 64, 64, True, table=torch.bfloat16),
    TurnCase("part_of_latent", (1000,), 16, 1, 576, 64, True),
    TurnCase("odd", (3, 333), 7, 3, 77, 46),
    TurnCase("wide", (50,), 3, 2, 8192, 8192),
    TurnCase("heads_first", (3, 777), 28, 4, 128, 128, memory="HND"),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: TurnCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton", DEVICE)


@pytest.mark.parametrize("case", [case for case in (*CASES, *LARGE) if case.heads_k], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_side_by_side(case: TurnCase, dtype: torch.dtype) -> None:
    cases.check_joint(case, dtype, "triton", DEVICE)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(case: TurnCase, dtype: torch.dtype) -> None:
    ways = [(cases.ours, cases.make_inputs), (cases.joint, cases.joint_inputs)]
    for function, inputs in ways if case.heads_k else ways[:1]:
        here, there = (operators.results(function(case, None), inputs(case, dtype, on)) for on in ("cpu", DEVICE))
        assert all(torch.equal(x, there[name].cpu()) for name, x in here.items())


@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_are_those_of_written_keys(interleaved: bool) -> None:
    case = TurnCase("keys", (1024,), 8, 8, 128, 128, interleaved)
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    k = inputs["k"].detach()
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"], interleaved)
    k_pages, v_pages = torch.zeros(2, 64, 16, 8, 128, dtype=k.dtype, device=DEVICE)
    tw.kv_write(k, k, k_pages, v_pages, torch.arange(1024, device=DEVICE), rope=rope)
    assert torch.equal(tw.rope(k, rope=rope), k_pages.flatten(0, 1))


@pytest.mark.parametrize("dim", [64, 100, 2048])
def test_nan_stays_in_its_row(dim: int) -> None:
    case = TurnCase("nan", (6,), 3, 0, dim, dim)
    operators.poisoned(cases.ours(case, "triton"), cases.make_inputs(case, torch.float32, DEVICE), "q", 2)


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_bits_repeat(case: TurnCase) -> None:
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (operators.results(cases.ours(case, "triton"), inputs) for _ in range(4))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_tokens_behind_the_reach_of_32_bits() -> None:
    """2**31 elements and more in one tensor: the last tokens are as they are alone."""
    tokens = 2**31 // 4096 + 3
    q = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    q[-2:] = torch.randn(2, 32, 128, device=DEVICE)
    cos, sin = tw.rope_tables(128, 100, device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE) % 100
    turned = tw.rope(q, rope=tw.Rope(cos, sin, positions))
    want = tw.rope(q[-2:].clone(), rope=tw.Rope(cos, sin, positions[-2:].clone()))
    assert torch.equal(turned[-2:], want)
    assert not turned[:-2].any()
    tw.rope(q, rope=tw.Rope(cos, sin, positions), inplace=True)
    assert torch.equal(q, turned)
    q.requires_grad_()  # 16 heads of queries, 8 of keys, 8 of values
    outputs = tw.rope_qkv(q, 16, 8, rope=tw.Rope(cos, sin, positions))
    (dqkv,) = torch.autograd.grad(outputs, q, [x.detach() for x in outputs])
    assert torch.equal(dqkv[-2:, 24:], q.detach()[-2:, 24:])
    torch.testing.assert_close(dqkv[-2:], q.detach()[-2:], rtol=0.02, atol=0.02)
    assert not dqkv[:-2].any()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_graph_replays_with_other_positions(inplace: bool) -> None:
    case = BY_NAME["joint"]
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    q, k = inputs["q"].detach(), inputs["k"].detach()
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    copies = [cases.laid(case, x) for x in (q, k)]

    def step() -> Any:
        for copy, x in zip(copies, (q, k), strict=True):
            copy.copy_(x)
        return tw.rope(*copies, rope=rope, inplace=inplace)

    graph, turned = captured(step)
    rope.positions.add_(1).remainder_(cases.FARTHEST)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(turned, tw.rope(q, k, rope=rope), strict=True))


@pytest.mark.parametrize("second", [True, False])
def test_inductor_compiles_it_whole(second: bool) -> None:
    torch._dynamo.reset()
    inputs = cases.make_inputs(BY_NAME["batch"], torch.float32, DEVICE)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    wanted = [inputs["q"], inputs["k"]] if second else [inputs["q"]]

    def model(q: torch.Tensor, k: torch.Tensor | None = None) -> torch.Tensor:
        if k is None:
            return tw.rope(2.0 * q, rope=rope).sin().sum()
        turned_q, turned_k = tw.rope(2.0 * q, k, rope=rope)
        return turned_q.sin().sum() + turned_k.cos().sum()

    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        loss = run(*wanted)
        found.append((loss, *torch.autograd.grad(loss, wanted)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_inductor_compiles_it_side_by_side() -> None:
    """With attention, which takes values where they lie."""
    torch._dynamo.reset()
    case = TurnCase("", (2, 200), 8, 2, 64, 64)
    inputs = cases.joint_inputs(case, torch.bfloat16, DEVICE)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])

    def model(qkv: torch.Tensor) -> torch.Tensor:
        return tw.attention(*tw.rope_qkv(1.0 * qkv, 8, 2, rope=rope), mask=tw.causal)

    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        o = run(inputs["qkv"])
        found.append((o, *torch.autograd.grad(o, inputs["qkv"], o.detach())))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


def test_a_graph_replays_a_step_side_by_side() -> None:
    inputs = cases.joint_inputs(BY_NAME["batch"], torch.bfloat16, DEVICE)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])

    def step() -> Any:
        outputs = tw.rope_qkv(inputs["qkv"], 4, 2, rope=rope)
        found = torch.autograd.grad(outputs, inputs["qkv"], [x.detach().square() for x in outputs])
        return *(x.detach() for x in outputs), *found

    graph, found = captured(step)
    rope.positions.add_(1).remainder_(cases.FARTHEST)
    with torch.no_grad():
        inputs["qkv"].mul_(0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


def test_inductor_compiles_it_in_place() -> None:
    torch._dynamo.reset()
    inputs = cases.make_inputs(BY_NAME["batch"], torch.bfloat16, DEVICE)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        tw.rope(q, k, rope=rope, inplace=True)
        return q + 1.0

    found = []
    for run in (torch.compile(step, fullgraph=True), step):
        q, k = (inputs[name].detach().clone() for name in ("q", "k"))
        found.append((run(q, k), q, k))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
