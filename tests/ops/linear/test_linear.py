"""`linear` on a CPU, by every implementation that runs there: against plain PyTorch, and the bits of a row alone."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops import linear as module
from tilewise.ops.linear import cpu, linear
from tilewise.ops.linear.problem import make_call
from tilewise.ops.operation import _written
from tilewise.testing import linear as cases
from tilewise.testing.linear import BY_NAME, CASES, LinearCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("cpu", "reference")
NUMBERS = (1, 2, 3, 8, 16, 17, 65)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_pytorch(impl: str, dtype: torch.dtype, case: LinearCase) -> None:
    cases.check(case, dtype, impl)


@settings(max_examples=15)
@given(
    rows=st.lists(st.integers(0, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    out=st.sampled_from([None, torch.float32]),
    impl=st.sampled_from(IMPLS),
)
def test_any_shape(rows, sizes, dtype, bias, out, impl) -> None:
    cases.check(LinearCase("any", (*rows, sizes[0]), sizes[1], bias, out), dtype, impl)


@pytest.mark.parametrize(("out_features", "in_features"), [
    (1, 1), (1, 900), (2, 1254), (3, 33), (64, 64), (77, 131), (500, 45), (33, 2000),
])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    layer = cases.layer_of(out_features, in_features, dtype, "cpu")
    cases.check_invariance(layer, cases.rows_of(12, in_features, dtype), NUMBERS)


@pytest.mark.parametrize("name", ["odd_sizes", "no_bias", "long"])
def test_some_weights_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_ELEMENTS", 700)
    cases.check(BY_NAME[name], torch.bfloat16, "cpu")


def test_an_order_that_depends_on_the_number_of_rows_is_caught() -> None:
    weight = torch.randn(30, 100)
    x = cases.rows_of(20, 100, torch.float32)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return sum(linear(a, b) for a, b in zip(x.chunk(len(x), 1), weight.chunk(len(x), 1), strict=True))

    with pytest.raises(AssertionError, match="other bits: 2 rows"):
        cases.check_invariance(layer, x, (1, 2))


def test_a_row_that_others_reach_is_caught() -> None:
    with pytest.raises(AssertionError, match="others NaN"):
        cases.check_invariance(lambda x: x + 0.0 * x.sum(0), cases.rows_of(20, 8, torch.float32), (9,))


def test_autocast_changes_nothing() -> None:
    x, weight = torch.randn(3, 40), torch.randn(20, 40)
    with torch.autocast("cpu"):
        found = linear(x, weight)
    assert torch.equal(found, linear(x, weight))


def test_sums_are_float32_whatever_is_added() -> None:
    x = torch.ones(1, 5000, dtype=torch.bfloat16)
    assert linear(x, x).item() == 4992.0  # 5000, rounded once
    assert linear(x, x, out_dtype=torch.float32).item() == 5000.0


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(impl: str) -> None:
    found = linear(torch.zeros(2, 0, 8), torch.zeros(5, 8), torch.ones(5), impl=impl)
    assert found.shape == (2, 0, 5)


def test_the_example_runs() -> None:
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module.linear, "linear", globs={"torch": torch}):
        runner.run(test)
    assert (runner.tries, runner.failures) == (3, 0), inspect.getdoc(module.linear)


# arguments -----------------------------------------------------------------------------------------------------------

X, W, B = torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(5)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "x_list": ({"x": [1.0]}, "x", "list"),
    "x_sparse": ({"x": X.to_sparse()}, "x", "sparse"),
    "x_integers": ({"x": X.long()}, "x", "torch.int64"),
    "x_double": ({"x": X.double()}, "x", "torch.float64"),
    "x_scalar": ({"x": torch.zeros(())}, "x", "()"),
    "x_width_0": ({"x": X[:, :0], "weight": W[:, :0]}, "x", "(4, 0)"),
    "weight_list": ({"weight": [1.0]}, "weight", "list"),
    "weight_vector": ({"weight": W[0]}, "weight", "(8,)"),
    "weight_transposed": ({"weight": W.t()}, "weight", "(8, 5)"),
    "weight_empty": ({"weight": W[:0], "bias": B[:0]}, "weight", "(0, 8)"),
    "weight_dtype": ({"weight": W.half()}, "weight", "torch.float16"),
    "weight_device": ({"weight": W.to("meta")}, "weight", "meta"),
    "weight_grad": ({"weight": W.clone().requires_grad_()}, "weight", "gradient"),
    "x_grad": ({"x": X.clone().requires_grad_()}, "x", "gradient"),
    "bias_number": ({"bias": 1.0}, "bias", "float"),
    "bias_shape": ({"bias": torch.zeros(4)}, "bias", "(4,)"),
    "bias_matrix": ({"bias": torch.zeros(1, 5)}, "bias", "(1, 5)"),
    "bias_dtype": ({"bias": B.bfloat16()}, "bias", "torch.bfloat16"),
    "bias_grad": ({"bias": B.clone().requires_grad_()}, "bias", "gradient"),
    "out_dtype": ({"out_dtype": torch.float16}, "out_dtype", "torch.float16"),
    "out_dtype_word": ({"out_dtype": "float32"}, "out_dtype", "'float32'"),
    "impl": ({"impl": "nope"}, "impl", "'nope'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, what, got = BAD[name]
    with pytest.raises(InputError) as caught:
        linear(**({"x": X, "weight": W, "bias": B} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


def test_weights_of_a_model_need_no_detach_without_gradients() -> None:
    layer = torch.nn.Linear(8, 5)
    with torch.no_grad():
        torch.testing.assert_close(linear(X, layer.weight, layer.bias), layer(X))
    with torch.inference_mode():
        assert linear(X + 1.0, layer.weight).shape == (4, 5)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"impl='triton'.*expected an NVIDIA GPU .*got cpu"):
        linear(X, W, impl="triton")
    with pytest.raises(UnsupportedError, match=r"linear.*plain tensors"):
        torch.vmap(lambda x: linear(x, W))(X)


# torch.compile -------------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    inputs = cases.make_inputs(BY_NAME["float32_out"], torch.bfloat16)
    how = _written(make_call(*inputs.values(), torch.float32))
    torch.library.opcheck(torch.ops.tilewise.linear.default, (list(inputs.values()), how, "cpu"))


def test_compiles_whole() -> None:
    torch._dynamo.reset()

    def model(x: torch.Tensor) -> torch.Tensor:
        return linear(linear(2.0 * x, W + 1.0, B), W.t(), out_dtype=torch.float32) + 1.0

    x = torch.randn(3, 8)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
