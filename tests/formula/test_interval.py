"""Interval bounds contain every value of a tile, on named and random formulas; spans are the visible run exactly."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.formula.test_trace import MASKS
from tilewise.formula.evaluate import evaluate
from tilewise.formula.formula import Mask
from tilewise.formula.interval import Bounds
from tilewise.formula.span import solve, span_bounds
from tilewise.schedule.rule import build_tables, tile_rule
from tilewise.testing.strategies import (
    SIZE,
    as_mask_function,
    as_score_function,
    bool_trees,
    captured_tensors,
    far_trees,
    float_trees,
)

LIBRARY = {
    "causal": tw.causal,
    "window": tw.window(4),
    "window_both": tw.window(3, 2),
    "window_left_free": tw.window(None, 2),
    "not_window": ~tw.window(3, 2),
    "prefix_lm": tw.causal | tw.prefix(torch.tensor([3, 7])),
    "lengths": tw.causal & tw.lengths(torch.tensor([0, 9])),
    "causal_or_strict": tw.causal | tw.mask(lambda b, h, i, j: j < i),
    "by_head": tw.mask(lambda b, h, i, j: (i - j < h * 3 + 1) & (j <= i)),
    "shifted": tw.mask(lambda b, h, i, j: (2 + j - 1 <= i + 3) & (-j < 5 - i)),
    "future_or": tw.mask(lambda b, h, i, j: (j > i) | (j > 4)),
    "either_batch": tw.mask(lambda b, h, i, j: (b == 0) | (j <= i)),
    "never": tw.causal & ~tw.causal,
}


def tile_symbols(tile: tuple[int, int, int, int], block: int) -> dict[str, torch.Tensor]:
    i0, i1, j0, j1 = tile
    named = {"i0": i0, "i1": i1, "j0": j0, "j1": j1, "block_i": block, "block_j": block}
    found = {name: torch.tensor(value) for name, value in named.items()}
    return {**found, "b": torch.arange(2)[:, None, None, None], "h": torch.arange(3)[:, None, None]}


def pair_symbols(tile: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    i0, i1, j0, j1 = tile
    here = {"i": torch.arange(i0, i1 + 1)[:, None], "j": torch.arange(j0, j1 + 1)}
    return {"b": torch.arange(2)[:, None, None, None], "h": torch.arange(3)[:, None, None], **here}


@st.composite
def tiles(draw: st.DrawFn, extent: int = 40) -> tuple[tuple[int, int, int, int], int]:
    """(i0, i1, j0, j1) no longer than a block, anywhere, and the block."""
    block = draw(st.sampled_from([1, 2, 4, 5, 8, 16]))
    i0, j0 = draw(st.integers(0, extent)), draw(st.integers(0, extent))
    return (i0, i0 + draw(st.integers(0, block - 1)), j0, j0 + draw(st.integers(0, block - 1))), block


def check_bounds(formula: Any, tile: tuple[int, int, int, int], block: int) -> None:
    bounds = Bounds()
    interval = bounds.of(formula.structure.root)
    tables = build_tables(bounds.tables, formula.tensors, block, block)
    pairs = {**pair_symbols(tile), "s": torch.zeros((), dtype=torch.float64)}
    values = formula.evaluate(dtype=torch.float64, **pairs).expand(2, 3, tile[1] - tile[0] + 1, tile[3] - tile[2] + 1)
    ends = [end for end in interval if end is not None]
    at = tile_symbols(tile, block)
    found = iter(evaluate(ends, at, formula.tensors, formula.numbers, torch.float64, tables))
    low = next(found).expand(2, 3, 1, 1) if interval.low is not None else None
    high = next(found).expand(2, 3, 1, 1) if interval.high is not None else None
    if values.dtype == torch.bool:
        values, low, high = values.int(), low.int(), high.int()  # type: ignore[union-attr]
    # an end that is NaN bounds nothing: comparisons with it are undecided
    assert low is None or bool(((values >= low) | (low != low)).all()), "a value below the bound"
    assert high is None or bool(((values <= high) | (high != high)).all()), "a value above the bound"


@given(tree=bool_trees(), tile=tiles())
def test_bounds_of_random_masks_are_sound(tree: Any, tile: Any) -> None:
    check_bounds(tw.mask(as_mask_function(tree, captured_tensors())), *tile)


FAR = torch.tensor([2**63 - 1, -(2**63), 2**62, 5])
WRAPPING: dict[str, Any] = {  # of positions 0 to 7: between the ends something leaves 64 bits, and comes in again
    "mul": lambda i, j: j * 2**60 * 4 < 3,
    "mul_of_both": lambda i, j: (j << 33) * (i << 30) < 0,
    "add": lambda i, j: FAR[0] + (j % 4) < 0,
    "add_of_table": lambda i, j: FAR[j % 2] + FAR[(j + 1) % 4] < 0,
    "sub": lambda i, j: FAR[1] - (j % 4) > 0,
    "sub_of_table": lambda i, j: 3 - FAR[j % 4] < 3,
    "neg": lambda i, j: -(FAR[j % 4] + 1) - 2 > 5,
    "neg_of_the_least": lambda i, j: -FAR[j % 4] < -5,
    "abs_of_the_least": lambda i, j: abs(FAR[j % 4]) < 0,
    "abs_that_wraps_again": lambda i, j: abs(FAR[j % 4]) - j > -1,
    "least_of_an_abs": lambda i, j: torch.minimum(abs(FAR[j % 4]), i) - j - 9 > 0,
    "floordiv": lambda i, j: FAR[j % 4] // -1 < -3,
    "mod": lambda i, j: (j << 62) % 7 < 4,
    "shl": lambda i, j: (j + 1 << i * 9) < 0,
    "shl_by_much": lambda i, j: (3 << j * 11) > 2,
    "shl_by_less_than_none": lambda i, j: (3 << j - 2) > 2,
    "shr_by_less_than_none": lambda i, j: (j - 4 >> i - 3) < -1,
    "xor": lambda i, j: (FAR[j % 4] ^ j) < 0,
    "or": lambda i, j: (FAR[j % 4] | i) < -4,
    "and": lambda i, j: (FAR[j % 4] & j - 4) < 0,
    "to_int": lambda i, j: (2.0 ** (j * 10.0)).to(torch.int64) < 0,
    "doubled": lambda i, j: functools.reduce(lambda x, _: x + x, range(62), j) < 0,
    "beside": lambda i, j: torch.maximum(j * 2**60 * 4, i) < 4,
}


@pytest.mark.parametrize("name", WRAPPING)
def test_bounds_of_each_operation_that_wraps_are_sound(name: str) -> None:
    mask = tw.mask(lambda b, h, i, j: WRAPPING[name](i, j))
    for rows, columns in itertools.product([(0, 7), (2, 3), (5, 5), (4, 7)], repeat=2):
        check_bounds(mask, (*rows, *columns), 8)


@settings(max_examples=300)
@given(tree=far_trees(), tile=tiles())
def test_bounds_of_integers_that_wrap_are_sound(tree: Any, tile: Any) -> None:
    """Beyond 64 bits integers begin anew at the other end, also between the ends of a tile."""
    check_bounds(tw.mask(as_mask_function(tree, captured_tensors())), *tile)


@given(tree=float_trees(), tile=tiles())
def test_bounds_of_random_scores_are_sound(tree: Any, tile: Any) -> None:
    """With s unbounded most of a score is; what remains bounded must hold at s = 0."""
    check_bounds(tw.score(as_score_function(tree, captured_tensors())), *tile)


@given(name=st.sampled_from(sorted(MASKS)), tile=tiles(extent=3))
def test_bounds_of_named_masks_are_sound(name: str, tile: Any) -> None:
    assume(max(tile[0]) < SIZE)
    check_bounds(tw.mask(MASKS[name]), *tile)


@given(name=st.sampled_from(sorted(LIBRARY)), tile=tiles())
def test_bounds_of_library_masks_are_sound(name: str, tile: Any) -> None:
    check_bounds(LIBRARY[name], *tile)


def test_a_wrong_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker sees bounds that are too narrow by one."""
    of = Bounds.of
    monkeypatch.setattr(Bounds, "of", lambda self, root: of(self, root)._replace(high=of(self, root).low))
    with pytest.raises(AssertionError, match="above"):
        check_bounds(tw.causal, (3, 6, 3, 6), 4)


