"""Scores as the forward computes them: their value, and how many multiplications are left inside a tile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr
from tilewise.formula.formula import as_score
from tilewise.formula.optimize import base_2
from tilewise.formula.walk import postorder, symbols

SLOPES = torch.tensor([0.5, -0.25, 0.125])
BIAS = torch.linspace(-2.0, 2.0, 64).view(8, 8)
# score, whether it is a product with something constant over a tile, multiplications that move with the scores
SCORES: dict[str, tuple[Any, bool, int]] = {
    "softcap": (tw.softcap(30.0), True, 2),
    "softcap of a product": (lambda s, b, h, i, j: 2.0 * torch.tanh(SLOPES[h] * s / 3.0) * SLOPES[h], True, 2),
    "a factor by head": (lambda s, b, h, i, j: s * SLOPES[h], True, 1),
    "nothing": (lambda s, b, h, i, j: s, True, 1),
    "a bias": (lambda s, b, h, i, j: s * 0.5 + BIAS[i, j], False, 1),
    "softcap and a bias": (lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0) + SLOPES[h] * (j - i), False, 2),
    "times what moves": (lambda s, b, h, i, j: 3.0 * (BIAS[i, j] * s) / 7.0, True, 2),
    "a curve": (lambda s, b, h, i, j: torch.sigmoid(s), False, 1),
}


@pytest.mark.parametrize("scale", [0.125, -0.5])
@pytest.mark.parametrize("name", SCORES)
def test_factors_meet_outside_the_tile(name: str, scale: float) -> None:
    score, product, multiplications = SCORES[name]
    formula = as_score(score)
    root = formula.structure.root
    found, in_base_2 = base_2(root, Expr("num", (), "float", len(formula.numbers)))
    assert in_base_2 == product
    moving = [node for node in postorder([found]) if node.op == "mul" and "s" in symbols(node)]
    assert len(moving) == multiplications

    s = torch.linspace(-9.0, 9.0, 8, dtype=torch.float64)[:, None]
    at = {
        "b": torch.zeros(1, dtype=torch.int64),
        "h": torch.arange(3)[:, None, None],
        "i": torch.arange(8)[:, None],
        "j": torch.arange(8),
    }
    (want,) = evaluate([root], {**at, "s": scale * s}, formula.tensors, formula.numbers, torch.float64)
    (got,) = evaluate([found], {**at, "s": s}, formula.tensors, (*formula.numbers, scale), torch.float64)
    torch.testing.assert_close(got, want * math.log2(math.e) if product else want, rtol=1e-13, atol=1e-13)
