"""Merging on a GPU: the properties of the other tiers, at size, and against attention over all keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import merging
from tilewise.testing.matrix import name_of
from tilewise.testing.merging import BY_NAME, CASES, MergeCase, Setting

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SETTINGS = [Setting("triton", dtype, DEVICE) for dtype in DTYPES]
LARGE = [
    MergeCase("large_pair", batch=2, seqlen=1000, heads=16, head_dim=128),
    MergeCase("large_stacked", states=33, batch=3, seqlen=17, heads=32, head_dim=128, stacked=True),
    MergeCase("large_ragged", counts=(0, 100, 1, 9) * 100, batch=None, heads=8, head_dim=64),
    MergeCase("thousands_of_heads", batch=2, seqlen=3, heads=5000, head_dim=64),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_equals_softmax(setting: Setting, case: MergeCase) -> None:
    merging.equals_softmax(setting, case)


@pytest.mark.parametrize(("check", "setting", "case"), merging.property_matrix(SETTINGS), ids=name_of)
def test_property(check: merging.Check, setting: Setting, case: MergeCase) -> None:
    check(setting, case)


@pytest.mark.parametrize("case", LARGE, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_bits_of_large_cases_repeat(setting: Setting, case: MergeCase) -> None:
    merging.repeats_are_equal(setting, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_the_keys_merge_to_attention_over_all(dtype: torch.dtype) -> None:
    """o is off by what the halves are off by, its own rounding, and weights that are off as far as lse is."""
    make = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(2, 700, 4, 64, generator=make, device=DEVICE, dtype=dtype) for _ in range(3))
    exact = [x.double() for x in (q, k, v)]
    states, off_o, off_lse, largest = [], 0.0, 0.0, 0.0
    for keys in (slice(0, 300), slice(300, None)):
        o, lse = tw.attention_with_lse(q, k[:, keys], v[:, keys])
        true, true_lse = tw.attention_with_lse(exact[0], exact[1][:, keys], exact[2][:, keys], impl="reference")
        off_o, off_lse = max(off_o, merging.error(o, true)), max(off_lse, merging.error(lse, true_lse))
        largest = max(largest, float(true.abs().max()))
        states.append((o, lse))
    o, lse = tw.merge(*states)
    want, want_lse = tw.attention_with_lse(*exact, impl="reference")
    unit, rounding = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps
    assert merging.error(o, want) <= off_o + (rounding + 2 * off_lse + 8 * unit) * largest
    assert merging.error(lse, want_lse) <= off_lse + 4 * unit * (1 + float(want_lse.abs().max()))


def test_rows_behind_the_reach_of_32_bits() -> None:
    """2**31 elements and more in one tensor: the last rows are as they are alone."""
    rows = 2**31 // (8 * 128) + 5
    o = torch.zeros(rows, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros(8, rows, device=DEVICE)
    o[-4:] = torch.arange(4, device=DEVICE, dtype=torch.bfloat16)[:, None, None]
    merged, total = tw.merge((o, lse), (o, lse))
    assert torch.equal(merged[-4:], o[-4:])
    assert not merged[:-4].any()
    torch.testing.assert_close(total, torch.full_like(total, 2.0).log())


def test_a_graph_replays_with_other_states() -> None:
    inputs = merging.make_inputs(replace(BY_NAME["pair"], unseen=False), torch.bfloat16, DEVICE)
    states = [(o.detach(), lse.detach()) for o, lse in zip(inputs.o, inputs.lse, strict=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tw.merge(*states)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merged, total = tw.merge(*states)
    for o, lse in states:
        o.mul_(-2.0)
        lse.add_(1.0)
    graph.replay()
    want = tw.merge(*states)
    assert torch.equal(merged, want[0])
    assert torch.equal(total, want[1])


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()
    inputs = merging.make_inputs(replace(BY_NAME["pair"], unseen=False), torch.float32, DEVICE)

    def model(*leaves: torch.Tensor) -> torch.Tensor:
        o, lse = tw.merge((leaves[0] * 2.0, leaves[2]), (leaves[1], leaves[3]))
        return o.sin().sum() + lse.square().sum()

    leaves = (*inputs.o, *inputs.lse)
    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        loss = run(*leaves)
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