# spans -------------------------------------------------------------------------------------------------------------

EXTENT = 14


def check_span(mask: Mask, axis: str) -> bool:
    """Compare `solve` with brute force for every b, h and position of the other axis; False where it gives no span."""
    span = solve(mask.structure.root, axis)
    if span is None:
        return False
    pairs = pair_symbols((0, EXTENT - 1, 0, EXTENT - 1))
    visible = mask.evaluate(dtype=torch.float64, **pairs).expand(2, 3, EXTENT, EXTENT)
    first, last = (
        x.expand(2, 3, *((EXTENT, 1) if axis == "j" else (1, EXTENT)))
        for x in evaluate(list(span), pairs, mask.tensors, mask.numbers, torch.float64)
    )
    here = pairs[axis]
    assert torch.equal((here >= first) & (here <= last), visible), f"the run along {axis} is not the visible one"
    return True


@pytest.mark.parametrize("axis", ["i", "j"])
@pytest.mark.parametrize("name", sorted(set(LIBRARY) - {"not_window"}))
def test_spans_of_library_masks(name: str, axis: str) -> None:
    assert check_span(LIBRARY[name], axis), "the mask is one run, but no span was found"


IDS = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3, 4, 4, 7, 7, 7])
RUNS = {
    "ascending": tw.document(IDS, ascending=True),
    "ascending_by_batch": tw.document(torch.stack([IDS, IDS.flip(0).neg()]), ascending=True),
    "ascending_causal_window": tw.causal & tw.window(3) & tw.document(IDS, ascending=True),
    "not_not_ascending": ~~tw.document(IDS, ascending=True),
}


