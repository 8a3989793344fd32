"""Tracing: what a mask or score function may say, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

import tilewise as tw
from tilewise.core.errors import InputError
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
FLAG = torch.tensor(True)


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
    "methods": lambda b, h, i, j: i.ge(j).logical_and(j.ne(2)).logical_or(i.eq(9)) & i.sub(j).abs().lt(6).logical_not(),
    "method_where": lambda b, h, i, j: (i >= j).where(h == 0, j > 3) | i.where(i > j, -j).less_equal(0),
    "clip": lambda b, h, i, j: i.clip(0, 3) + torch.clamp_min(j, 2) + j.clamp_max(5) + torch.clip(i, min=4) > 15,
    "int_powers": lambda b, h, i, j: i.pow(2) + torch.pow(j, 2.0) + i.square() > 60,
    "sign": lambda b, h, i, j: torch.sign(i - j) + (j - 4).sign() > 0,
    "ceil": lambda b, h, i, j: torch.ceil(i / 4) + (-j / 3).ceil() + i.ceil() < (j / 2).trunc() + torch.trunc(-i / 5),
    "div_trunc": lambda b, h, i, j: (
        torch.div(i - j, 3, rounding_mode="trunc") == (j - 4).div(-2, rounding_mode="trunc")
    ),
    "div_trunc_float": lambda b, h, i, j: torch.div(i - j, 2.5, rounding_mode="trunc") == (i - 5).div(THREE).floor(),
    "div_trunc_zero": lambda b, h, i, j: torch.div(i - j, j - 40, rounding_mode="trunc") == 0,
    "bitwise_xor": lambda b, h, i, j: torch.bitwise_xor(i >= j, j > 3) ^ torch.bitwise_not(h == 1),
    "bits": lambda b, h, i, j: ((i & 5) | (j ^ 3)) + (6 & j) - (1 | h) > (~i ^ -4) + 12,
    "shifts": lambda b, h, i, j: (i << 2) - (j >> 1) + (1 << h) > (-j >> 1) + (40 >> i - 5),
    "shifts_by_any": lambda b, h, i, j: ((i - 5 << j - 2) > 9) ^ ((i - 5 >> j - 2) < 0) ^ ((j << 63 + h) < 0),
    "bits_by_name": lambda b, h, i, j: (
        i.bitwise_and(j) + torch.bitwise_or(i, j) + torch.bitwise_xor(i, 3).bitwise_left_shift(1)
        > torch.bitwise_right_shift(j, 1) + torch.bitwise_not(i)
    ),
    "bits_of_captured": lambda b, h, i, j: (THREE << j) % 7 + (ORDER[i] & THREE) + (THREE ^ j) - (THREE >> h) > 6,
    "bits_of_booleans": lambda b, h, i, j: ((i >= j) & 1) + ((j > 3) << 2) + (6 ^ (h == 1)) + (j | (i > j)) > 9,
    "xor_bool": lambda b, h, i, j: (True ^ (i >= j)) ^ False,
    "captured_left": lambda b, h, i, j: (THREE - i <= 0) & (FLAG ^ (THREE // (j + 1) == 1)) & (FLAG & (i != j) | FLAG),
    "product": lambda b, h, i, j: (i >= j) * (j > 3) * True,
    "square_of_bool": lambda b, h, i, j: (i >= j).square() + (j > 3) ** 2 + torch.pow(h == 1, 1) == 2,
    "sum": lambda b, h, i, j: (i >= j) + (j > 3) + False,
    "larger_bool": lambda b, h, i, j: torch.maximum(i >= j, j > 3) & torch.minimum(h == 1, j < 9).logical_not(),
    "sum_of_sums": lambda b, h, i, j: sum([i >= j, j > 3, h == 1]) >= 2,
    "masked_fill": lambda b, h, i, j: (i >= j).masked_fill(j > 5, False) | (i.masked_fill(h == 1, -1) == -1),
    "relu": lambda b, h, i, j: torch.relu(i - j) + torch.nn.functional.relu(j - i) < 4,
    "likes": lambda b, h, i, j: (torch.zeros_like(i) == torch.ones_like(j) - 1) & torch.ones_like(i, dtype=torch.bool),
    "full_like": lambda b, h, i, j: i - j < torch.full_like(i, 2.5),
    "news": lambda b, h, i, j: b.new_ones((), dtype=torch.bool) & (i > j.new_full((1,), 3)) & ~(i == i.new_zeros(())),
    "kinds": lambda b, h, i, j: (i.to(j) / 2).type_as(i) + i.to(THREE) + j.to("cpu", torch.int32).to(i.device) > 7,
    "dtype": lambda b, h, i, j: (
        ((i.dtype, (i / 2).dtype, (i > j).dtype) == (torch.int64, torch.float32, torch.bool))
        & (j.to(dtype=i.dtype) > 3)
    ),
    "detach": lambda b, h, i, j: (i.detach() >= j) & (j / 2).detach().gt(1) & IDS[b, j].detach().ne(1),
    "negative_constants": lambda b, h, i, j: (j < ORDER[-2] + IDS[-1, j]) & KEEP[i, -SK],
    "ellipsis": lambda b, h, i, j: KEEP[..., i, j] & (ORDER[i, ...] > 2) | KEEP[i, ..., j],
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
    "roots": lambda s, b, h, i, j: (
        torch.rsqrt(s * s + 1) + (s * s + 1) ** 0.5 + (abs(s) + 1).pow(-0.5) + i.double().pow(0.5)
    ),
    "powers": lambda s, b, h, i, j: (
        s**2.0 + s.pow(3.0) + s**1.0 + torch.pow(s, 4.0) * 0.1 + s**1 + (i + 1.5).double() ** -1.0
    ),
    "inverses": lambda s, b, h, i, j: s.reciprocal() + s**-1 + torch.pow(s, -2.0) + (i.double() + 1).reciprocal(),
    "powers_of_bool": lambda s, b, h, i, j: s * (i >= j) ** 2 + (j > 3).square() + (h == 1) ** 3.0,
    "powers_of_captured": lambda s, b, h, i, j: SLOPES[h] ** 2 * s + 2.0 ** SLOPES[h] + s * ONE.mul(s).pow(2.0),
    "log1p": lambda s, b, h, i, j: torch.log1p(s * s) + (s * 1e-9).log1p() + torch.special.log1p(abs(s) * 1e6),
    "expm1": lambda s, b, h, i, j: torch.expm1(s) + (s * 1e-9).expm1() + torch.special.expm1(s - 30),
    "sign": lambda s, b, h, i, j: s * torch.sign(s) + (s - s).sign() + torch.sign(i - j),
    "rounding": lambda s, b, h, i, j: (
        torch.ceil(s) + s.trunc() + s.div(0.3, rounding_mode="trunc") + (s * 1e20).trunc() * 0
    ),
    "relu": lambda s, b, h, i, j: torch.relu(s) + torch.nn.functional.relu(-s) * 0.5 + s.relu() + s.clamp_min(0.5),
    "softplus": lambda s, b, h, i, j: torch.nn.functional.softplus(s * 9) + torch.nn.functional.softplus(s, beta=2.0),
    "softplus_far": lambda s, b, h, i, j: (
        torch.nn.functional.softplus(s * 1e3) + torch.nn.functional.softplus(s, 1, 0.5)
    ),
    "silu": lambda s, b, h, i, j: torch.nn.functional.silu(s) + torch.nn.SiLU()(s * 3.0),
    "logsigmoid": lambda s, b, h, i, j: torch.nn.functional.logsigmoid(s) + torch.nn.functional.logsigmoid(s * 300),
    "expit": lambda s, b, h, i, j: (
        torch.special.expit(s) + torch.special.exp2(s) + s.exp2() + s.log2().masked_fill(s <= 0, 0)
    ),
    "masked_fill": lambda s, b, h, i, j: s.masked_fill(i < j, -100.0) + torch.masked_fill(s, KEEP[i, j], ONE),
    "method_where": lambda s, b, h, i, j: s.where(i >= j, -1e4) + ONE.where(i > j, s) + torch.where(KEEP[i, j], s, 0),
    "likes": lambda s, b, h, i, j: (
        s + torch.zeros_like(s) + torch.ones_like(s) * 0.5 + torch.full_like(s, 2) + s.new_full((), 3)
    ),
    "widths": lambda s, b, h, i, j: (
        s.double() + i.double() * 0.5 + s.to(s.dtype if s.device is None else s.device) + i.type_as(s)
    ),
    "half": lambda s, b, h, i, j: s + i.half() * 0.5 + j.bfloat16(),
    "methods_of_numbers": lambda s, b, h, i, j: s.mul(2).add(1, alpha=0.5).sub(0.25).div(3).neg().remainder(2),
    "captured_left": lambda s, b, h, i, j: ONE % (s * s + 1.0) + ONE * i - ONE.mul(s).add(s).maximum(s),
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


def test_a_formula_is_evaluated_with_every_symbol_it_uses() -> None:
    position = torch.arange(3)
    for symbols_given in ({}, {"i": position}, {"b": position, "h": position}):
        with pytest.raises(InputError, match=r"evaluate: got no .*j; expected a tensor for each symbol of causal"):
            tw.causal.evaluate(**symbols_given)
    assert tw.causal.evaluate(i=position, j=position).all()
