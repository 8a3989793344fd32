"""The Triton kernel of `linear`: equal to PyTorch, bits of a row that no other row changes, broken twins are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.linear import linear, triton_linear
from tilewise.testing import linear as cases
from tilewise.testing.linear import BY_NAME, CASES, LinearCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)
NUMBERS = (1, 2, 16, 65, 130)
SHAPES = ((1, 1), (33, 300), (70, 131), (100, 264))  # out_features, in_features


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in which each sum has one order, as on a GPU: in NumPy's, a row's bits depend on its place."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def product(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        found = acc.data.copy()
        for column, row in zip(a.data.T.astype(found.dtype), b.data.astype(found.dtype), strict=True):
            found += column[:, None] * row
        return TensorHandle(found, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: LinearCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton")


@pytest.mark.parametrize("programs", [2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wider_tiles_of_weights(dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_linear, "_PROGRAMS", programs)
    cases.check(LinearCase("wide", (70, 40), 150), dtype, "triton")


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    check_invariance(out_features, in_features, dtype)


def check_invariance(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    layer = cases.layer_of(out_features, in_features, dtype, "triton", out=torch.float32)
    cases.check_invariance(layer, cases.rows_of(8, in_features, dtype), NUMBERS)


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    monkeypatch.setattr(triton_linear, "_PLANS", triton_launch.Plans())
    for case in (*CASES[:4], BY_NAME["float32_out"], BY_NAME["sliced"]):
        for bias, out in ((True, None), (False, None), (True, torch.float32), (True, None)):
            cases.check(LinearCase("kept", case.shape, case.out_features, bias, out, case.sliced), DTYPES[1], "triton")


def test_no_rows() -> None:
    assert linear(torch.zeros(0, 8), torch.zeros(5, 8), impl="triton").shape == (0, 5)


TWINS = [
    ("m.to(tl.int64) * BLOCK_M", "0 * BLOCK_M", "odd_sizes"),
    ("n.to(tl.int64) * BLOCK_N", "0 * BLOCK_N", "odd_sizes"),
    ("tl.cast(stride_x, tl.int64) * VECTOR", "in_features", "sliced"),
    ("tl.cast(stride_w, tl.int64) * VECTOR", "in_features", "sliced"),
    ("tl.cast(stride_x, tl.int64) * VECTOR", "tl.cast(stride_x, tl.int64)", "no_bias"),
    ("in_rows[:, None] & (k < in_features)", "in_rows[:, None] & (k < in_features - 1)", "odd_sizes"),
    ("in_columns[:, None] & (k < in_features)", "in_columns[:, None] & (k < in_features + 1)", "sliced"),
    ("offs_m < rows, ", "offs_m < rows - 1, ", "odd_sizes"),
    ("offs_n < out_features", "offs_n < out_features - 1", "odd_sizes"),
    ("tl.trans(w), acc,", "tl.trans(w), acc * 0.0,", "long"),
    ("tl.dot(x, tl.trans(w), acc,", "tl.dot(x, tl.trans(w), acc.to(tl.float16).to(tl.float32),", "long"),
    ("BIAS + offs_n,", "BIAS + 0 * offs_n,", "odd_sizes"),
    ("acc.to(O.dtype.element_ty)", "acc.to(X.dtype.element_ty).to(O.dtype.element_ty)", "float32_out"),
    ("tl.minimum(tiles_m - first, GROUP)", "GROUP", "many_rows"),
    ("first + place % height", "place % height", "many_rows"),
    ("all(stride % vector == 0 for stride in x.stride()[:-1])", "True", "odd"),
    ("x.stride(-1) == 1 and ", "", "transposed"),
]


@pytest.mark.parametrize(("old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(old: str, new: str, name: str, tmp_path: Path, monkeypatch) -> None:
    copy = broken_copy(triton_linear, old, new, tmp_path)
    for part in ("linear_fwd", "_reachable"):
        monkeypatch.setattr(triton_linear, part, getattr(copy, part))
    with pytest.raises(AssertionError):
        cases.check(BY_NAME[name], torch.float16, "triton")


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("first", ["m", "tl.cdiv(rows, BLOCK_M)"])
def test_an_order_that_depends_on_other_rows_is_caught(first: str, tmp_path: Path, monkeypatch) -> None:
    """Sums that begin elsewhere for each tile of rows, or number of tiles, are as near to the truth."""
    old, step = "k = (start + offs_k)[None, :]", "tl.cdiv(in_features, BLOCK_K) * BLOCK_K"
    copy = broken_copy(triton_linear, old, f"k = ((start + {first} * BLOCK_K) % ({step}) + offs_k)[None, :]", tmp_path)
    monkeypatch.setattr(triton_linear, "linear_fwd", copy.linear_fwd)
    cases.check(BY_NAME["long"], torch.float16, "triton")
    with pytest.raises(AssertionError, match="other bits"):
        check_invariance(*SHAPES[1], torch.float16)
