"""The Triton kernels of `tile_means`, `tile_scores` and of taking tiles, in any shape, and broken twins are caught."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.interpret.test_twins import fails_when_broken
from tilewise.ops import triton_launch
from tilewise.ops.select import triton_select
from tilewise.ops.tile_means import tile_means as means_of_tiles
from tilewise.ops.tile_means import triton_tile_means
from tilewise.ops.tile_scores import triton_tile_scores
from tilewise.testing import select, tile_means, tile_scores
from tilewise.testing.select import RowsCase
from tilewise.testing.tile_means import MeansCase
from tilewise.testing.tile_scores import ScoresCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
STEPS = MeansCase("steps", 40, (90,), 1, 64)  # of fewer rows than a tile, where a thread has few elements
ROWS = [case for case in select.CASES if case.shape[-1] <= 37]


@pytest.mark.parametrize("case", [case for case in tile_means.CASES if case.name != "steps"], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_means_of_tiles(case: MeansCase, dtype: torch.dtype) -> None:
    tile_means.check(case, dtype, "triton")


def test_rows_of_nearly_nothing_have_no_direction() -> None:
    x = torch.full((1, 4, 1, 1), 2.0**-64)
    assert means_of_tiles(x, 4, similarity=True, impl="triton")[1].item() == 0.0
    assert means_of_tiles(4.0 * x, 4, similarity=True, impl="triton")[1].item() == 1.0


def test_tiles_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tile_means, "_EACH", 8)
    tile_means.check(STEPS, torch.float32, "triton")


@pytest.mark.parametrize("case", tile_scores.CASES, ids=repr)
def test_scores_of_tiles(case: ScoresCase) -> None:
    tile_scores.check(case, "triton")


@pytest.mark.parametrize("case", ROWS, ids=repr)
def test_tiles_taken(case: RowsCase) -> None:
    select.check(case, "triton")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["mass", "count", "share", "weight"]),
    amount=st.floats(0.01, 1.0),
    count=st.integers(1, 40),
    alike=st.booleans(),
    rows=st.integers(1, 3),
    tiles=st.integers(1, 40),
    group=st.integers(1, 2),
)
def test_any_rows(kind: str, amount: float, count: int, alike: bool, rows: int, tiles: int, group: int) -> None:
    amounts = (float(count) if kind == "count" else amount,) * group
    select.check(RowsCase(kind, amounts, alike, (1, group, rows, tiles), 1), "triton")


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for _ in range(2):
        for rows in ROWS[:8]:
            select.check(rows, "triton")
        for means in tile_means.CASES[:4]:
            tile_means.check(means, torch.float32, "triton")
        for scores in tile_scores.CASES[:4]:
            tile_scores.check(scores, "triton")


ALIKE = RowsCase("mass", (0.5,) * 4, True)
TWINS = [
    (triton_tile_means, ("tile_means_fwd",), "1.0 / tl.maximum(count, 1)", "1.0 / (count * 0 + BLOCK)", "halves"),
    (triton_tile_means, ("tile_means_fwd",), "tl.where(inside, x - mean[None, :], 0.0)", "x - mean[None, :]", "halves"),
    (triton_tile_means, ("tile_means_fwd",), "tl.math.rsqrt(size)", "1.0", "halves"),
    (triton_tile_means, ("tile_means_fwd", "tile_means_bwd"), "tl.load(CU + sequence + 1) - first", "BLOCK + 0 * first",
     "packed"),
    (triton_tile_means, ("tile_means_bwd",), "2.0 * inv", "inv", "halves"),
    (triton_tile_scores, ("tile_scores_fwd",), "tl.minimum(rows - tile * TILE, TILE)", "TILE", "ragged"),
    (triton_tile_scores, ("tile_scores_fwd",), "tile * EACH + n", "tile + n", "ragged"),
    (triton_tile_scores, ("tile_scores_fwd",), "head // GROUP", "head % GROUP", "ragged"),
    (triton_tile_scores, ("tile_scores_fwd",), "(pid >= 0) & (pid < of_q)", "(pid > 0) & (pid < of_q)", "ragged"),
    (triton_select, ("take_tiles",), "bits ^ 0xFFFFFFFF, bits ^ 0x80000000", "bits, bits ^ 0x80000000", "mass"),
    (triton_select, ("take_tiles",), "ties & (before < enough)", "ties", "mass"),
    (triton_select, ("take_tiles",), "s = tl.where(s == 0.0, 0.0, s)", "s = s", "mass"),
    (triton_select, ("take_tiles",), "h // GROUP) * tiles", "h % GROUP) * tiles", "alike"),
    (triton_select, ("take_tiles",), "taken | (seen & (judged == 0))", "taken", "alike"),
    (triton_select, ("take_tiles",), "tl.where(strange, seen,", "tl.where(False, seen,", "mass"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kernels", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    module: ModuleType, kernels: tuple[str, ...], old: str, new: str, name: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def check() -> None:
        if module is triton_tile_means:
            tile_means.check(tile_means.BY_NAME[name], torch.float32, "triton")
        elif module is triton_tile_scores:
            tile_scores.check(tile_scores.BY_NAME[name], "triton")
        else:
            select.check(ALIKE if name == "alike" else select.CASES[0], "triton")

    fails_when_broken(check, module, kernels, old, new, tmp_path, monkeypatch)
