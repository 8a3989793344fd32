"""Norms on a GPU: the checks of the other tiers, at size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise import nn
from tilewise.quant import encode
from tilewise.testing import norm, operators
from tilewise.testing.norm import BY_NAME, CASES, NormCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (128, 768, 1001, 4096, 5120, 8192, 12288, 16384, 32769, 65536)
LARGE = [
    *(NormCase(f"large_rms_{n}", (2, 300, n), residual=True) for n in WIDTHS),
    *(NormCase(f"large_layer_{n}", (600, n), centred=True, bias=True) for n in WIDTHS),
    NormCase("large_layer_residual", (5000, 4096), centred=True, bias=True, residual=True),
    NormCase("many_heads", (4, 4096, 32, 128), wide_weight=True),
    NormCase("large_sliced", (700, 2048), residual=True, sliced=True),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_pytorch(dtype: torch.dtype, case: NormCase) -> None:
    norm.check(case, dtype, "triton", DEVICE)


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_bits_repeat(case: NormCase) -> None:
    inputs = norm.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (operators.results(norm.ours(case, "triton"), inputs) for _ in range(3))
    for other in others:
        assert all(torch.equal(first[name], value) for name, value in other.items())


@pytest.mark.parametrize("name", ["rms_residual", "layer_residual"])
def test_nan_stays_in_its_row(name: str) -> None:
    case = replace(BY_NAME[name], shape=(50, 12288))
    inputs = {k: x.detach() for k, x in norm.make_inputs(case, torch.bfloat16, DEVICE).items()}
    operators.poisoned(norm.ours(case, "triton"), inputs, "x", 3)


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
@pytest.mark.parametrize("width", [128, 1001, 4096, 65536])
@pytest.mark.parametrize("centred", [False, True])
def test_codes_are_those_of_encode(centred: bool, width: int, quantize: str) -> None:
    case = NormCase("codes", (100, width), centred=centred, bias=centred, residual=True)
    inputs = {k: x.detach() for k, x in norm.make_inputs(case, torch.bfloat16, DEVICE).items()}
    codes, scale, s = norm.ours(case, "triton", quantize)(**inputs)
    o, sums = norm.ours(replace(case, out=torch.float32), "triton")(**inputs)
    want = encode(o, quantize)
    assert torch.equal(s, sums)
    torch.testing.assert_close(scale, want.scale, rtol=1e-6, atol=0.0)
    # another order of multiplications and additions may take a number over the middle between two codes
    assert float((codes.view(torch.uint8) != want.data.view(torch.uint8)).float().mean()) < 1e-3


def test_rows_behind_the_reach_of_32_bits() -> None:
    """2**31 elements and more in one tensor: the last rows are as they are alone."""
    rows = 2**31 // 4096 + 5
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-4:] = torch.randn(4, 4096, device=DEVICE)
    x.requires_grad_()
    o = tw.rms_norm(x)
    alone = x[-4:].detach().requires_grad_()
    want = tw.rms_norm(alone)
    assert torch.equal(o[-4:], want)
    assert not o[:-4].any()
    (dx,) = torch.autograd.grad(o, x, torch.ones_like(o))
    (dx_alone,) = torch.autograd.grad(want, alone, torch.ones_like(want))
    torch.testing.assert_close(dx[-4:], dx_alone)


@pytest.mark.parametrize("width", [4096, 12288])
def test_a_graph_replays_with_other_numbers(width: int) -> None:
    x, residual, do = (torch.randn(300, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    x.requires_grad_()

    def step() -> list[torch.Tensor]:
        o, s = tw.rms_norm(x, weight, residual=residual)
        return [o, s, *torch.autograd.grad((o, s), (x, weight), (do, do))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.mul_(-2.0)
        residual.add_(1.0)
        do.mul_(0.5)
    graph.replay()
    for got, want in zip(found, step(), strict=True):
        assert torch.equal(got, want)


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()
    x = torch.randn(64, 512, device=DEVICE, requires_grad=True)
    block = torch.nn.Sequential(nn.RMSNorm(512), torch.nn.Linear(512, 512), nn.LayerNorm(512)).to(DEVICE)
    leaves = (x, *block.parameters())
    found = []
    for run in (torch.compile(block, fullgraph=True), block):
        loss = run(x * 2.0).sin().sum()
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
