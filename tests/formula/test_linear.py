"""Scores linear in the positions: their parts add up to the score wherever the mask shows a pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.formula.evaluate import evaluate
from tilewise.formula.formula import as_mask, as_score
from tilewise.formula.linear import Linear, linear

SLOPES = torch.tensor([[0.5, 0.25, 0.125], [1.0, 2.0, 3.0]])
LINEAR: dict[str, tuple[Any, Any]] = {
    "alibi under causal": (tw.alibi(SLOPES[0]), tw.causal),
    "alibi by batch": (tw.alibi(SLOPES), tw.causal & tw.document(torch.arange(8) // 3)),
    "alibi, flex style": (lambda s, b, h, i, j: s + SLOPES[b, h] * (j - i), None),
    "both ways round": (lambda s, b, h, i, j: 0.5 * abs(j - i) + s, lambda b, h, i, j: i >= j),
    "numbers": (lambda s, b, h, i, j: 2.5 + s - 3.0 * (2 * i - j + h) * 0.5, None),
    "a constant": (lambda s, b, h, i, j: s + SLOPES[b, h], None),
    "nothing": (lambda s, b, h, i, j: s, None),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "alibi where the future shows": (tw.alibi(SLOPES[0]), tw.window(4, 4)),
    "alibi without a mask": (tw.alibi(SLOPES[0]), None),
    "a distance cubed": (lambda s, b, h, i, j: s - 1.0 * (i - j) * (i - j), tw.causal),
    "a scaled score": (lambda s, b, h, i, j: 2.0 * s + 1.0 * i, None),
    "a score times a position": (lambda s, b, h, i, j: s + s * j, None),
    "a curve": (tw.softcap(3.0), tw.causal),
    "a table": (tw.relative_bias(torch.ones(8, 3)), tw.causal),
    "no score": (lambda s, b, h, i, j: 1.0 * i, None),
    "another absolute value": (lambda s, b, h, i, j: s + abs(2 * i - j), tw.causal),
}


def parts(score: Any, mask: Any) -> tuple[Any, Linear | None]:
    formula = as_score(score)
    return formula, linear(formula.structure.root, None if mask is None else as_mask(mask).structure.root)


@pytest.mark.parametrize("name", LINEAR)
def test_parts_add_up_to_the_score(name: str) -> None:
    score, mask = LINEAR[name]
    formula, found = parts(score, mask)
    assert found is not None
    at = {
        "b": torch.arange(2)[:, None, None, None],
        "h": torch.arange(3)[:, None, None],
        "i": torch.arange(8)[:, None],
        "j": torch.arange(8),
        "s": torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)[:, None],
    }
    values = [formula.structure.root, *found]
    want, of_i, of_j, rest = evaluate(values, at, formula.tensors, formula.numbers, torch.float64)
    got = at["s"] + at["i"] * of_i + at["j"] * of_j + rest
    seen = torch.tensor(True) if mask is None else as_mask(mask).evaluate(**{n: at[n] for n in "bhij"})
    torch.testing.assert_close(torch.where(seen, got, 0.0), torch.where(seen, want, 0.0).expand_as(got))


@pytest.mark.parametrize("name", OTHER)
def test_others_are_not_linear(name: str) -> None:
    assert parts(*OTHER[name])[1] is None
