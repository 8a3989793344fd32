"""Derivatives of score formulas against PyTorch's autograd, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given

import tilewise as tw
from tests.formula.test_trace import SCORES, scores, symbols
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import lit
from tilewise.formula.formula import Score
from tilewise.formula.grad import UPSTREAM, gradients
from tilewise.formula.walk import postorder
from tilewise.testing.strategies import as_score_function, captured_tensors, float_trees

WHOLE = scores().shape


def by_formula(score: Score, s: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradient of s, and of every captured float tensor by scattering the adjoint of each load."""
    root = score.structure.root
    symbol = next((n for n in postorder([root]) if n.op == "sym" and n.value == "s"), lit(0.0))
    loads = [load for load in score.structure.loads if load.kind == "float"]
    values = {**symbols(), "s": s, UPSTREAM: g}
    made = evaluate(gradients(root, [symbol, *loads]), values, score.tensors, score.numbers, torch.float64)
    captured = [torch.zeros_like(t) for t in score.tensors]
    for load, adjoint in zip(loads, made[1:], strict=True):
        index = evaluate(load.args, values, score.tensors, score.numbers, torch.float64) if load.args else []
        index = tuple(x.expand(WHOLE) for x in index)
        captured[load.value].index_put_(index, adjoint.expand(WHOLE), accumulate=True) if index else captured[
            load.value
        ].add_(adjoint.expand(WHOLE).sum())
    return made[0].expand(WHOLE), captured


def by_autograd(function: Any, tensors: list[torch.Tensor], s: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    leaves = [s.clone().requires_grad_(), *(t for t in tensors if t.is_floating_point())]
    for leaf in leaves[1:]:
        leaf.requires_grad_()
    value = torch.as_tensor(function(leaves[0], **symbols())).to(torch.float64).expand(WHOLE)
    try:
        if not value.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        return list(torch.autograd.grad(value, leaves, g, allow_unused=True, materialize_grads=True))
    finally:
        for leaf in leaves[1:]:
            leaf.requires_grad_(False)


def compare(function: Any) -> None:
    s, g = scores(), torch.randn(WHOLE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    score = tw.score(function)
    ds, captured = by_formula(score, s, g)
    want_s, *want = by_autograd(function, list(score.tensors), s, g)
    torch.testing.assert_close(ds, want_s, rtol=1e-9, atol=1e-9)
    found = [c for c, t in zip(captured, score.tensors, strict=True) if t.is_floating_point()]
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "floor_divide"])  # PyTorch has no derivative of it
def test_named_scores(name: str) -> None:
    compare(SCORES[name])


@given(tree=float_trees())
def test_random_scores(tree: Any) -> None:
    compare(as_score_function(tree, captured_tensors()))


@pytest.mark.parametrize(
    ("function", "at", "slope"),
    [
        (lambda s, b, h, i, j: abs(s), 0.0, 0.0),
        (lambda s, b, h, i, j: torch.minimum(s, s), 1.0, 1.0),
        (lambda s, b, h, i, j: torch.maximum(s, 2.0 * s), 0.0, 1.5),
        (lambda s, b, h, i, j: torch.floor(s), 0.5, 0.0),
        (lambda s, b, h, i, j: s.to(torch.int32) * 1.0, 0.5, 0.0),
    ],
)
def test_kinks_follow_pytorch(function: Any, at: float, slope: float) -> None:
    s = torch.full(WHOLE, at, dtype=torch.float64)
    ds, _ = by_formula(tw.score(function), s, torch.ones_like(s))
    assert torch.equal(ds, torch.full_like(s, slope))


