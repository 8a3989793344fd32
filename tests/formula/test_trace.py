"""Tracing: what a mask or score function may say, what it becomes, and what it is told when it may not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import tilewise as tw
from tilewise.core.errors import FormulaError, InputError
from tilewise.formula.structure import parse
from tilewise.testing.strategies import as_mask_function, as_score_function, bool_trees, captured_tensors, float_trees

B, H, SQ, SK = 2, 3, 9, 11
SLOPES = torch.randn(H, dtype=torch.float64)
IDS = torch.randint(0, 4, (B, SK))
PLANE = torch.randn(SK, SK, dtype=torch.float64)
CUBE = torch.randn(H, SK, SK, dtype=torch.float64)
HYPER = torch.randn(B, H, SK, SK, dtype=torch.float64)
KEEP = torch.rand(SK, SK) < 0.5
ORDER = torch.randint(0, SK, (SK,))
ONE = torch.tensor(0.75, dtype=torch.float64)
ROW = torch.tensor([1.25], dtype=torch.float64)
THREE = torch.tensor(3)


def symbols() -> dict[str, torch.Tensor]:
    """Index tensors of every (batch, head, query, key); here every position is on the key axis."""
    return {
        "b": torch.arange(B)[:, None, None, None],
        "h": torch.arange(H)[:, None, None],
        "i": torch.arange(SK - SQ, SK)[:, None],
        "j": torch.arange(SK),
    }


def scores() -> torch.Tensor:
    return torch.randn(B, H, SQ, SK, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


MASKS: dict[str, Callable[..., Any]] = {
    "ge": lambda b, h, i, j: i >= j,
    "gt_le": lambda b, h, i, j: (i > j) & (j <= 7),
    "reflected": lambda b, h, i, j: (j < 5) | (i == 3),
    "ne": lambda b, h, i, j: i != j,
    "not": lambda b, h, i, j: ~(i >= j),
    "xor": lambda b, h, i, j: (i >= j) ^ (h == 1),
    "or_bool": lambda b, h, i, j: (i < j) | False,
    "arithmetic": lambda b, h, i, j: (i * 3 - j // 2 + 1) % 4 == 0,
    "reflected_arithmetic": lambda b, h, i, j: (10 - i) < (2 * j + 1),
    "negative_floor": lambda b, h, i, j: (i - j) // 3 == (j - i) % 5 - 2,
    "neg_abs_pos": lambda b, h, i, j: abs(-i + +j) <= 2,
    "floor_divide": lambda b, h, i, j: torch.floor_divide(i, 4) == torch.div(j, 4, rounding_mode="floor"),
    "remainder": lambda b, h, i, j: torch.remainder(i - j, 3) == 0,
    "where": lambda b, h, i, j: torch.where(h == 0, i >= j, i - j < 3),
    "torch_functions": lambda b, h, i, j: torch.logical_and(torch.ge(i, j), torch.logical_not(torch.eq(j, 2))),
    "logical_xor": lambda b, h, i, j: torch.logical_xor(i >= j, j > 3),
    "logical_or": lambda b, h, i, j: torch.logical_or(torch.lt(i, j), torch.ne(h, 1)),
    "bitwise": lambda b, h, i, j: torch.bitwise_and(i >= j, torch.le(j, 6)) | torch.gt(i, 8),
    "minimum": lambda b, h, i, j: torch.minimum(i, j) + torch.maximum(i, h) > 6,
    "clamp": lambda b, h, i, j: i.clamp(2, 8) - torch.clamp(j, min=1) < 4,
    "document": lambda b, h, i, j: IDS[b, i] == IDS[b, j],
    "nested": lambda b, h, i, j: ORDER[ORDER[j]] <= i,
    "bool_tensor": lambda b, h, i, j: KEEP[i, j],
    "bool_negated": lambda b, h, i, j: ~KEEP[i, j] & (i >= j),
    "to_bool": lambda b, h, i, j: (i - j).to(torch.bool),
    "zero_d": lambda b, h, i, j: i - j < THREE,
    "zero_d_left": lambda b, h, i, j: i - j < THREE,
    "float_compare": lambda b, h, i, j: i.float() * 0.5 > j.to(torch.float64),
    "bool_sum": lambda b, h, i, j: (i >= j).long() + (j > 2).int() == 2,
    "bool_compare": lambda b, h, i, j: (i >= j) == (j > 3),
    "negative_index": lambda b, h, i, j: IDS[b, SK - 1 - j] == 0,
    "constant": lambda b, h, i, j: True,
    "keywords": lambda b, h, i, j: torch.where(condition=i >= j, input=torch.max(i, other=j), other=-i) > 2,
}
SCORES: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "left_tensor": lambda s, b, h, i, j: SLOPES[h] * s - 1.0,
    "zero_d": lambda s, b, h, i, j: ONE * s + ONE,
    "zero_d_right": lambda s, b, h, i, j: s * ONE - s / ONE,
    "zero_d_reflected": lambda s, b, h, i, j: (ONE - s) * (ONE / (s * s + 1.0)),
    "softcap": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
    "two_d": lambda s, b, h, i, j: s + PLANE[i, j],
    "three_d": lambda s, b, h, i, j: s + CUBE[h, i, j],
    "four_d": lambda s, b, h, i, j: s + HYPER[b, h, i, j],
    "gather": lambda s, b, h, i, j: s * PLANE[IDS[b, j], ORDER[i]],
    "functions": lambda s, b, h, i, j: torch.sin(s) + torch.cos(s) + torch.exp(-s * s) + torch.exp2(-abs(s)),
    "logs": lambda s, b, h, i, j: torch.log(s * s + 1.0) + torch.log2(abs(s) + 1.0) + torch.sqrt(s * s + 2.0),
    "sigmoid": lambda s, b, h, i, j: torch.sigmoid(s) + torch.nn.functional.sigmoid(s) + s.sigmoid(),
    "methods": lambda s, b, h, i, j: s.tanh() + s.abs() + (s * 0.1).exp() + (abs(s) + 1).log() + (s * s + 1).sqrt(),
    "floor": lambda s, b, h, i, j: torch.floor(s) + s.floor(),
    "remainder": lambda s, b, h, i, j: s % 0.75 + torch.remainder(s, 2.0),
    "floor_divide": lambda s, b, h, i, j: s // 0.5,
    "one_element": lambda s, b, h, i, j: s * ROW + ROW,
    "power": lambda s, b, h, i, j: s**2 + torch.pow(s, 3) + torch.square(s),
    "reflected": lambda s, b, h, i, j: 1.0 / (2.0 + s * s) + (3.0 - s),
    "true_divide": lambda s, b, h, i, j: torch.true_divide(s, 3.0) + torch.div(s, 2.0),
    "where": lambda s, b, h, i, j: torch.where(i >= j, s, s - 5.0),
    "where_mixed": lambda s, b, h, i, j: s + torch.where(KEEP[i, j], 1, 0),
    "minimum": lambda s, b, h, i, j: torch.minimum(s, s * 0.5) + torch.maximum(s, -s),
    "clamp": lambda s, b, h, i, j: torch.clamp(s, -0.5, 0.5) + s.clamp(min=0.0) + s.clamp(max=0.25),
    "promotion": lambda s, b, h, i, j: s + i * (i >= j),
    "casts": lambda s, b, h, i, j: s + i.to(torch.float64) / 7 + (s * 3.0).to(torch.int32) + j.float() * 0.5,
    "alpha": lambda s, b, h, i, j: torch.add(s, other=j, alpha=0.5) + torch.sub(s, s * s, alpha=2),
    "number_to_the_score": lambda s, b, h, i, j: 2.0**s + torch.pow(0.5, s) + torch.pow(input=s, exponent=2) + 1**s,
    "larger_and_smaller": lambda s, b, h, i, j: torch.max(s, s * s) + torch.min(s, other=-s),
    "add_functions": lambda s, b, h, i, j: torch.add(torch.mul(s, 2.0), torch.sub(s, torch.neg(s))),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_traced_mask_means_what_pytorch_computes(name: str) -> None:
    traced = tw.mask(MASKS[name])
    expected = torch.as_tensor(MASKS[name](**symbols())).expand(B, H, SQ, SK)
    assert torch.equal(traced.evaluate(dtype=torch.float64, **symbols()).expand(B, H, SQ, SK), expected)


@pytest.mark.parametrize("name", SCORES)
def test_a_traced_score_means_what_pytorch_computes(name: str) -> None:
    traced = tw.score(SCORES[name])
    expected = SCORES[name](scores(), **symbols())
    got = traced.evaluate(dtype=torch.float64, s=scores(), **symbols())
    torch.testing.assert_close(got.expand_as(expected), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_text_parses_back_to_the_same_meaning(name: str) -> None:
    traced = tw.mask(MASKS[name]) if name in MASKS and name not in SCORES else tw.score(SCORES[name])
    again = parse(traced.text)
    assert again.text == traced.text
    assert again is parse(traced.text)
    assert again.root.kind == ("bool" if isinstance(traced, tw.Mask) else "float")
    assert again.num_tensors == len(traced.tensors)
    assert len(again.number_kinds) == len(traced.numbers)


@given(tree=bool_trees())
def test_random_masks_mean_what_pytorch_computes(tree: Any) -> None:
    captured = captured_tensors()
    function = as_mask_function(tree, captured)
    expected = function(**symbols()).expand(B, H, SQ, SK)
    assert torch.equal(tw.mask(function).evaluate(dtype=torch.float64, **symbols()).expand(B, H, SQ, SK), expected)


@given(tree=float_trees())
def test_random_scores_mean_what_pytorch_computes(tree: Any) -> None:
    captured = captured_tensors()
    function = as_score_function(tree, captured)
    expected = torch.as_tensor(function(scores(), **symbols())).to(torch.float64)
    got = tw.score(function).evaluate(dtype=torch.float64, s=scores(), **symbols())
    got, expected = torch.broadcast_tensors(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


# what a function is told when it may not -----------------------------------------------------------------------------


def branching(b: Any, h: Any, i: Any, j: Any) -> Any:
    if i > j:  # the line that the message names
        return j > 2
    return j > 3


BRANCH_LINE = branching.__code__.co_firstlineno + 1


def test_a_data_dependent_branch_names_its_line() -> None:
    with pytest.raises(FormulaError) as caught:
        tw.mask(branching)
    message = str(caught.value)
    assert f"{__file__}:{BRANCH_LINE}" in message
    assert "where" in message
    assert "(j < i)" in message


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "and": (lambda b, h, i, j: i >= j and j > 2, "bool()"),
    "math": (lambda b, h, i, j: math.floor(i) > j, "float()"),
    "int": (lambda b, h, i, j: int(i) > 2, "int()"),
    "range": (lambda b, h, i, j: range(i), "index()"),
    "list_index": (lambda b, h, i, j: [1, 2, 3][i] > 0, "index()"),
    "iteration": (lambda b, h, i, j: sum(x for x in i) > 0, "iteration"),
    "len": (lambda b, h, i, j: len(i) > 0, "len()"),
    "unsupported_torch": (lambda b, h, i, j: torch.cumsum(i, 0) > j, "torch.cumsum"),
    "whole_tensor": (lambda b, h, i, j: i < PLANE, "without an index"),
    "too_few_indices": (lambda b, h, i, j: PLANE[i] > 0, "1 indices"),
    "too_many_indices": (lambda b, h, i, j: ORDER[i, j] > 0, "2 indices"),
    "five_dimensions": (lambda b, h, i, j: torch.zeros(2, 2, 2, 2, 2)[b, b, b, b, i] > 0, "5 indices"),
    "float_index": (lambda b, h, i, j: ORDER[i / 2] > 0, "float expression"),
    "bool_index": (lambda b, h, i, j: ORDER[i > j] > 0, "bool expression"),
    "slice": (lambda b, h, i, j: PLANE[i, :] > 0, "slice"),
    "not_boolean": (lambda b, h, i, j: i - j, "int expression"),
    "and_of_ints": (lambda b, h, i, j: (i & j) > 0, "operand of &"),
    "invert_of_int": (lambda b, h, i, j: ~i > 0, "operand of ~"),
    "where_of_int": (lambda b, h, i, j: torch.where(i, j, 0) > 0, "operand of where"),
    "string": (lambda b, h, i, j: i > "a", "str"),
    "none": (lambda b, h, i, j: None, "NoneType"),
    "power": (lambda b, h, i, j: i**-1 > 0, "exponent"),
    "index_of_symbol": (lambda b, h, i, j: i[0] > 0, "an index"),
    "unknown_method": (lambda b, h, i, j: i.item() > 0, "attribute 'item'"),
    "shape": (lambda b, h, i, j: i.shape[0] > 0, "attribute 'shape'"),
    "complex": (lambda b, h, i, j: i * 1j == 0, "complex"),
    "complex_cast": (lambda b, h, i, j: i.to(torch.complex64) == 0, "complex64"),
    "arity": (lambda b, h: b > h, "takes 2 positional arguments"),
    "python_operator": (lambda b, h, i, j: i >> 2 > j, "unsupported operand type"),
    "round": (lambda b, h, i, j: round(i) > j, "__round__"),
    "number_for_a_tensor": (lambda b, h, i, j: torch.maximum(i, 5) > j, "must be Tensor, not int"),
    "numpy_array": (lambda b, h, i, j: np.arange(11)[i] > j, "IndexError"),
    "one_operand": (lambda b, h, i, j: torch.max(i) > j, "missing 1 required positional argument: 'other'"),
    "out": (lambda b, h, i, j: torch.sub(i, j, out=torch.empty(1)) > 0, "out"),
    "divided_by_zero": (lambda b, h, i, j: i // 0 == j, "got 0"),
    "modulo_zero": (lambda b, h, i, j: i % 0 == j, "got 0"),
    "number_too_wide": (lambda b, h, i, j: i < 2**63, "got 9223372036854775808"),
    "base": (lambda b, h, i, j: (-2.0) ** i > 0, "base -2.0"),
    "rounding_mode": (lambda b, h, i, j: torch.div(i, 2, rounding_mode="trunc") > 0, "trunc"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_a_reason(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(FormulaError) as caught:
        tw.mask(function)
    assert said in str(caught.value)
    assert caught.value.expected


def test_what_is_offered_instead_is_public() -> None:
    with pytest.raises(FormulaError) as caught:
        tw.score(lambda s, b, h, i, j: torch.erf(s))
    offered = caught.value.expected.removeprefix("one of ").split(", ")
    assert "tanh" in offered
    assert all(callable(getattr(torch, name)) and not name.startswith("_") for name in offered)


def test_a_formula_is_evaluated_with_every_symbol_it_uses() -> None:
    position = torch.arange(3)
    for symbols_given in ({}, {"i": position}, {"b": position, "h": position}):
        with pytest.raises(InputError, match=r"evaluate: got no .*j; expected a tensor for each symbol of causal"):
            tw.causal.evaluate(**symbols_given)
    assert tw.causal.evaluate(i=position, j=position).all()


def test_messages_name_the_users_line() -> None:
    with pytest.raises(FormulaError, match=r"test_trace\.py:\d+"):
        tw.mask(lambda b, h, i, j: PLANE[i] > 0)
    with pytest.raises(FormulaError, match=r"test_trace\.py:\d+"):
        tw.score(lambda s, b, h, i, j: torch.special.erf(s))


def test_exceptions_of_the_function_itself_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        tw.mask(lambda b, h, i, j: i > 1 / 0)
    with pytest.raises(KeyError):
        tw.mask(lambda b, h, i, j: i > {}["size"])


@pytest.mark.parametrize("value", [3, "causal", torch.ones(2, 2, dtype=torch.bool), tw.softcap(2.0)], ids=repr)
def test_what_is_no_mask_is_refused(value: Any) -> None:
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(FormulaError, match="expected a Mask or a function"):
        tw.attention(q, q, q, mask=value)


@pytest.mark.parametrize("value", [3, tw.causal], ids=repr)
def test_what_is_no_score_is_refused(value: Any) -> None:
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(FormulaError, match="expected a Score or a function"):
        tw.attention(q, q, q, score=value)


def test_a_formula_that_would_never_end_is_refused() -> None:
    def doubling(b: Any, h: Any, i: Any, j: Any) -> Any:
        x = i
        for _ in range(40):
            x = x + x
        return x > j

    def long(b: Any, h: Any, i: Any, j: Any) -> Any:
        x = i
        for _ in range(1500):
            x = x + 1
        return x > j

    for function in (doubling, long):
        with pytest.raises(FormulaError, match="operations"):
            tw.mask(function)
