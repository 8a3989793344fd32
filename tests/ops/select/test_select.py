"""Tiles taken from rows of scores, on a CPU: the specification's, in any shape; and selections as data."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.ops.select.problem import Call
from tilewise.ops.select.table import TAKE
from tilewise.schedule.selection import as_select
from tilewise.testing import select as cases
from tilewise.testing.select import CASES, RowsCase

KINDS = ("mass", "count", "share", "weight")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_equals_the_specification(case: RowsCase) -> None:
    cases.check(case, "cpu")


@given(
    kind=st.sampled_from(KINDS),
    amount=st.floats(0.01, 1.0),
    count=st.integers(1, 40),
    alike=st.booleans(),
    rows=st.integers(1, 4),
    tiles=st.integers(1, 40),
    group=st.integers(1, 3),
)
def test_any_shape(kind: str, amount: float, count: int, alike: bool, rows: int, tiles: int, group: int) -> None:
    amounts = (float(count) if kind == "count" else amount,) * group
    cases.check(RowsCase(kind, amounts, alike, (1, group, rows, tiles), 1), "cpu")


def taken(scores: list[float], kind: str, amount: float, impl: str = "cpu") -> list[int]:
    """The tiles that one row takes which sees all."""
    row = torch.tensor(scores).view(1, 1, 1, -1)
    classes = torch.ones(1, 1, 1, len(scores), dtype=torch.int8)
    call = Call(row, classes, None, None, torch.full((1,), -1.0), torch.tensor([amount]), kind)
    return TAKE(call, impl)[0].flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_by_hand(impl: str) -> None:
    """Weights 1/2, 1/4, 1/8, 1/8."""
    scores = [torch.tensor(x).log().item() for x in (1.0, 4.0, 1.0, 2.0)]
    assert taken(scores, "mass", 0.49, impl) == [1]
    assert taken(scores, "mass", 0.74, impl) == [1, 3]
    assert taken(scores, "mass", 0.80, impl) == [0, 1, 3]  # of two equal ones the first
    assert taken(scores, "mass", 1.0, impl) == [0, 1, 2, 3]
    assert taken(scores, "count", 1.0, impl) == [1]
    assert taken(scores, "count", 3.0, impl) == [0, 1, 3]
    assert taken(scores, "share", 0.5, impl) == [1, 3]
    assert taken(scores, "share", 0.51, impl) == [0, 1, 3]
    assert taken(scores, "weight", 0.2, impl) == [1, 3]
    assert taken(scores, "weight", 0.9, impl) == [1]  # at least one
    assert taken([0.0] * 10, "share", 0.3, impl) == [0, 1, 2]  # the float32 next to 0.3 is larger
    assert taken([-torch.inf] * 3, "mass", 0.5, impl) == [0, 1, 2]
    assert taken([-torch.inf, torch.nan, 0.0], "count", 1.0, impl) == [0, 1, 2]


def test_opcheck() -> None:
    call = cases.make_call(CASES[1])
    tensors = [call.scores, call.classes, call.similar_q, call.similar_k, call.least, call.amount]
    how = "(['scores', 'classes', 'similar_q', 'similar_k', 'least', 'amount'], {'kind': 'mass'})"
    torch.library.opcheck(torch.ops.tilewise.take_tiles.default, (tensors, how, "cpu"))


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: tw.Sparge(tau=0.0), "Sparge tau"),
        (lambda: tw.Sparge(tau=1.5), "Sparge tau"),
        (lambda: tw.Sparge(tau="0.5"), "Sparge tau"),  # type: ignore[arg-type]
        (lambda: tw.Sparge(tau=()), "Sparge tau"),
        (lambda: tw.Sparge(tau=(0.5, 2.0)), "Sparge tau"),
        (lambda: tw.Sparge(theta=-1.5), "Sparge theta"),
        (lambda: tw.TopK(0), "TopK k"),
        (lambda: tw.TopK(1.5), "TopK k"),
        (lambda: tw.TopK((1, 0.5)), "TopK k"),
        (lambda: tw.TopK(True), "TopK k"),
        (lambda: tw.TopK(2**31), "TopK k"),
        (lambda: tw.TopK(theta=10**400), "TopK theta"),
        (lambda: tw.Sparge(lam=2**2000), "Sparge lam"),
        (lambda: tw.TopPages(2**2000), "TopPages pages"),
        (lambda: tw.Threshold(-0.1), "Threshold weight"),
        (lambda: tw.Threshold(torch.nan), "Threshold weight"),
        (lambda: tw.Select(), "Select parts"),
        (lambda: tw.Select(lambda b, h, i, j: i > j), "Select parts"),  # type: ignore[arg-type]
        (lambda: tw.Select(tw.TopK(), block=0), "Select block"),
        (lambda: tw.Select(tw.TopK(), block=(64, 64, 64)), "Select block"),
        (lambda: tw.Select(tw.TopK(), block=64.0), "Select block"),  # type: ignore[arg-type]
        (lambda: tw.Select(tw.TopK(), block=True), "Select block"),
        (lambda: tw.Select(tw.TopK(), block=2**31), "Select block"),
        (lambda: tw.Select(tw.TopK(), far="mean"), "Select far"),
        (lambda: as_select(0.5), "select"),
        (lambda: as_select(tw.Sparge), "select"),
        (lambda: tw.sinks(0), "sinks count"),
    ],
)
def test_errors(made: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: got"):
        made()


def test_selections_are_data() -> None:
    one = tw.Select(tw.Sparge([0.5, 0.9], 0.3), tw.window(64), block=64, far="summary")  # type: ignore[arg-type]
    assert one == tw.Select(tw.Sparge((0.5, 0.9), 0.3), tw.window(64), block=(64, 64), far="summary")
    assert hash(one) == hash(tw.Select(tw.Sparge((0.5, 0.9), 0.3), tw.window(64), block=(64, 64), far="summary"))
    assert one != tw.Select(tw.Sparge((0.5, 0.9), 0.3), tw.window(64), block=64)
    assert repr(one) == "Select(Sparge(tau=(0.5, 0.9), theta=0.3, lam=None), window(64), block=(64, 64), far='summary')"
    assert pickle.loads(pickle.dumps(one)).predictions == one.predictions
    assert as_select(tw.TopK(3)) == tw.Select(tw.TopK(3))
