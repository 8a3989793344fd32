"""Gated linear units on a CPU: against PyTorch in float64, errors, operators, properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.testing import glu as cases
from tilewise.testing import operators
from tilewise.testing.glu import BY_NAME, CASES, KINDS, GluCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = (tw.swiglu, tw.geglu, tw.reglu)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: GluCase, kind: str, impl: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, kind, impl)


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    width=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES[1:]),
    kind=st.sampled_from(KINDS),
    packed=st.booleans(),
    sliced=st.booleans(),
)
def test_any_shape(shape, width, dtype, kind, packed, sliced) -> None:
    case = GluCase("any", (*shape, width), packed, sliced)
    if 0 in shape:
        inputs = cases.make_inputs(case, dtype)
        o = cases.ours(case, kind, None)(**inputs)
        o.sum().backward()
        assert o.shape == case.shape
        assert all(x.grad.shape == x.shape for x in inputs.values())
        return
    cases.check(case, dtype, kind, "cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gate", "up"])
def test_nan_stays_in_its_row(impl: str, kind: str, name: str) -> None:
    case = BY_NAME["width_64"]
    operators.poisoned(cases.ours(case, kind, impl), cases.make_inputs(case, torch.float32), name, 2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_nan_is_where_pytorch_has_it(kind: str, packed: bool, impl: str) -> None:
    cases.check_nan(kind, packed, impl)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_gradcheck(kind: str, packed: bool, impl: str) -> None:
    case = GluCase("small", (3, 4), packed)
    inputs = cases.make_inputs(case, torch.float64)
    assert torch.autograd.gradcheck(cases.ours(case, kind, impl), tuple(inputs.values()))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_gradient_alone(function, wanted: str) -> None:
    inputs = {name: torch.randn(3, 5, requires_grad=name == wanted) for name in ("gate", "up")}
    both = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    do = torch.randn(3, 5)
    function(**inputs).backward(do)
    function(**both).backward(do)
    for name, x in inputs.items():
        assert (x.grad is not None) == (name == wanted)
    assert torch.equal(inputs[wanted].grad, both[wanted].grad)


GOOD = torch.zeros(2, 4)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "gate_list": ({"gate": [1.0]}, "gate", "list"),
    "gate_scalar": ({"gate": torch.tensor(1.0)}, "gate", "()"),
    "gate_sparse": ({"gate": GOOD.to_sparse()}, "gate", "torch.sparse_coo"),
    "gate_integers": ({"gate": GOOD.long()}, "gate", "torch.int64"),
    "gate_odd": ({"gate": GOOD[:, :3], "up": None}, "gate", "(2, 3)"),
    "up_list": ({"up": [1.0]}, "up", "list"),
    "up_shape": ({"up": GOOD[:, :3]}, "up", "(2, 3)"),
    "up_dtype": ({"up": GOOD.half()}, "up", "torch.float16"),
    "up_elsewhere": ({"up": GOOD.to("meta")}, "up", "meta"),
    "impl": ({"impl": "other"}, "impl", "other"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, function) -> None:
    arguments, what, got = BAD[name]
    with pytest.raises(InputError) as caught:
        function(**({"gate": GOOD, "up": GOOD} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


def test_unknown_approximation() -> None:
    with pytest.raises(InputError, match="approximate: got 'other'"):
        tw.geglu(GOOD, approximate="other")


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.swiglu(GOOD, impl="triton")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(packed: bool, dynamic: bool) -> None:
    torch._dynamo.reset()

    def model(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return tw.swiglu(2.0 * gate, up).sin()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 4):
        gate, up = (torch.randn(rows, 6, requires_grad=True) for _ in range(2))
        wanted = [gate] if packed else [gate, up]
        found = []
        for run in (compiled, model):
            o = run(gate, None if packed else up)
            found.append((o, *torch.autograd.grad(o.sum(), wanted)))
        torch.testing.assert_close(*found)


def test_operators_pass_opcheck() -> None:
    gate, up = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    how = "(['gate', 'up'], {'activation': 'gelu'})"
    torch.library.opcheck(torch.ops.tilewise.glu.default, ([gate, up], how, "cpu"))
    kept, do = [gate.detach(), up.detach()], [torch.randn(3, 4)]
    torch.library.opcheck(torch.ops.tilewise.glu_backward.default, (kept, do, how, "gate up", "cpu"))
