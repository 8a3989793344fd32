"""`softmax` and `log_softmax` on a CPU: against PyTorch in float64, errors, operators, properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.testing import operators
from tilewise.testing import softmax as cases
from tilewise.testing.softmax import BY_NAME, CASES, SoftmaxCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = (tw.softmax, tw.log_softmax)


# float64 stays float64
KINDS = [(case, dtype) for case in CASES for dtype in DTYPES if dtype != torch.float64 or case.out is None]


@pytest.mark.parametrize(("case", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_equals_pytorch(case: SoftmaxCase, log: bool, impl: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, log, impl)


@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES[1:]),
    temperature=st.sampled_from([0.2, 1.0, 7.0]),
    masked=st.booleans(),
    lies=st.sampled_from(["", "sliced"]),
    log=st.booleans(),
)
def test_any_shape(shape, width, dtype, temperature, masked, lies, log) -> None:
    mask = (*[1] * len(shape), width) if masked and shape else None
    case = SoftmaxCase("any", (*shape, width), mask, temperature, sliced=lies == "sliced")
    if 0 in shape:
        x = torch.zeros(case.shape, dtype=dtype, requires_grad=True)
        o = tw.softmax(x)
        o.sum().backward()
        assert o.shape == x.grad.shape == x.shape
        return
    cases.check(case, dtype, log, "cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("log", [False, True])
def test_nan_stays_in_its_row(impl: str, log: bool) -> None:
    case = BY_NAME["width_64"]
    operators.poisoned(cases.ours(case, log, impl), cases.make_inputs(case, torch.float32), "x", 2)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_hidden_nan_is_not_read(impl: str) -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0]])
    o = tw.softmax(x, mask=torch.tensor([True, False, True]), impl=impl)
    torch.testing.assert_close(o, torch.tensor([[1.0, -torch.inf, 2.0]]).softmax(-1))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_rows_that_keep_nothing(impl: str) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    mask = torch.tensor([[True], [False], [True]])
    o, log_o = tw.softmax(x, mask=mask, impl=impl), tw.log_softmax(x, mask=mask, impl=impl)
    assert not o[1].any()
    assert (log_o[1] == -torch.inf).all()
    for out in (o, log_o):
        (dx,) = torch.autograd.grad(out, x, torch.randn(3, 5))
        assert not dx[1].any()
        assert dx[0].any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck(function) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False, True]])
    assert torch.autograd.gradcheck(lambda x: function(x, temperature=0.7), (x,))
    assert torch.autograd.gradcheck(lambda x: function(x, mask=mask, dim=-1)[:, :2], (x,))
    assert torch.autograd.gradcheck(lambda x: function(x, 0), (x,))


GOOD = torch.zeros(2, 3)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "x_list": ({"x": [1.0]}, "x", "list"),
    "x_scalar": ({"x": torch.tensor(1.0)}, "x", "()"),
    "x_sparse": ({"x": GOOD.to_sparse()}, "x", "torch.sparse_coo"),
    "x_integers": ({"x": GOOD.long()}, "x", "torch.int64"),
    "dim_float": ({"dim": 1.0}, "dim", "1.0"),
    "dim_too_large": ({"dim": 2}, "dim", "2"),
    "mask_float": ({"mask": GOOD}, "mask", "torch.float32"),
    "mask_list": ({"mask": [True]}, "mask", "list"),
    "mask_elsewhere": ({"mask": GOOD.bool().to("meta")}, "mask", "meta"),
    "mask_shape": ({"mask": torch.ones(2, dtype=torch.bool)}, "mask", "(2,)"),
    "mask_rank": ({"mask": torch.ones(1, 2, 3, dtype=torch.bool)}, "mask", "(1, 2, 3)"),
    "temperature_0": ({"temperature": 0.0}, "temperature", "0.0"),
    "temperature_nan": ({"temperature": float("nan")}, "temperature", "nan"),
    "temperature_tensor": ({"temperature": torch.ones(())}, "temperature", "tensor"),
    "dtype_integer": ({"dtype": torch.int32}, "dtype", "int32"),
    "dtype_wide": ({"dtype": torch.float64}, "dtype", "float64"),
    "impl": ({"impl": "other"}, "impl", "other"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, function) -> None:
    arguments, what, got = BAD[name]
    with pytest.raises(InputError) as caught:
        function(**({"x": GOOD} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.softmax(GOOD, impl="triton")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(function, dynamic: bool) -> None:
    torch._dynamo.reset()

    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return function(2.0 * x, 0, mask=mask, temperature=2.0).exp().sin()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 4):
        x, mask = torch.randn(6, rows, requires_grad=True), torch.rand(6, 1) > 0.3
        found = []
        for run in (compiled, model):
            o = run(x, mask)
            found.append((o, *torch.autograd.grad(o.sum(), x)))
        torch.testing.assert_close(*found)


def test_operators_pass_opcheck() -> None:
    x, mask = torch.randn(3, 4, requires_grad=True), torch.rand(3, 4) > 0.3
    how = (
        "(['x', 'mask'], {'temperature': 2.0, 'log': False, 'in_dtype': 'torch.float32', 'out_dtype': 'torch.float32'})"
    )
    torch.library.opcheck(torch.ops.tilewise.softmax.default, ([x, mask], how, "cpu"))
    (o,) = torch.ops.tilewise.softmax([x.detach(), mask], how, "cpu")
    torch.library.opcheck(torch.ops.tilewise.softmax_backward.default, ([o], [torch.randn_like(o)], how, "x", "cpu"))
