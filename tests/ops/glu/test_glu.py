"""`swiglu`, `geglu` and `reglu` on a CPU: against PyTorch in float64, errors, operators, properties."""

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
from tilewise.testing.glu import ACTIVATIONS, BY_NAME, CASES, GluCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: GluCase, activation: str, impl: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, activation, impl)


@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    lies=st.sampled_from(["", "packed", "wider", "misaligned"]),
    activation=st.sampled_from(list(ACTIVATIONS)),
)
def test_any_shape(shape, width, dtype, lies, activation) -> None:
    case = GluCase("any", (*shape, width), lies)
    if 0 not in shape:
        cases.check(case, dtype, activation, "cpu")
        return
    inputs = cases.make_inputs(case, dtype)
    found = operators.results(ACTIVATIONS[activation], inputs)
    assert found["out0"].shape == case.shape
    assert all(found[f"d{name}"].shape == x.shape for name, x in inputs.items())


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_in_its_row(impl: str, activation: str) -> None:
    case = BY_NAME["vectors"]
    for name in ("gate", "up"):
        operators.poisoned(cases.ours(case, activation, impl), cases.make_inputs(case, torch.float32), name, 2)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["gate", "up"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_of_gradients_is_where_pytorch_has_it(impl: str, name: str, activation: str) -> None:
    inputs = cases.make_inputs(BY_NAME["seven"], torch.float32)
    with torch.no_grad():
        inputs[name][1, 2] = torch.nan
    operators.check(cases.ours(BY_NAME["seven"], activation, impl), cases.plain(BY_NAME["seven"], activation), inputs)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_no_gradient_reaches_a_gate_of_0(impl: str) -> None:
    gate = torch.zeros(3, requires_grad=True)
    tw.reglu(gate, torch.ones(3), impl=impl).sum().backward()
    assert not gate.grad.any()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_gradient_alone(impl: str, wanted: str) -> None:
    inputs = cases.make_inputs(BY_NAME["seven"], torch.float32)
    inputs = {name: x.detach().requires_grad_(name == wanted) for name, x in inputs.items()}
    operators.check(cases.ours(BY_NAME["seven"], "gelu", impl), cases.plain(BY_NAME["seven"], "gelu"), inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str) -> None:
    packed = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ACTIVATIONS[activation], (packed,))
    gate, up = (torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(ACTIVATIONS[activation], (gate, up))


GOOD = torch.zeros(2, 4)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "gate_list": ({"gate": [1.0]}, "gate", "list"),
    "gate_scalar": ({"gate": torch.tensor(1.0)}, "gate", "()"),
    "gate_sparse": ({"gate": GOOD.to_sparse()}, "gate", "sparse"),
    "gate_integers": ({"gate": GOOD.long()}, "gate", "torch.int64"),
    "gate_odd": ({"gate": torch.zeros(2, 3)}, "gate", "(2, 3)"),
    "up_list": ({"up": [1.0]}, "up", "list"),
    "up_sparse": ({"up": GOOD.to_sparse()}, "up", "sparse"),
    "up_shape": ({"up": torch.zeros(2, 2)}, "up", "(2, 2)"),
    "up_dtype": ({"up": GOOD.double()}, "up", "torch.float64"),
    "up_elsewhere": ({"up": GOOD.to("meta")}, "up", "meta"),
    "impl": ({"impl": "other"}, "impl", "other"),
}


@pytest.mark.parametrize("function", [tw.swiglu, tw.geglu, tw.reglu])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, function) -> None:
    arguments, what, got = BAD[name]
    with pytest.raises(InputError) as caught:
        function(**({"gate": GOOD} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


@pytest.mark.parametrize("approximate", ["sigmoid", None, ["tanh"]])
def test_bad_approximations(approximate: Any) -> None:
    with pytest.raises(InputError, match="approximate: got"):
        tw.geglu(GOOD, approximate=approximate)


def test_kernels_need_a_gpu_and_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.swiglu(GOOD, impl="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="needs dtype float16"):
        tw.swiglu(GOOD.double(), impl="triton")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(activation: str, dynamic: bool, packed: bool) -> None:
    torch._dynamo.reset()

    def model(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if packed:
            return ACTIVATIONS[activation](torch.cat((2.0 * gate, up), -1)).sin()
        return ACTIVATIONS[activation](2.0 * gate, up).sin()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 4):
        gate, up = (torch.randn(rows, 6, requires_grad=True) for _ in range(2))
        found = []
        for run in (compiled, model):
            o = run(gate, up)
            found.append((o, *torch.autograd.grad(o.sum(), (gate, up))))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("packed", [False, True])
def test_operators_pass_opcheck(packed: bool) -> None:
    names = ["gate"] if packed else ["gate", "up"]
    tensors = [torch.randn(3, 4, requires_grad=True) for _ in names]
    how = f"({names!r}, {{'activation': 'silu'}})"
    torch.library.opcheck(torch.ops.tilewise.glu.default, (tensors, how, "cpu"))
    kept = [x.detach() for x in tensors]
    do = torch.randn(3, 2 if packed else 4)
    torch.library.opcheck(torch.ops.tilewise.glu_backward.default, (kept, [do], how, " ".join(names), "cpu"))
