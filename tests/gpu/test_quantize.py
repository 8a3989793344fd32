"""`quantize_qkv` on a GPU: the bits of the CPU, at size, repeated, replayed and compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import quantize as cases
from tilewise.testing.graphs import captured
from tilewise.testing.quantize import BY_NAME, CASES, RAGGED, QuantizeCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = [
    QuantizeCase("sage2", tw.Sage2(), ((1000, 4099),) * 2, (8, 2), 128, 128),
    QuantizeCase("sage2_int4", tw.Sage2("int4"), ((2048, 2048),), (8, 8), 64, 64, memory="HND"),
    QuantizeCase("sage1", tw.Sage1(), ((777, 1234),) * 3, (4, 1), 96, 80, memory="joint"),
    QuantizeCase("fa3", tw.FA3FP8(), ((3000, 5000),), (6, 2), 256, 256),
    QuantizeCase("tokens", tw.FP8("token", "token", "block"), ((513, 1025),) * 2, (4, 4), 40, 72),
    QuantizeCase("rotated", replace(tw.Sage2("int4"), rotate="hadamard"), ((1024, 2048),), (4, 2), 128, 128),
    QuantizeCase("rotated_wide", tw.FP8("block", "block", rotate="hadamard"), ((300, 700),), (2, 1), 256, 256),
    QuantizeCase("packed", tw.Sage2("int4"), (*RAGGED, (2000, 3000), (0, 1)), (8, 2), 128, 128, packed=True),
    QuantizeCase("all", tw.Sage(smooth=("q", "k", "v")), ((64, 20000),), (1, 1), 128, 128),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(case: QuantizeCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton", DEVICE)


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_codes_mean_what_was_given(case: QuantizeCase) -> None:
    cases.check_meaning(case, torch.bfloat16, "triton", DEVICE)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["sage2", "all_centred", "fa3", "blocks", "nothing_centred", "values_as_numbers"])
def test_what_is_not_finite(name: str, bad: float) -> None:
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.float32)
    inputs["q"][0, 3, 0, 5] = inputs["k"][0, 130, 1, 2] = inputs["v"][1, 7, 1, 4] = bad
    found = []
    for device in (DEVICE, "cpu"):
        there = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
        found.append(cases.tensors(tw.quantize_qkv(**there, scheme=case.scheme)))
        found[-1].pop("q_bias", None)
    cases.alike(*found, rotated=False)


@pytest.mark.parametrize("name", ["rotated", "rotated_head"])
def test_what_is_not_finite_makes_its_rotated_row_nan(name: str) -> None:
    inputs = cases.make_inputs(BY_NAME[name], torch.bfloat16, DEVICE)
    inputs["q"][0, 3, 0, 5] = torch.inf
    x = tw.quantize_qkv(**inputs, scheme=BY_NAME[name].scheme)
    q = x.numbers()[0]
    assert q[0, 3, 0].isnan().any()
    assert not q[1].isnan().any()


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_bits_repeat(case: QuantizeCase) -> None:
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (cases.tensors(tw.quantize_qkv(**inputs, scheme=case.scheme)) for _ in range(4))
    for other in others:
        assert all(torch.equal(x.float(), other[name].float()) for name, x in first.items())


def test_tokens_behind_the_reach_of_32_bits() -> None:
    """2**31 elements and more in one tensor: the last sequence is what it is alone."""
    batch = 2**31 // (4096 * 128) + 2
    k = torch.zeros(batch, 4096, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    k[-1] = torch.randn(4096, 1, 128, device=DEVICE)
    q = torch.zeros(batch, 1, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    x = tw.quantize_qkv(q, k, k, scheme=tw.Sage2())
    y = tw.quantize_qkv(q[-1:], k[-1:], k[-1:], scheme=tw.Sage2())
    for name in ("k", "v", "k_scale", "v_scale", "k_mean"):
        assert torch.equal(getattr(x, name)[-1:].float(), getattr(y, name).float()), name
        assert not getattr(x, name)[:-1].view(torch.uint8).any(), name


@pytest.mark.parametrize("name", ["sage2_int4", "fa3", "sage2_packed"])
def test_a_graph_replays_with_other_numbers(name: str) -> None:
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    graph, x = captured(lambda: tw.quantize_qkv(**inputs, scheme=case.scheme))
    for part in "qkv":
        inputs[part].mul_(0.7).add_(1.0)
    graph.replay()
    want = cases.tensors(tw.quantize_qkv(**inputs, scheme=case.scheme))
    assert all(torch.equal(part.float(), want[at].float()) for at, part in cases.tensors(x).items())


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()
    case = BY_NAME["sage2_int4"]
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)

    def step(q: Any, k: Any, v: Any, layout: Any) -> Any:
        x = tw.quantize_qkv(q, k, v, scheme=case.scheme, layout=layout)
        return x.q, x.k, x.v, x.q_scale, x.k_scale, x.q_bias

    for found, want in zip(torch.compile(step, fullgraph=True)(**inputs), step(**inputs), strict=True):
        assert torch.equal(found.float(), want.float())
