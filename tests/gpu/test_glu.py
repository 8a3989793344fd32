"""Gated linear units on a GPU: the cases of the other tiers, at size, repeated, replayed and compiled."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import glu as cases
from tilewise.testing import operators
from tilewise.testing.glu import BY_NAME, CASES, KINDS, GluCase
from tilewise.testing.graphs import captured

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = [
    GluCase("block", (4096, 11008)),
    GluCase("packed_block", (2, 2048, 14336), packed=True),
    GluCase("odd", (999, 5461), packed=True),
    GluCase("wide", (3, 65536), packed=True),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: GluCase, kind: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, kind, "triton", DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gate", "up"])
def test_nan_stays_in_its_row(kind: str, name: str) -> None:
    case = BY_NAME["width_1000"]
    operators.poisoned(cases.ours(case, kind, "triton"), cases.make_inputs(case, torch.bfloat16, DEVICE), name, 2)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rounded_gelu(dtype: torch.dtype) -> None:
    cases.check_rounded_gelu(dtype, "triton", DEVICE)


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_bits_repeat(case: GluCase) -> None:
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (operators.results(cases.ours(case, "silu", "triton"), inputs) for _ in range(4))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_behind_the_reach_of_32_bits(packed: bool) -> None:
    """2**31 elements and more in one tensor: the last rows are as they are alone."""
    both = torch.zeros(2**31 // 4096 + 3, 4096, dtype=torch.bfloat16, device=DEVICE)
    both[-2:] = torch.randn(2, 4096, device=DEVICE)
    last, both = both[-2:].clone().requires_grad_(), both.requires_grad_()
    alone = tw.swiglu(last, None if packed else last)
    o = tw.swiglu(both, None if packed else both)
    assert torch.equal(o[-2:], alone)
    assert not o[:-2].any()
    do = torch.randn_like(alone)
    (want,) = torch.autograd.grad(alone, last, do)
    (got,) = torch.autograd.grad(o, both, torch.cat((torch.zeros_like(o[:-2]), do)))
    assert torch.equal(got[-2:], want)


def test_a_graph_replays_with_other_rows() -> None:
    gate = torch.randn(64, 5000, device=DEVICE)
    graph, o = captured(lambda: tw.swiglu(gate))
    gate.normal_()
    graph.replay()
    assert torch.equal(o, tw.swiglu(gate))


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()
    gate, up = (torch.randn(6, 64, device=DEVICE, requires_grad=True) for _ in range(2))

    def model(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return tw.swiglu(2.0 * gate, up).sin().sum()

    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        loss = run(gate, up)
        found.append((loss, *torch.autograd.grad(loss, (gate, up))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
