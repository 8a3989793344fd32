"""The Triton kernels of gated linear units: equal to PyTorch however inputs lie, and broken twins are caught."""

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
from tilewise.testing.glu import ACTIVATIONS, BY_NAME, CASES, GluCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers overflow
DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: GluCase, activation: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, activation, "triton")


@pytest.mark.parametrize("lies", ["", "packed"])
def test_places_beyond_32_bits(lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_glu, "_NARROW", 0)
    cases.check(GluCase("large", (3, 72), lies), torch.float32, "silu", "triton")


@pytest.mark.parametrize("lies", ["", "packed"])
def test_many_programs_for_a_row(lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_glu, "_BYTES", 32)
    for shape in ((3, 24), (2, 5, 7)):
        cases.check(GluCase("short", shape, lies), torch.float32, "silu", "triton")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out(activation: str) -> None:
    """Where exponentials overflow and underflow."""
    gate = torch.tensor([-1e4, -200.0, -90.0, -20.0, -0.0, 1e-30, 20.0, 90.0, 200.0, 1e4]).requires_grad_()
    inputs = {"gate": gate, "up": torch.linspace(-2.0, 2.0, 10).requires_grad_()}
    for cut in (slice(0, 5), slice(5, 9), slice(9, 10)):  # budgets follow the largest
        some = {name: x.detach()[cut].requires_grad_() for name, x in inputs.items()}
        case = GluCase("far", tuple(some["gate"].shape))
        operators.check(cases.ours(case, activation, "triton"), cases.plain(case, activation), some)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["gate", "up"])
def test_nan_is_where_pytorch_has_it(activation: str, name: str) -> None:
    case = BY_NAME["vectors"]
    inputs = cases.make_inputs(case, torch.float32)
    with torch.no_grad():
        inputs[name][1] = torch.nan
    operators.check(cases.ours(case, activation, "triton"), cases.plain(case, activation), inputs)


@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_gradient_alone(wanted: str) -> None:
    case = BY_NAME["wide"]
    inputs = {n: x.detach().requires_grad_(n == wanted) for n, x in cases.make_inputs(case, torch.float32).items()}
    operators.check(cases.ours(case, "gelu", "triton"), cases.plain(case, "gelu"), inputs)


def test_zero_rows() -> None:
    gate = torch.zeros(0, 6, requires_grad=True)
    o = tw.swiglu(gate, impl="triton")
    o.sum().backward()
    assert (o.shape, gate.grad.shape) == ((0, 3), (0, 6))


def test_a_gradient_of_one_number_for_all() -> None:
    """What the sum of o hands back has stride 0."""
    gate, up = (x.detach().requires_grad_() for x in cases.make_inputs(BY_NAME["vectors"], torch.float32).values())
    found = [torch.autograd.grad(tw.swiglu(gate, up, impl=impl).sum(), (gate, up)) for impl in ("triton", "cpu")]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    monkeypatch.setattr(triton_glu, "_PLANS", triton_launch.Plans())
    for activation in ("silu", "relu", "silu"):
        for name in ("vectors", "wide", "vectors_packed", "wider", "misaligned", "odd_packed", "vectors"):
            cases.check(BY_NAME[name], torch.float32, activation, "triton")
    both = torch.randn(4, 8)
    packed, apart = tw.swiglu(both, impl="triton"), tw.swiglu(both, both, impl="triton")
    torch.testing.assert_close(packed, tw.swiglu(both))
    torch.testing.assert_close(apart, tw.swiglu(both, both))


TWINS = [
    ("glu_fwd", "value * up", "value + up", "silu", "vectors"),
    ("glu_fwd", "row * stride_up + up_at", "row * stride_up", "silu", "vectors_packed"),
    ("glu_fwd", "tl.where(x < 0.0, far, near)", "near", "silu", "vectors"),
    ("glu_fwd", "0.7107068705", "0.7117068705", "gelu", "vectors"),
    ("glu_fwd", "0.07135481627260025", "0.0713458", "gelu_tanh", "vectors"),
    ("glu_fwd", "tl.where(x < 0.0, 0.0, x)", "x", "relu", "vectors"),
    ("glu_fwd", "tl.zeros_like(place) if FLAT else place // width", "place * 0", "silu", "seven_packed"),
    ("glu_fwd", "place - row * width", "place", "silu", "seven_packed"),
    ("glu_bwd", "near * far", "near", "silu", "vectors"),
    ("glu_bwd", "0.3989422804014327 * bell", "bell", "gelu", "vectors"),
    ("glu_bwd", "0.21406444881780075", "0.07135481627260025", "gelu_tanh", "vectors"),
    ("glu_bwd", "tl.where(gate <= 0.0, 0.0, dgate)", "dgate", "relu", "vectors"),
    ("glu_bwd", "do * value", "do", "silu", "vectors"),
    ("glu_bwd", "row * stride_d + up_at", "row * stride_d", "silu", "vectors_packed"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "old", "new", "activation", "name"), TWINS)
def test_a_broken_twin_is_caught(kernel, old, new, activation, name, tmp_path: Path, monkeypatch) -> None:
    cases.check(BY_NAME[name], torch.float32, activation, "triton")  # whole, it passes
    copy = broken_copy(triton_glu, old, new, tmp_path)
    monkeypatch.setattr(triton_glu, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        cases.check(BY_NAME[name], torch.float32, activation, "triton")
