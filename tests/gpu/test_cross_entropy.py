"""Cross entropy on a GPU: the cases of the other tiers, at size, repeated, replayed, compiled, and in little memory."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.core.errors import InputError
from tilewise.testing import cross_entropy as cases
from tilewise.testing import operators
from tilewise.testing.cross_entropy import BY_NAME, LINEAR, LOGITS, LossCase
from tilewise.testing.graphs import captured

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = [
    *(LossCase(f"large_{n}", (200,), n, smoothing=0.1, z_loss=0.001) for n in (32000, 50257, 128256, 262144)),
    LossCase("many_tokens", (50000,), 100),
    LossCase("large_none", (300,), 32000, reduction="none"),
]
LARGE_LINEAR = [
    LossCase("layer", (3000,), 5000, 256, bias=True, chunk=1024),
    LossCase("layer_odd", (1500,), 5003, 256, softcap=30.0, smoothing=0.1),
    LossCase("layer_none", (3000,), 5000, 256, reduction="none", chunk=1024),
    LossCase("layer_sum", (700,), 3000, 512, reduction="sum", z_loss=0.001),
]


@pytest.mark.parametrize("case", [*LOGITS, *LINEAR, *LARGE, *LARGE_LINEAR], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: LossCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton", DEVICE)


@pytest.mark.parametrize("case", [*LARGE, *LARGE_LINEAR], ids=repr)
def test_bits_repeat(case: LossCase) -> None:
    inputs = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first, *others = (operators.results(cases.ours(case, "triton"), inputs) for _ in range(3))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_logits_behind_the_reach_of_32_bits() -> None:
    """2**31 elements and more: the last tokens are as they are alone."""
    vocabulary = 131072
    logits = torch.zeros(2**31 // vocabulary + 3, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    logits[-2:] = torch.randn(2, vocabulary, device=DEVICE)
    target = torch.full((len(logits),), -100, device=DEVICE)
    target[-2:] = 7
    logits.requires_grad_()
    (want,) = torch.autograd.grad(tw.cross_entropy(logits[-2:], target[-2:]), logits)
    want = want[-2:].clone()
    loss = tw.cross_entropy(logits, target)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.equal(loss, tw.cross_entropy(logits[-2:], target[-2:]))
    assert torch.equal(found[-2:], want)
    assert not found[:-2].any()


def test_classes_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 5, device=DEVICE)
    target = torch.tensor([2, 5, -1], device=DEVICE)
    torch.testing.assert_close(tw.cross_entropy(logits, target), tw.cross_entropy(logits[:1], target[:1]))
    monkeypatch.setenv("TILEWISE_DEBUG", "1")
    with pytest.raises(InputError, match="class 5"):
        tw.cross_entropy(logits, target)


def test_a_linear_layer_takes_little_memory() -> None:
    """15 % of what logits and their gradient take in float32, weight's gradient in float32 among it."""
    tokens, vocabulary, hidden = 16384, 131072, 1024
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device=DEVICE)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tw.linear_cross_entropy(x, weight, target).backward()
    assert torch.cuda.max_memory_allocated() - before <= 0.15 * 2 * 4 * tokens * vocabulary


@pytest.mark.parametrize("name", ["vocabulary_1000", "linear_chunks"])
def test_a_graph_replays_with_other_tokens(name: str) -> None:
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.float32, DEVICE)
    leaves = [x for x in inputs.values() if x.requires_grad]

    def step() -> tuple[torch.Tensor, ...]:
        loss = cases.ours(case, "triton")(**inputs)
        assert isinstance(loss, torch.Tensor)
        return (loss, *torch.autograd.grad(loss, leaves))

    graph, found = captured(step)
    with torch.no_grad():
        for x in leaves:
            x.mul_(-0.5)
    inputs["target"].copy_(inputs["target"].flip(0))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


@pytest.mark.parametrize("name", ["vocabulary_1000", "none", "linear_chunks", "linear_none"])
def test_inductor_compiles_it_whole(name: str) -> None:
    torch._dynamo.reset()
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.float32, DEVICE)
    leaves = [x for x in inputs.values() if x.requires_grad]

    def model(**inputs: torch.Tensor) -> torch.Tensor:
        return cases.ours(case, None)(**inputs).sin().sum()

    found = []
    for run in (torch.compile(model, fullgraph=True), model):
        loss = run(**inputs)
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float16_holds_gradients_whose_sums_it_does_not(reduction: str) -> None:
    cases.check_large_sums(reduction, "triton", DEVICE)


@pytest.mark.parametrize("offset", [1e4, -1e6, 1e9, -1e30])
@pytest.mark.parametrize("linear", [False, True])
def test_what_all_logits_have_added_changes_nothing(offset: float, linear: bool) -> None:
    cases.check_far_logits(offset, linear, "triton", DEVICE)