F = torch.nn.functional
SMOOTH: dict[str, Any] = {
    "log1p": lambda s, b, h, i, j: torch.log1p(s),
    "expm1": lambda s, b, h, i, j: torch.expm1(s),
    "softplus": lambda s, b, h, i, j: F.softplus(s),
    "softplus_beta": lambda s, b, h, i, j: F.softplus(s, beta=0.5, threshold=10),
    "logsigmoid": lambda s, b, h, i, j: F.logsigmoid(s),
    "silu": lambda s, b, h, i, j: F.silu(s),
    "sqrt": lambda s, b, h, i, j: abs(s).sqrt() + (s * s + 1).rsqrt(),
    "powers": lambda s, b, h, i, j: s**2.0 + (abs(s) + 1) ** -0.5 + (s * s + 1) ** -1,
    "relu": lambda s, b, h, i, j: F.relu(s) + torch.relu(-s * 3),
    "steps": lambda s, b, h, i, j: s.sign() + s.ceil() + s.trunc() * s,
}


def at(s: torch.Tensor) -> dict[str, torch.Tensor]:
    zero = torch.tensor(0)
    return {"b": zero, "h": zero, "i": zero, "j": zero, "s": s}


def slope(function: Any, s: torch.Tensor) -> torch.Tensor:
    score = tw.score(function)
    symbol = next(n for n in postorder([score.structure.root]) if n.op == "sym" and n.value == "s")
    values = {**at(s), UPSTREAM: torch.ones_like(s)}
    return evaluate(gradients(score.structure.root, [symbol]), values, (), score.numbers, s.dtype)[0]


def wide(name: str) -> torch.Tensor:
    """Scores of either sign and every size from 1e-30 to 80; above -1 for the logarithm."""
    size = torch.logspace(-30, 1.9, 200, dtype=torch.float64).float()
    return torch.cat([size, -size[size < 1] if name == "log1p" else -size])


@pytest.mark.parametrize("name", SMOOTH)
def test_composed_functions_are_as_accurate_as_pytorch(name: str) -> None:
    """In float32, against float64: a composition that cancels near 0 or overflows far out would be far off."""
    s = wide(name)
    leaf = s.double().requires_grad_()
    exact = SMOOTH[name](**at(leaf))
    (exact_slope,) = torch.autograd.grad(exact.sum(), leaf)
    found = tw.score(SMOOTH[name]).evaluate(**at(s)).double()
    torch.testing.assert_close(found, exact.detach(), rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(slope(SMOOTH[name], s).double(), exact_slope, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in SMOOTH if name != "sqrt"])
def test_composed_functions_have_pytorchs_slope_at_zero(name: str) -> None:
    leaf = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(SMOOTH[name](**at(leaf)).sum(), leaf)
    assert torch.equal(slope(SMOOTH[name], leaf.detach()), expected)


@pytest.mark.parametrize(
    ("function", "ours", "theirs"),
    [
        (lambda s, b, h, i, j: s**0.5, math.inf, math.inf),
        (lambda s, b, h, i, j: torch.sqrt(s), math.inf, math.inf),
        (lambda s, b, h, i, j: s**-2, -math.inf, -math.inf),
        (lambda s, b, h, i, j: s**-3, -math.inf, -math.inf),
        (lambda s, b, h, i, j: torch.clamp(s, min=0.0), 0.5, 1.0),
        (lambda s, b, h, i, j: s.clamp_max(0.0), 0.5, 1.0),
        (lambda s, b, h, i, j: s.clip(0.0, 1.0), 0.5, 1.0),
    ],
)
def test_slopes_at_zero_as_documented(function: Any, ours: float, theirs: float) -> None:
    """clamp shares the slope at its bound, where PyTorch gives all of it to the clamped value."""
    leaf = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(function(**at(leaf)).sum(), leaf)[0].item() == theirs
    assert slope(function, leaf.detach()).item() == ours


@pytest.mark.parametrize("name", SMOOTH)
def test_composed_functions_at_the_ends(name: str) -> None:
    s = torch.tensor([math.inf, -math.inf, math.nan, -1.0, 100.0, -100.0])
    expected, found = SMOOTH[name](**at(s)), tw.score(SMOOTH[name]).evaluate(**at(s))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_score_without_s_has_no_slope() -> None:
    ds, _ = by_formula(tw.score(lambda s, b, h, i, j: i * 1.0), scores(), torch.ones(WHOLE, dtype=torch.float64))
    assert not ds.any()
