"""Gated linear units on a GPU: as near to PyTorch as elsewhere, at size, replayed, compiled; bits repeat."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import glu as cases
from tilewise.testing import operators
from tilewise.testing.glu import ACTIVATIONS, BY_NAME, CASES, GluCase
from tilewise.testing.graphs import captured

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = [
    GluCase("llama", (4096, 14336)),
    GluCase("llama_packed", (4096, 14336), "packed"),
    GluCase("not_a_power", (1000, 11008), "packed"),
    GluCase("by_8", (333, 1000), "packed"),
    GluCase("odd_packed", (255, 4099), "packed"),
    GluCase("very_wide", (17, 262144), "packed"),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: GluCase, activation: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, activation, "triton", DEVICE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_in_its_row(activation: str) -> None:
    case = BY_NAME["wide"]
    for name in ("gate", "up"):
        inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
        operators.poisoned(cases.ours(case, activation, "triton"), inputs, name, 2)


@pytest.mark.parametrize("lies", ["", "packed"])
def test_bits_repeat(lies: str) -> None:
    case = GluCase("repeats", (513, 4096), lies)
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (operators.results(cases.ours(case, "gelu", "triton"), inputs) for _ in range(3))
    assert all(torch.equal(other[name], x) for other in others for name, x in first.items())


@pytest.mark.parametrize("packed", [False, True])
def test_more_than_two_to_the_31_numbers(packed: bool) -> None:
    """The last rows are as they are alone."""
    rows, width = 2**16 + 3, 2**15
    gate = torch.zeros(rows, width * (2 if packed else 1), device=DEVICE, dtype=torch.bfloat16)
    gate[-2:].normal_()
    up = None if packed else torch.ones_like(gate)
    o = tw.swiglu(gate, up)
    assert torch.equal(o[-2:], tw.swiglu(gate[-2:], up if up is None else up[-2:]))
    assert not o[:-2].any()
    do = torch.ones_like(o)
    last = gate[-2:].clone().requires_grad_()
    (want,) = torch.autograd.grad(tw.swiglu(last, up if up is None else up[-2:]), last, do[-2:])
    del o
    (dgate,) = torch.autograd.grad(tw.swiglu(gate.requires_grad_(), up), gate, do)
    assert torch.equal(dgate[-2:], want)


@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_replays_with_other_rows(packed: bool) -> None:
    gate = torch.randn(64, 5000, device=DEVICE)
    up = None if packed else torch.randn_like(gate)
    graph, o = captured(lambda: tw.geglu(gate, up))
    gate.normal_()
    graph.replay()
    assert torch.equal(o, tw.geglu(gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_inductor_compiles_it_whole(activation: str, packed: bool) -> None:
    torch._dynamo.reset()
    case = BY_NAME["wide_packed" if packed else "wide"]
    inputs = cases.make_inputs(case, torch.float32, DEVICE)

    def model(*tensors: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[activation](*(2.0 * x for x in tensors)).sin().sum()

    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        loss = run(*inputs.values())
        found.append((loss, *torch.autograd.grad(loss, list(inputs.values()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
