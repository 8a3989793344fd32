"""NumPy scalars where a number is expected: in formulas, in the library, in attention's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.core.errors import FormulaError, InputError

SAME: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "left": (lambda: tw.mask(lambda b, h, i, j: np.int64(5) > i - j), lambda: tw.mask(lambda b, h, i, j: i - j < 5)),
    "right": (lambda: tw.mask(lambda b, h, i, j: j < np.float32(3)), lambda: tw.mask(lambda b, h, i, j: j < 3.0)),
    "bool": (lambda: tw.mask(lambda b, h, i, j: np.bool_(True) ^ (i > j)), lambda: tw.mask(lambda b, h, i, j: i <= j)),
    "double": (
        lambda: tw.score(lambda s, b, h, i, j: np.float64(2) * s**np.float32(2)),
        lambda: tw.score(lambda s, b, h, i, j: 2.0 * s**2.0),
    ),
    "function": (
        lambda: tw.score(lambda s, b, h, i, j: torch.where(i > j, s, np.float16(-0.5))),
        lambda: tw.score(lambda s, b, h, i, j: torch.where(i > j, s, -0.5)),
    ),
    "window": (lambda: tw.window(np.int64(4), np.uint8(1)), lambda: tw.window(4, 1)),
    "chunked": (lambda: tw.chunked(np.int32(4)), lambda: tw.chunked(4)),
    "dilated": (lambda: tw.dilated(np.int16(3)), lambda: tw.dilated(3)),
    "softcap": (lambda: tw.softcap(np.float32(20)), lambda: tw.softcap(20.0)),
    "neighborhood": (lambda: tw.neighborhood(tuple(np.array([4, 6])), (3, np.int64(3))),
                     lambda: tw.neighborhood((4, 6), (3, 3))),
    "sliding_tile": (lambda: tw.sliding_tile(tuple(np.array([4, 6])), np.int32(2), (np.int64(1), (np.int64(0), 1))),
                     lambda: tw.sliding_tile((4, 6), 2, (1, (0, 1)))),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_numpy_scalar_is_a_number(name: str) -> None:
    made, plain = (make() for make in SAME[name])
    assert made == plain or name == "bool"
    assert torch.equal(*(f.evaluate(**at()) for f in (made, plain)))
    assert "np." not in repr(made)


def at() -> dict[str, torch.Tensor]:
    zero = torch.tensor(0)
    return {"b": zero, "h": zero, "i": torch.arange(24)[:, None], "j": torch.arange(24), "s": torch.linspace(-9, 9, 24)}


@pytest.mark.parametrize("value", [np.complex64(1), np.str_("a"), np.arange(3), np.datetime64(1, "s")], ids=repr)
def test_other_numpy_values_are_refused(value: Any) -> None:
    for function in (lambda b, h, i, j: i < value, lambda b, h, i, j: value > i):
        with pytest.raises(FormulaError, match="operand at"):
            tw.mask(function)


def test_numpy_scalars_in_place_of_arguments() -> None:
    q = torch.randn(1, 8, 2, 4)
    numpy = tw.attention(q, q, q, scale=np.float32(0.25), dropout=np.float32(0.5), seed=np.int64(3))
    assert torch.equal(numpy, tw.attention(q, q, q, scale=0.25, dropout=0.5, seed=3))


def test_dropout_may_be_what_and_gives() -> None:
    q, training = torch.randn(1, 8, 2, 4), False
    assert torch.equal(tw.attention(q, q, q, dropout=training and 0.1), tw.attention(q, q, q))


@pytest.mark.parametrize(
    "argument",
    [{"scale": "0.3"}, {"scale": True}, {"scale": np.bool_(True)}, {"scale": np.float32("inf")}, {"dropout": True},
     {"dropout": np.bool_(False)}, {"seed": True}, {"seed": False, "dropout": 0.5}, {"seed": np.float32(1)},
     {"seed": np.int64(-1)}],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number_is_refused_with_a_hint(argument: dict[str, Any]) -> None:
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(InputError, match=next(iter(argument))) as caught:
        tw.attention(q, q, q, **argument)
    assert caught.value.hint


@pytest.mark.parametrize("make", [tw.window, tw.chunked, tw.dilated, tw.softcap])
def test_a_numpy_bool_or_a_number_of_another_kind_is_refused(make: Callable[[Any], Any]) -> None:
    for value in (np.bool_(True), np.complex64(2), np.int64(0)):
        with pytest.raises(InputError):
            make(value)
