"""Derivatives of score formulas against PyTorch's autograd, in float64."""

from __future__ import annotations

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


def test_a_score_without_s_has_no_slope() -> None:
    ds, _ = by_formula(tw.score(lambda s, b, h, i, j: i * 1.0), scores(), torch.ones(WHOLE, dtype=torch.float64))
    assert not ds.any()
