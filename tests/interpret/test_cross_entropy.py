"""The Triton kernels of cross entropy: equal to PyTorch, alone and under a linear layer; broken twins are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.cross_entropy import triton_cross_entropy
from tilewise.testing import cross_entropy as cases
from tilewise.testing import operators
from tilewise.testing.cross_entropy import BY_NAME, LINEAR, LOGITS, LossCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_STEP", 32), ("_BLOCK", 16), ("_TOKENS", 4)):
        monkeypatch.setattr(triton_cross_entropy, name, size)


@pytest.mark.parametrize("case", [*LOGITS, *LINEAR], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("small", [False, True])
def test_equals_pytorch(case: LossCase, dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        small_steps(monkeypatch)
    cases.check(case, dtype, "triton")


def test_wide() -> None:
    cases.check(LossCase("wide", (3,), 20001, smoothing=0.1, z_loss=0.01), torch.float16, "triton")


def test_nan_stays_in_its_row() -> None:
    case = BY_NAME["none"]
    inputs = cases.make_inputs(case, torch.float32)
    inputs["target"].fill_(3)
    bad = {"logits": inputs["logits"].detach().clone(), "target": inputs["target"]}
    bad["logits"][1, 2, 7] = torch.nan
    clean, found = (cases.ours(case, "triton")(**x) for x in (inputs, bad))
    assert found.isnan().nonzero().tolist() == [[1, 2]]
    bad["logits"].requires_grad_()
    gradient = operators.results(cases.ours(case, "triton"), bad)["dlogits"]
    assert gradient[1, 2].isnan().all()
    assert gradient.isnan().sum() == gradient.shape[-1]
    assert torch.equal(clean[0], found[0])


def test_logits_of_ignored_tokens_are_not_read() -> None:
    logits = torch.full((2, 5), torch.nan)
    logits[1] = 0.0
    logits.requires_grad_()
    loss = tw.cross_entropy(logits, torch.tensor([-100, 2]), impl="triton")
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(5.0).log())
    assert not logits.grad[0].any()


def test_classes_out_of_range_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.ops.cross_entropy import problem

    monkeypatch.setattr(problem, "values_checked", lambda device: False)
    logits = torch.randn(4, 5, requires_grad=True)
    target = torch.tensor([5, -1, 2**40, 3])
    for impl in ("triton", "cpu", "reference"):
        loss = tw.cross_entropy(logits, target, impl=impl)
        torch.testing.assert_close(loss, tw.cross_entropy(logits[3:], target[3:]))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not gradient[:3].any()
        assert gradient[3].all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(reduction: str) -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64)
    loss = tw.cross_entropy(logits, target, reduction=reduction, impl="triton")
    loss.sum().backward()
    assert loss.shape == (() if reduction != "none" else (0,))
    assert bool(loss.isnan().any()) == (reduction == "mean")
    assert logits.grad.shape == (0, 5)


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for _ in range(2):
        for case in (*LOGITS, *LINEAR):
            cases.check(case, torch.float32, "triton")


TWINS = [
    ("token_losses", "- (1.0 - smoothing) * (own - top)", "- (own - top)", "smooth"),
    ("token_losses", "+ z_loss * lse * lse", "", "z_loss"),
    ("token_losses", "tl.sum(sum_i, 0) / width + (base - top)", "tl.sum(sum_i, 0) / width", "smooth"),
    ("token_losses", "l_i * tl.math.exp2((m_i - top) * LOG2E)", "l_i", "vocabulary_1000"),
    ("token_losses", "tl.where(seen, loss, 0.0)", "loss", "none"),
    ("token_losses", 'tl.where(offs < width, s, float("-inf"))', "s", "linear_chunks"),
    ("token_slopes", "(1.0 + 2.0 * z_loss * (top + log_sum))", "1.0", "z_loss"),
    ("token_slopes", "- smoothing / width", "", "smooth"),
    ("token_slopes", "slope *= 1.0 - t * t", "slope *= 1.0", "linear_softcap"),
    ("token_slopes", "DLOSS + row * stride_dloss", "DLOSS", "linear_none"),
    ("token_slopes", "tl.where(seen, slope * factor, 0.0)", "slope * factor", "linear"),
    ("add_losses", "acc += tl.load", "acc = tl.load", "sum"),
    ("add_losses", "tl.store(SCALE, 1.0 / tl.maximum(count, 1.0))", "tl.store(SCALE, 1.0)", "vocabulary_64"),
    ("scale_gradient", "(x * factor)", "x", "linear"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(kernel, old, new, name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)
    cases.check(BY_NAME[name], torch.float32, "triton")  # whole, it passes
    copy = broken_copy(triton_cross_entropy, old, new, tmp_path)
    monkeypatch.setattr(triton_cross_entropy, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        cases.check(BY_NAME[name], torch.float32, "triton")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float16_holds_gradients_whose_sums_it_does_not(reduction: str) -> None:
    cases.check_large_sums(reduction, "triton")


@pytest.mark.parametrize("offset", [1e4, -1e6, 1e9, -1e30])
@pytest.mark.parametrize("linear", [False, True])
def test_what_all_logits_have_added_changes_nothing(offset: float, linear: bool) -> None:
    cases.check_far_logits(offset, linear, "triton")
