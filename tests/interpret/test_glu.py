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
        for name in ("width_64", "packed_64", "sliced", "width_64"):
            cases.check(BY_NAME[name], torch.float32, kind, "triton")


TWINS = [
    ("glu_fwd", "activation(gate, KIND)[0] * up", "activation(gate, KIND)[0] + up", "silu", "width_64"),
    ("glu_fwd", "GATE + row * stride_g", "GATE + row * width", "silu", "packed_64"),
    ("glu_fwd", "0.5 + 0.5 * tl.math.erf", "0.5 + 0.4 * tl.math.erf", "gelu", "width_64"),
    ("glu_fwd", "first = tile % blocks * BLOCK_W", "first = 0 * tile", "silu", "packed_2049"),
    ("glu_bwd", "(1.0 + x * (1.0 - s))", "(1.0 + x * s)", "silu", "width_64"),
    ("glu_bwd", "* DENSITY", "", "gelu", "width_64"),
    ("glu_bwd", "3.0 * CUBIC", "CUBIC", "gelu_tanh", "width_64"),
    ("glu_bwd", "tl.where(x <= 0.0, 0.0, 1.0)", "0.0 * x + 1.0", "relu", "width_64"),
    ("glu_bwd", "DUP + row * stride_du", "DUP + row * width", "silu", "packed_64"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "kind", "name"), TWINS)
def test_a_broken_twin_is_caught(kernel, old, new, kind, name, tmp_path: Path, monkeypatch) -> None:
    cases.check(BY_NAME[name], torch.float32, kind, "triton")  # whole, it passes
    copy = broken_copy(triton_glu, old, new, tmp_path)
    monkeypatch.setattr(triton_glu, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        cases.check(BY_NAME[name], torch.float32, kind, "triton")
