"""The Triton kernels of softmax: equal to PyTorch, in registers and in chunks, and broken twins are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.softmax import triton_softmax
from tilewise.testing import operators
from tilewise.testing import softmax as cases
from tilewise.testing.inputs import untouched
from tilewise.testing.softmax import BY_NAME, CASES, SoftmaxCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)


def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_softmax, "_FORWARD", 0)
    monkeypatch.setattr(triton_softmax, "_BACKWARD", 0)
    monkeypatch.setattr(triton_softmax, "_CHUNK", 32)
    monkeypatch.setattr(triton_softmax, "_EACH", 1)


# many short rows are not what chunks are for
WAYS = [(case, chunks) for case in CASES for chunks in (False, True) if not (chunks and case.name == "many_short")]


@pytest.mark.parametrize(("case", "chunks"), WAYS, ids=repr)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: SoftmaxCase, log: bool, dtype: torch.dtype, chunks: bool, monkeypatch) -> None:
    if chunks:
        in_chunks(monkeypatch)
    cases.check(case, dtype, log, "triton")


@pytest.mark.parametrize("log", [False, True])
def test_wide(log: bool) -> None:
    cases.check(SoftmaxCase("wide", (2, 40001)), torch.float16, log, "triton")


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_nan_stays_in_its_row(log: bool, chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunks:
        in_chunks(monkeypatch)
    case = BY_NAME["width_64"]
    operators.poisoned(cases.ours(case, log, "triton"), cases.make_inputs(case, torch.float32), "x", 2)


def test_a_mask_whose_columns_lie_far_apart() -> None:
    """2**31 elements and more from the first to the last; only what is named of its memory is touched."""
    width = 2**11
    mask = untouched(2**31 + width, torch.bool).as_strided((1, width), (1, 2**31 // (width - 1) + 1))
    mask.copy_(torch.rand(1, width) < 0.5)
    x = torch.randn(1, width)
    want = tw.softmax(x, mask=mask.contiguous(), impl="triton")
    assert torch.equal(tw.softmax(x, mask=mask, impl="triton"), want)


def test_zero_rows() -> None:
    x = torch.zeros(0, 5, requires_grad=True)
    o = tw.softmax(x, impl="triton")
    o.sum().backward()
    assert o.shape == x.grad.shape == (0, 5)


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for log in (False, True, False):
        for name in ("width_64", "mask", "sliced", "hot", "mask_of_rows", "width_64"):
            cases.check(BY_NAME[name], torch.float32, log, "triton")


TWINS = [
    ("softmax_rows_fwd", "w * (1.0 / total)[:, None]", "w", False, "width_64"),
    ("softmax_rows_fwd", "tl.where(total == 0.0, 1.0, total)", "total", False, "mask"),
    ("softmax_rows_fwd", "base = i * strides_mask[0] + j", "base = j", False, "mask_of_rows"),
    ("softmax_rows_fwd", ".to(tl.float32) * inv_t", ".to(tl.float32)", False, "hot"),
    ("softmax_chunks_fwd", "l_i * tl.math.exp2((m_i - shift) * LOG2E)", "l_i", True, "width_1000"),
    ("softmax_chunks_fwd", "for start in range(0, width,", "for start in range(0, 32,", True, "width_1000"),
    ("softmax_rows_bwd", "o * (do - total)", "o * do", False, "width_64"),
    ("softmax_rows_bwd", ", LOG) * inv_t", ", LOG)", False, "hot"),
    ("softmax_chunks_bwd", "acc += part", "acc = part", True, "width_1000"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "chunks", "name"), TWINS)
def test_a_broken_twin_is_caught(kernel, old, new, chunks, name, tmp_path: Path, monkeypatch) -> None:
    if chunks:
        in_chunks(monkeypatch)
    cases.check(BY_NAME[name], torch.float32, False, "triton")  # whole, it passes
    copy = broken_copy(triton_softmax, old, new, tmp_path)
    monkeypatch.setattr(triton_softmax, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        cases.check(BY_NAME[name], torch.float32, False, "triton")
