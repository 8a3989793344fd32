"""Indices into captured tensors: one after another, constant ones from the end, and too few of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.formula.test_trace import CUBE, HYPER, IDS, KEEP, ORDER, PLANE, SK
from tilewise.core.errors import FormulaError

RUNS = torch.stack([torch.arange(SK), torch.arange(SK) + 3], 1)
SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "two": (lambda s, b, h, i, j: s + PLANE[i][j], lambda s, b, h, i, j: s + PLANE[i, j]),
    "three": (lambda s, b, h, i, j: s * CUBE[h, i][j], lambda s, b, h, i, j: s * CUBE[h, i, j]),
    "four": (lambda s, b, h, i, j: HYPER[b][h][i][j] - s, lambda s, b, h, i, j: HYPER[b, h, i, j] - s),
    "halves": (lambda s, b, h, i, j: s + HYPER[b, h][i, j], lambda s, b, h, i, j: s + HYPER[b, h, i, j]),
    "of_an_index": (lambda s, b, h, i, j: s + ORDER[IDS[b][i]], lambda s, b, h, i, j: s + ORDER[IDS[b, i]]),
    "constant": (lambda s, b, h, i, j: s + RUNS[j][0], lambda s, b, h, i, j: s + RUNS[j, 0]),
    "from_the_end": (lambda s, b, h, i, j: s + RUNS[j][-1], lambda s, b, h, i, j: s + RUNS[j, 1]),
    "every_end": (lambda s, b, h, i, j: s + PLANE[-SK, i], lambda s, b, h, i, j: s + PLANE[0, i]),
    "ellipsis_first": (lambda s, b, h, i, j: s + PLANE[..., i, j], lambda s, b, h, i, j: s + PLANE[i, j]),
    "ellipsis_amid": (lambda s, b, h, i, j: s + PLANE[i, ..., j], lambda s, b, h, i, j: s + PLANE[i, j]),
    "ellipsis_last": (lambda s, b, h, i, j: s + PLANE[i, j, ...], lambda s, b, h, i, j: s + PLANE[i, j]),
    "ellipsis_for_more": (lambda s, b, h, i, j: s + PLANE[i, ...][j], lambda s, b, h, i, j: s + PLANE[i, j]),
}


@pytest.mark.parametrize("name", SAME)
def test_another_way_to_write_an_index(name: str) -> None:
    """Not compared with PyTorch on index tensors, where `t[b][i]` is another thing: FlexAttention maps single ones."""
    other, plain = SAME[name]
    assert tw.score(other) == tw.score(plain)


def test_an_index_past_the_end_stays_outside() -> None:
    q = torch.zeros(1, SK, 1, 4)
    with pytest.raises(FormulaError, match="which reaches -1 to -1"):
        tw.attention(q, q, q, mask=lambda b, h, i, j: KEEP[i][-SK - 1])


LONE = torch.tensor(200, dtype=torch.uint8)  # a type alone says 0 to 255


@pytest.mark.parametrize("mask", [lambda b, h, i, j: KEEP[j * 0 + LONE][i], lambda b, h, i, j: i % (LONE - 200) == 0])
def test_a_tensor_without_dimensions_may_be_all_that_its_type_holds(mask: Callable[..., Any]) -> None:
    q = torch.zeros(1, SK, 1, 4)
    with pytest.raises(FormulaError, match=r"reaches 200 to 200|may be 0"):
        tw.attention(q, q, q, mask=mask)


WRAPPING: dict[str, Callable[..., Any]] = {  # with 8 keys inside a tensor of one element, or of 64
    "mul": lambda j: (j * 2**57) // 2**60,
    "shl": lambda j: (j << 57) >> 60,
    "add": lambda j: ((j << 56) + (j << 56)) // 2**60,
    "sub": lambda j: ((j << 56) - (-j << 56)) // 2**60,
    "doubled": lambda j: functools.reduce(lambda x, _: x + x, range(57), j) // 2**60,
    "neg": lambda j: -(j * -(2**57)) // 2**60,
    "abs": lambda j: abs(j * 2**57) // 2**60,
    "to_int": lambda j: (j.float() * 2.0**56).to(torch.int64) // 2**60,
    "xor": lambda j: (j ^ 1) // 8,
    "or": lambda j: (j | 5) // 8,
    "and": lambda j: (j & 15) // 8,
    "shr": lambda j: j >> 3,
}


@pytest.mark.parametrize("name", WRAPPING)
def test_an_index_that_wraps_between_its_ends_is_not_proved(name: str) -> None:
    """At both ends of the keys it may be inside. Fewer keys, of which none is outside, are taken."""
    table = torch.ones(1)
    score = tw.score(lambda s, b, h, i, j: s + table[WRAPPING[name](j)])
    for keys in (8, 129):
        q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, keys, 1, 4)
        if keys == 8:
            assert set(WRAPPING[name](torch.arange(keys)).tolist()) == {0}
            tw.attention(q, k, k, score=score)
            continue
        with pytest.raises(FormulaError, match="index 0 into captured tensor 0"):
            tw.attention(q, k, k, score=score)


def test_of_an_index_that_wraps_both_ends_may_be_inside() -> None:
    """Who looks at the ends alone sees 0, and reads before the tensor."""
    found = WRAPPING["mul"](torch.arange(129))
    assert found[0] == found[-1] == 0
    assert found.min() < 0


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "compared": (lambda b, h, i, j: PLANE[i] > 0, "11 values, of bool"),
    "reflected": (lambda b, h, i, j: j > PLANE[i], "11 values, of bool"),
    "returned": (lambda b, h, i, j: KEEP[i], "1 indices"),
    "arithmetic": (lambda b, h, i, j: i + CUBE[h][i] > 0, "11 values, of bool"),
    "of_two_dimensions": (lambda b, h, i, j: i + CUBE[h] > 0, "1 indices"),
    "negated": (lambda b, h, i, j: ~KEEP[i], "11 values, of bool"),
    "condition": (lambda b, h, i, j: torch.where(KEEP[i], i, j) > 0, "11 values, of bool"),
    "index": (lambda b, h, i, j: ORDER[IDS[b]] > 0, "1 indices"),
    "method": (lambda b, h, i, j: CUBE[h].sum() > 0, "1 indices"),
    "function": (lambda b, h, i, j: torch.tanh(PLANE[i]) > 0, "11 values, of bool"),
    "branch": (lambda b, h, i, j: KEEP[i] and True, "1 indices"),
    "iterated": (lambda b, h, i, j: next(iter(KEEP[i])), "1 indices"),
    "one_too_many": (lambda b, h, i, j: KEEP[i][j, j], "3 indices"),
    "sliced": (lambda b, h, i, j: PLANE[:][i] > 0, "11 values, of bool"),
    "sliced_first": (lambda b, h, i, j: PLANE[:, i] > 0, "slice"),
    "column": (lambda b, h, i, j: PLANE[..., j][i] > 0, "ellipsis"),
    "two_ellipses": (lambda b, h, i, j: PLANE[..., i, j, ...] > 0, "4 indices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_short_of_indices_is_no_value(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(FormulaError) as caught:
        tw.mask(function)
    assert said in str(caught.value)
    assert "test_captured.py:" in str(caught.value)
