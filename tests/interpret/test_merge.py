"""The Triton kernels that merge states: equal to softmax in all forms, and the properties that the CPU path faces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.merge import triton_merge
from tilewise.testing import merging
from tilewise.testing.matrix import name_of
from tilewise.testing.merging import BY_NAME, CASES, MergeCase, Setting

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)
SETTINGS = [Setting("triton", dtype) for dtype in DTYPES]
SOME = [BY_NAME[name] for name in ("pair", "stacked", "ragged")]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_equals_softmax(setting: Setting, case: MergeCase) -> None:
    merging.equals_softmax(setting, case)


@pytest.mark.parametrize("elements", [64, 512])
@pytest.mark.parametrize("name", ["pair", "stacked_packed", "ragged"])
def test_other_tiles(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_merge, "_ELEMENTS", elements)
    merging.equals_softmax(SETTINGS[0], BY_NAME[name])


@pytest.mark.parametrize(("check", "setting", "case"), merging.property_matrix(SETTINGS), ids=name_of)
def test_property(check: merging.Check, setting: Setting, case: MergeCase) -> None:
    check(setting, case)


def test_states_of_two_dtypes() -> None:
    """A float32 sum so far, and a partial result as attention gives it."""
    inputs = merging.make_inputs(BY_NAME["pair"], torch.float32)
    states = [(inputs.o[0], inputs.lse[0]), (inputs.o[1].detach().half(), inputs.lse[1])]
    got, want = tw.merge(*states, impl="triton"), tw.merge(*states, impl="reference")
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_calls_of_other_sizes_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {case.name: merging.run(SETTINGS[0], merging.make_inputs(case, torch.float32)) for case in SOME}
    monkeypatch.setattr(triton_launch, "remember", True)
    for case in (*SOME, *(BY_NAME[name] for name in ("three_packed", "sliced", "ragged_long")), *SOME):
        found = merging.run(SETTINGS[0], merging.make_inputs(case, torch.float32))
        if case in SOME:
            merging.same_bits(alone[case.name], found)


TWINS = [
    ("merge_fwd", 'lse = tl.where(empty, float("-inf"), shift +', 'lse = tl.where(empty, float("-inf"),', "pair"),
    ("merge_fwd", "tl.where(empty, 1.0, total)", "total", "ragged"),
    ("merge_fwd", "acc += tl.sum(o * weight[:, :, None], 1)", "acc = tl.sum(o * weight[:, :, None], 1)", "pair"),
    ("merge_fwd", "alive = nth[None, :] < count[:, None]", "alive = nth[None, :] < BLOCK_S", "ragged"),
    ("merge_fwd", "b * strides[4 * n + 1] + m", "b * strides[1] * n + m", "pair"),
    ("merge_bwd", "(onto - mean[:, None])", "onto", "stacked"),
    ("merge_bwd", "dlse[:, None] + (", "(", "pair"),
    ("merge_bwd", "weight[:, :, None] * do[:, None, :]", "1.0 * do[:, None, :]", "ragged"),
    ("merge_bwd", "number * strides_do[4 * n]", "number", "stacked"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merging.equals_softmax(SETTINGS[0], BY_NAME[name])  # whole, it passes
    copy = broken_copy(triton_merge, old, new, tmp_path)
    monkeypatch.setattr(triton_merge, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        merging.equals_softmax(SETTINGS[0], BY_NAME[name])


def test_a_copy_with_no_mistake_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = broken_copy(triton_merge, "import triton\n", "import triton\n", tmp_path)
    for kernel in ("merge_fwd", "merge_bwd"):
        monkeypatch.setattr(triton_merge, kernel, getattr(copy, kernel))
    merging.equals_softmax(SETTINGS[0], BY_NAME["ragged"])
