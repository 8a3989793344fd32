"""Runs of masks that compare sums of captured integers, however near the ends of 64 bits: those of exact integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import as_expr
from tilewise.formula.span import solve
from tilewise.formula.walk import symbols

N = 6
ENDS = [0, 5, 2**29, -(2**31), 2**53, 2**60, -(2**60), 2**61, -(2**61), 2**62, -(2**62), 2**63 - 1, -(2**63)]
FAR = st.builds(lambda end, by: min(max(end + by, -(2**63)), 2**63 - 1), st.sampled_from(ENDS), st.integers(-6, 6))
NUMBERS = st.sampled_from([0, 1, 3, -5, 2**31, 2**40, 2**60, 2**61 - 9, 9 - 2**61])
# a sum, as a function of anything that adds up: traced positions and tensors, or Python's integers
Sum = Callable[[dict[str, Any]], Any]


def _entry(values: list[int], at: str) -> Sum:
    tensor = torch.tensor(values)
    return lambda given: (tensor if given["traced"] else values)[given[at] if at == "i" else given["h"]]


LEAVES = st.one_of(
    st.sampled_from(["i", "j"]).map(lambda name: lambda given: given[name]),
    NUMBERS.map(lambda number: lambda given: as_expr(number) if given["traced"] else number),
    FAR.map(lambda far: _entry([far], "h")),
    st.lists(FAR, min_size=N, max_size=N).map(lambda values: _entry(values, "i")),
)
SUMS: st.SearchStrategy[Sum] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: lambda given: a(given) + b(given), inner, LEAVES),
        st.builds(lambda a, b: lambda given: a(given) - b(given), LEAVES, inner),
        inner.map(lambda a: lambda given: -a(given)),
    ),
    max_leaves=4,
)


@settings(max_examples=400)
@given(left=SUMS, right=SUMS, strict=st.booleans())
def test_runs_are_those_of_exact_integers(left: Sum, right: Sum, strict: bool) -> None:
    def holds(traced: bool, h: Any, i: Any, j: Any) -> Any:
        given = {"traced": traced, "h": h, "i": i, "j": j}
        first, second = left(given), right(given)
        return first < second if strict else first <= second

    mask = tw.mask(lambda b, h, i, j: holds(True, h, i, j))
    expected = torch.tensor([[holds(False, 0, i, j) for j in range(N)] for i in range(N)])
    at = {"i": torch.arange(N)[:, None], "j": torch.arange(N), "h": torch.tensor(0), "b": torch.tensor(0)}
    for axis in ("i", "j"):
        span = solve(mask.structure.root, axis)
        if span is None or axis not in symbols(mask.expr) or _has_constant_sum(mask.expr):
            continue
        first, last = evaluate(list(span), at, mask.tensors, mask.numbers, torch.float64)
        assert torch.equal(((at[axis] >= first) & (at[axis] <= last)).expand(N, N), expected)


def _has_constant_sum(root: Any) -> bool:
    """Whether two integers meet before a position does: such a sum wraps, as the formula's does everywhere."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node.op in ("add", "sub", "neg") and not symbols(node) & {"i", "j"}:
            return True
        stack.extend(node.args)
    return False


@pytest.mark.parametrize(("x", "y"), [(2**62, 2**62 - 3), (2**61 + 7, 2**61), (-(2**62), -(2**62) - 3), (0, -(2**61))])
def test_two_far_numbers_leave_what_is_between_them(x: int, y: int) -> None:
    """Where each of both ended at 2**61 nothing was left."""
    far = torch.tensor([x, y])
    mask = tw.mask(lambda b, h, i, j: j + far[0] <= i + far[1])
    at = {"i": torch.arange(N)[:, None], "j": torch.arange(N)}
    visible = mask.evaluate(dtype=torch.float64, **at)
    for axis in ("i", "j"):
        span = solve(mask.structure.root, axis)
        if span is not None:
            first, last = evaluate(list(span), at, mask.tensors, mask.numbers, torch.float64)
            assert torch.equal(((at[axis] >= first) & (at[axis] <= last)).expand(N, N), visible)
