"""Softmax on a GPU: the cases of the other tiers, at size, repeated, replayed and compiled."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import operators
from tilewise.testing import softmax as cases
from tilewise.testing.graphs import captured
from tilewise.testing.softmax import BY_NAME, CASES, SoftmaxCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = [
    SoftmaxCase("scores", (4, 16, 128, 2048), (4, 1, 128, 2048)),
    SoftmaxCase("routers", (20000, 64)),
    *(SoftmaxCase(f"width_{n}", (9, n)) for n in (4096, 16384, 16385, 32000, 32769, 128256, 262144)),
    SoftmaxCase("wide_mask", (3, 5, 40000), (3, 1, 40000)),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: SoftmaxCase, log: bool, dtype: torch.dtype) -> None:
    cases.check(case, dtype, log, "triton", DEVICE)


@pytest.mark.parametrize("width", [100, 20000, 100000])
@pytest.mark.parametrize("log", [False, True])
def test_nan_stays_in_its_row(width: int, log: bool) -> None:
    case = SoftmaxCase("nan", (6, width))
    operators.poisoned(cases.ours(case, log, "triton"), cases.make_inputs(case, torch.float32, DEVICE), "x", 2)


@pytest.mark.parametrize("case", LARGE, ids=repr)
@pytest.mark.parametrize("log", [False, True])
def test_bits_repeat(case: SoftmaxCase, log: bool) -> None:
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (operators.results(cases.ours(case, log, "triton"), inputs) for _ in range(4))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_rows_behind_the_reach_of_32_bits() -> None:
    """2**31 elements and more in one tensor: the last rows are as they are alone."""
    for rows, width in ((2**31 // 2048 + 3, 2048), (2**31 // 65536 + 3, 65536)):
        x = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
        x[-2:] = torch.randn(2, width, device=DEVICE)
        x.requires_grad_()
        o = tw.softmax(x)
        assert torch.equal(o[-2:], tw.softmax(x[-2:]))
        do = torch.randn(2, width, device=DEVICE, dtype=torch.bfloat16)
        (want,) = torch.autograd.grad(tw.softmax(x[-2:]), x, do)
        (dx,) = torch.autograd.grad(o[-2:], x, do)
        assert torch.equal(dx[-2:], want[-2:])
        assert not dx[:-2].any()
        del x, o, want, dx


def test_a_graph_replays_with_other_rows() -> None:
    x = torch.randn(64, 5000, device=DEVICE)
    graph, o = captured(lambda: tw.softmax(x))
    x.normal_()
    graph.replay()
    assert torch.equal(o, tw.softmax(x))


@pytest.mark.parametrize("function", [tw.softmax, tw.log_softmax])
def test_inductor_compiles_it_whole(function) -> None:
    torch._dynamo.reset()
    x = cases.make_inputs(BY_NAME["mask"], torch.float32, DEVICE)["x"]

    def model(x: torch.Tensor) -> torch.Tensor:
        return function(2.0 * x).sin().sum()

    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        loss = run(x)
        found.append((loss, *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
