"""`linear` on a GPU: the checks of the other tiers with layers of models, and bits of rows in batches of any size."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tilewise.ops.linear import linear
from tilewise.testing import linear as cases
from tilewise.testing.graphs import captured
from tilewise.testing.linear import CASES, LinearCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = (1, 2, 3, 16, 17, 64, 65, 200, 1000)
SHAPES = (  # out_features, in_features: of models, and sizes that nothing divides
    (960, 576), (576, 1536), (49152, 576),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
    (6144, 4096), (24576, 4096), (4096, 12288),
    (1, 4096), (2, 1254), (1001, 1001), (16389, 130), (8200, 4),
)  # fmt: skip
LARGE = [
    *(LinearCase(f"large_{n}_{k}", (70, k), n) for n, k in SHAPES),
    LinearCase("large_rows", (3, 1111, 1000), 1500),
    LinearCase("large_sliced", (700, 2048), 1024, sliced=True),
    LinearCase("large_head", (65, 1024), 49152, bias=False, out=torch.float32),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(dtype: torch.dtype, case: LinearCase) -> None:
    cases.check(case, dtype, "triton", DEVICE)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", [None, torch.float32], ids=str)
def test_a_row_has_the_bits_that_it_has_alone(out, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    layer = cases.layer_of(out_features, in_features, dtype, None, DEVICE, out=out)
    cases.check_invariance(layer, cases.rows_of(12, in_features, dtype, DEVICE), NUMBERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows(dtype: torch.dtype) -> None:
    layer = cases.layer_of(1024, 3072, dtype, None, DEVICE, out=torch.float32)
    cases.check_invariance(layer, cases.rows_of(40, 3072, dtype, DEVICE), range(1, 260))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_repeat(dtype: torch.dtype) -> None:
    layer, x = cases.layer_of(6144, 4096, dtype, None, DEVICE), cases.rows_of(3000, 4096, dtype, DEVICE)
    first, *others = (layer(x) for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


def test_results_behind_the_reach_of_32_bits() -> None:
    rows, width = 2**31 // 65_536 + 70, 65_536
    x, weight = (torch.randn(n, 64, dtype=torch.bfloat16, device=DEVICE) for n in (rows, width))
    found = linear(x, weight)
    assert torch.equal(found[-9:], linear(x[-9:], weight))
    assert torch.equal(found[:9], linear(x[:9], weight))


def test_rows_and_weights_behind_the_reach_of_32_bits() -> None:
    many, width = 2**31 // 1024 + 70, 1024
    x, few = (torch.randn(n, width, dtype=torch.bfloat16, device=DEVICE) for n in (many, 48))
    torch.testing.assert_close(linear(x, few)[-70:], linear(x[-70:], few), rtol=0.0, atol=0.0)
    found, want = linear(few, x)[:, -70:], few.float() @ x[-70:].float().t()
    torch.testing.assert_close(found.float(), want, rtol=2.0**-8, atol=1e-3)


def test_the_host_waits_for_nothing() -> None:
    layer, x = cases.layer_of(1000, 1000, torch.bfloat16, None, DEVICE), torch.ones(9, 1000, device=DEVICE).bfloat16()
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_with_other_rows() -> None:
    layer, x = cases.layer_of(4096, 1024, torch.bfloat16, None, DEVICE), cases.rows_of(17, 1024, torch.bfloat16, DEVICE)
    graph, found = captured(lambda: layer(x))
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(found, layer(x))


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()
    layer, x = cases.layer_of(200, 64, torch.float32, None, DEVICE), torch.randn(5, 64, device=DEVICE)
    weight = torch.randn(30, 200, device=DEVICE)

    def model(x: torch.Tensor) -> torch.Tensor:
        return linear(layer(2.0 * x), weight) + 1.0

    assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))
