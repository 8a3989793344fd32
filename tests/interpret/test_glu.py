"""The Triton kernels of gated linear units: equal to PyTorch, and broken twins are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.glu import triton_glu
from tilewise.testing import glu as cases
from tilewise.testing import operators
from tilewise.testing.glu import BY_NAME, CASES, KINDS, GluCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: GluCase, kind: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, kind, "triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gate", "up"])
def test_nan_stays_in_its_row(kind: str, name: str) -> None:
    case = BY_NAME["width_64"]
    operators.poisoned(cases.ours(case, kind, "triton"), cases.make_inputs(case, torch.float32), name, 2)


@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_gradient_alone(wanted: str) -> None:
    inputs = {name: torch.randn(3, 5, requires_grad=name == wanted) for name in ("gate", "up")}
    (got,) = torch.autograd.grad(tw.swiglu(**inputs, impl="triton").sum(), inputs[wanted])
    (want,) = torch.autograd.grad(tw.swiglu(**inputs, impl="cpu").sum(), inputs[wanted])
    torch.testing.assert_close(got, want)


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for kind in ("silu", "relu", "silu"):
        for name in ("width_64", "packed_64", "sliced", "packed_7", "width_64"):
            cases.check(BY_NAME[name], torch.float32, kind, "triton")
    monkeypatch.setattr(triton_glu, "_PLANS", triton_launch.Plans())
    both = torch.randn(4, 8)
    for up in (None, both, None):
        torch.testing.assert_close(tw.swiglu(both, up, impl="triton"), tw.swiglu(both, up))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_where_pytorch_has_it(kind: str, packed: bool) -> None:
    cases.check_nan(kind, packed, "triton")


@pytest.mark.parametrize("kind", KINDS)
def test_far_out(kind: str) -> None:
    """Where exponentials overflow and underflow; apart, since budgets follow the largest."""
    for numbers in ([-1e4, -200.0, -90.0, -20.0], [-5.0, -0.0, 1e-30, 5.0], [20.0, 90.0, 200.0], [1e4]):
        gate = torch.tensor(numbers, requires_grad=True)
        inputs = {"gate": gate, "up": torch.linspace(-2.0, 2.0, len(numbers)).requires_grad_()}
        operators.check(cases.ours(GluCase("far", (len(numbers),)), kind, "triton"), cases.plain(kind), inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_places_beyond_32_bits(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_glu, "_NARROW", 0)
    cases.check(GluCase("large", (3, 72), packed), torch.float32, "silu", "triton")


@pytest.mark.parametrize("packed", [False, True])
def test_many_programs_for_a_row(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_glu, "_BYTES", 32)
    for shape in ((3, 24), (2, 5, 7)):
        cases.check(GluCase("short", shape, packed), torch.float32, "silu", "triton")


def test_misaligned_rows_and_gradients_of_stride_0() -> None:
    lies = torch.randn(2, 49)[:, 1:].requires_grad_()
    found = []
    for impl in ("triton", "cpu"):
        o = tw.swiglu(lies, impl=impl)
        found.append((o, *torch.autograd.grad(o.sum(), lies)))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_rounded_gelu() -> None:
    cases.check_rounded_gelu(torch.float16, "triton")


ROUNDED = (("0.7107068705", "0.7109068705"), ("tl.where(x < 0.0, tail, 1.0 - tail)", "tail"))


@pytest.mark.parametrize(("old", "new"), ROUNDED)
def test_a_broken_twin_of_rounded_gelu_is_caught(old: str, new: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(triton_glu, "glu_fwd", broken_copy(triton_glu, old, new, tmp_path).glu_fwd)
    with pytest.raises(AssertionError):
        cases.check_rounded_gelu(torch.float16, "triton")


TWINS = [
    ("glu_fwd", "value * up", "value + up", "silu", "width_64"),
    ("glu_fwd", "row * stride_up + up_at", "row * stride_up", "silu", "packed_64"),
    ("glu_fwd", "tl.where(x < 0.0, far, near)", "near", "silu", "width_64"),
    ("glu_fwd", "0.5 + 0.5 * tl.math.erf", "0.5 + 0.4 * tl.math.erf", "gelu", "width_64"),
    ("glu_fwd", "0.07135481627260025", "0.0713458", "gelu_tanh", "width_64"),
    ("glu_fwd", "tl.where(x < 0.0, 0.0, x)", "x", "relu", "width_64"),
    ("glu_fwd", "tl.zeros_like(place) if FLAT else place // width", "place * 0", "silu", "packed_7"),
    ("glu_fwd", "place - row * width", "place", "silu", "packed_7"),
    ("glu_bwd", "near * far", "near", "silu", "width_64"),
    ("glu_bwd", "0.3989422804014327 * bell", "bell", "gelu", "width_64"),
    ("glu_bwd", "0.21406444881780075", "0.07135481627260025", "gelu_tanh", "width_64"),
    ("glu_bwd", "tl.where(gate <= 0.0, 0.0, dgate)", "dgate", "relu", "width_64"),
    ("glu_bwd", "do * value", "do", "silu", "width_64"),
    ("glu_bwd", "row * stride_d + up_at", "row * stride_d", "silu", "packed_64"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "kind", "name"), TWINS)
def test_a_broken_twin_is_caught(kernel, old, new, kind, name, tmp_path: Path, monkeypatch) -> None:
    cases.check(BY_NAME[name], torch.float32, kind, "triton")  # whole, it passes
    copy = broken_copy(triton_glu, old, new, tmp_path)
    monkeypatch.setattr(triton_glu, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        cases.check(BY_NAME[name], torch.float32, kind, "triton")