@pytest.mark.parametrize("axis", ["i", "j"])
@pytest.mark.parametrize("name", RUNS)
def test_spans_of_documents_whose_ids_ascend(name: str, axis: str) -> None:
    """Along either axis, by the form of the condition that has it."""
    assert check_span(RUNS[name], axis), "what is seen is one run, but no span was found"


def test_what_is_written_twice_is_the_same_twice() -> None:
    both = RUNS["ascending"].structure.root
    assert both.op == "alike"
    pairs = pair_symbols((0, EXTENT - 1, 0, EXTENT - 1))
    first, second = evaluate(
        list(both.args), pairs, RUNS["ascending"].tensors, RUNS["ascending"].numbers, torch.float64
    )
    assert torch.equal(first, second)
    same = IDS[:, None] == IDS
    assert torch.equal(first.expand(2, 3, EXTENT, EXTENT)[0, 0], same)


@pytest.mark.parametrize(("mask", "at_ends"), [*((mask, True) for mask in RUNS.values()), (tw.document(IDS), False)])
def test_what_never_falls_is_read_at_the_ends_of_a_tile(mask: Mask, at_ends: bool) -> None:
    """Nobody looks for the least and largest numbers of its blocks."""
    tables = tile_rule(mask.structure.text).tables
    assert all(set(table.dims) == {"keep"} for table in tables) is at_ends


@pytest.mark.parametrize("mask", [~tw.window(3, 2), tw.dilated(2), tw.document(torch.arange(EXTENT) // 4)], ids=repr)
def test_masks_that_need_not_be_one_run_have_no_span(mask: Mask) -> None:
    assert not check_span(mask, "j")


@given(tree=bool_trees(max_leaves=3))
def test_spans_of_random_masks(tree: Any) -> None:
    mask = tw.mask(as_mask_function(tree, captured_tensors()))
    for axis in ("i", "j"):
        check_span(mask, axis)


@given(name=st.sampled_from(sorted(LIBRARY)), tile=tiles(extent=12))
def test_span_bounds_of_a_tile(name: str, tile: Any) -> None:
    """[first any, last any] holds what any query of the tile sees, [first all, last all] only what every one sees."""
    (i0, i1, _, _), block = tile
    mask = LIBRARY[name]
    span = solve(mask.structure.root, "j")
    assume(span is not None)
    assert span is not None
    ends = span_bounds(span)
    assume(ends is not None)
    assert ends is not None
    at = tile_symbols((i0, i1, 0, 0), block)
    values = [x.expand(2, 3, 1) for x in (y.squeeze(-1) if y.ndim == 4 else y.expand(2, 3, 1) for y in (
        v.expand(2, 3, 1, 1) for v in evaluate(ends, at, mask.tensors, mask.numbers, torch.float64)))]  # fmt: skip
    j = torch.arange(30)
    visible = mask.evaluate(dtype=torch.float64, **pair_symbols((i0, i1, 0, 29))).expand(2, 3, i1 - i0 + 1, 30)
    any_run, all_run = (j >= values[0]) & (j <= values[1]), (j >= values[2]) & (j <= values[3])
    assert not (visible.any(2) & ~any_run).any()
    assert not (all_run & ~visible.all(2)).any()
