"""Norms on a CPU, by every implementation that runs there: against plain PyTorch in float64, gradients too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.ops.test_attention_compile import run_fresh
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.norm.problem import make_call
from tilewise.ops.norm.table import NORM
from tilewise.ops.operation import _written
from tilewise.quant import encode
from tilewise.testing import norm, operators
from tilewise.testing.norm import BY_NAME, CASES, NormCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("cpu", "reference")


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_pytorch(impl: str, dtype: torch.dtype, case: NormCase) -> None:
    norm.check(case, dtype, impl)


@pytest.mark.parametrize("centred", [False, True])
def test_the_widest_row(centred: bool) -> None:
    norm.check(NormCase("widest", (2, 65536), centred=centred, bias=centred, residual=True), torch.bfloat16, "cpu")


@settings(max_examples=60)
@given(
    rows=st.lists(st.integers(0, 4), max_size=2),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    flags=st.fixed_dictionaries({name: st.booleans() for name in ("centred", "weight", "residual", "sliced")}),
    wide=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    impl=st.sampled_from(IMPLS),
)
def test_any_shape(
    rows: list[int],
    width: int,
    dtype: torch.dtype,
    flags: dict[str, bool],
    wide: bool,
    offset: float,
    impl: str,
) -> None:
    case = NormCase("any", (*rows, width), bias=flags["centred"], wide_weight=wide, **flags)
    norm.check(replace(case, offset=offset if case.weight else 0.0), dtype, impl)


@pytest.mark.parametrize("name", ["rms_residual", "layer_residual"])
@pytest.mark.parametrize("impl", IMPLS)
def test_nan_stays_in_its_row(impl: str, name: str) -> None:
    case = BY_NAME[name]
    # without gradients: those of weights are sums over rows
    inputs = {k: x.detach() for k, x in norm.make_inputs(case, torch.float32).items()}
    for poisoned in ("x", "residual"):
        operators.poisoned(norm.ours(case, impl), inputs, poisoned, 3)


@pytest.mark.parametrize("name", ["layer_residual", "rms_residual", "offset", "bias_alone"])
def test_gradcheck(name: str) -> None:
    inputs = norm.make_inputs(replace(BY_NAME[name], shape=(3, 5)), torch.float64)
    function = norm.ours(BY_NAME[name], "cpu")
    names = list(inputs)
    assert torch.autograd.gradcheck(lambda *x: function(**dict(zip(names, x, strict=True))), tuple(inputs.values()))


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_normed_is_the_rounded_sum(impl: str) -> None:
    x, residual = (torch.randn(6, 40).bfloat16() for _ in range(2))
    o, s = tw.rms_norm(x, residual=residual, out_dtype=torch.float32, impl=impl)
    assert torch.equal(s, x + residual)
    assert torch.equal(o, tw.rms_norm(s, out_dtype=torch.float32, impl=impl))


@pytest.mark.parametrize("kept", ["x", "residual", "weight", "bias"])
def test_gradients_of_one_input_alone(kept: str) -> None:
    case = BY_NAME["layer_residual"]
    inputs = norm.make_inputs(case, torch.float32)
    all_of_them = operators.results(norm.ours(case, "cpu"), inputs)
    alone = operators.results(
        norm.ours(case, "cpu"), {k: x.detach().requires_grad_(k == kept) for k, x in inputs.items()}
    )
    assert set(alone) == {"out0", "out1", f"d{kept}"}
    assert torch.equal(alone[f"d{kept}"], all_of_them[f"d{kept}"])


def test_x_and_residual_accumulate_apart() -> None:
    """Both are given one tensor as their gradient; adding to that of one must not change the other's."""
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    for _ in range(2):
        o, s = tw.rms_norm(x, residual=residual)
        (o.sum() + s.sum()).backward()
    once = x.grad / 2
    torch.testing.assert_close(residual.grad, x.grad)
    x.grad.zero_()
    torch.testing.assert_close(residual.grad / 2, once)


def test_variance_far_from_0_is_not_lost() -> None:
    x = 1e4 + torch.randn(4, 1000, dtype=torch.float64)
    o = tw.layer_norm(x.float(), eps=0.0)
    want = torch.nn.functional.layer_norm(x.float().double(), (1000,), eps=0.0)
    assert float((o - want).abs().max()) < 2e-3


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["rms_residual", "layer_1000", "offset", "rms_1"])
@pytest.mark.parametrize("impl", IMPLS)
def test_codes(impl: str, name: str, quantize: str) -> None:
    case = BY_NAME[name]
    inputs = {k: x.detach() for k, x in norm.make_inputs(case, torch.bfloat16).items()}
    codes, scale, *s = norm.ours(case, impl, quantize)(**inputs)
    found = norm.ours(replace(case, out=torch.float32), impl)(**inputs)
    want = encode(found[0] if s else found, quantize)
    assert codes.dtype == want.data.dtype
    assert scale.shape == case.shape[:-1]
    torch.testing.assert_close(scale, want.scale, rtol=1e-6, atol=0.0)
    off = (codes.float() - want.data.float()).abs() / codes.float().abs().clamp(min=1.0)
    assert float(off.max()) <= (0.13 if quantize == "fp8" else 1.0)
    assert float((off > 0).float().mean()) < 0.01
    if s:
        assert torch.equal(s[0], found[1])


def test_codes_of_rows_of_zeros_and_nan() -> None:
    x = torch.zeros(3, 16)
    x[1, 2] = torch.nan
    codes, scale = tw.rms_norm(x, quantize="int8")
    assert not codes.any()
    assert scale[0] == scale[2] == 0.0
    assert scale[1].isnan()


@pytest.mark.parametrize("residual", [False, True])
def test_no_rows(residual: bool) -> None:
    x = torch.zeros(2, 0, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    found = tw.layer_norm(x, weight, weight, residual=x if residual else None)
    o = found[0] if residual else found
    o.sum().backward()
    assert o.shape == x.shape == x.grad.shape
    assert not weight.grad.any()
    codes, scale = tw.rms_norm(x.detach(), quantize="fp8")
    assert (codes.shape, scale.shape) == ((2, 0, 8), (2, 0))


# arguments -----------------------------------------------------------------------------------------------------------

X, W = torch.zeros(4, 8), torch.ones(8)
HALF = torch.zeros(4, 8, dtype=torch.float16)
BAD = {
    "x_list": (([1.0],), {}, "x", "list"),
    "x_sparse": ((X.to_sparse(),), {}, "x", "sparse"),
    "x_integers": ((X.long(),), {}, "x", "torch.int64"),
    "x_scalar": ((torch.zeros(()),), {}, "x", "()"),
    "x_width_0": ((torch.zeros(4, 0),), {}, "x", "(4, 0)"),
    "x_too_wide": ((torch.zeros(1, 65537),), {}, "x", "(1, 65537)"),
    "weight_list": ((X, [1.0]), {}, "weight", "list"),
    "weight_shape": ((X, torch.ones(7)), {}, "weight", "(7,)"),
    "weight_matrix": ((X, torch.ones(1, 8)), {}, "weight", "(1, 8)"),
    "weight_dtype": ((X, W.half()), {}, "weight", "torch.float16"),
    "weight_other_half": ((HALF, W.bfloat16()), {}, "weight", "torch.bfloat16"),
    "weight_device": ((X, W.to("meta")), {}, "weight", "meta"),
    "bias_shape": ((X, W, torch.ones(9)), {}, "bias", "(9,)"),
    "residual_list": ((X,), {"residual": [1.0]}, "residual", "list"),
    "residual_shape": ((X,), {"residual": X[:1]}, "residual", "(1, 8)"),
    "residual_dtype": ((X,), {"residual": HALF}, "residual", "torch.float16"),
    "residual_device": ((X,), {"residual": X.to("meta")}, "residual", "meta"),
    "eps_word": ((X,), {"eps": "1e-6"}, "eps", "'1e-6'"),
    "eps_negative": ((X,), {"eps": -1e-6}, "eps", "-1e-06"),
    "eps_infinite": ((X,), {"eps": float("inf")}, "eps", "inf"),
    "offset_word": ((X, W), {"offset": None}, "offset", "None"),
    "offset_nan": ((X, W), {"offset": float("nan")}, "offset", "nan"),
    "offset_alone": ((X,), {"offset": 1.0}, "offset", "1.0"),
    "out_dtype": ((X,), {"out_dtype": torch.int8}, "out_dtype", "torch.int8"),
    "out_dtype_of_float64": ((X.double(),), {"out_dtype": torch.float32}, "out_dtype", "torch.float32"),
    "quantize": ((X,), {"quantize": "int4"}, "quantize", "'int4'"),
    "quantize_and_dtype": ((X,), {"quantize": "fp8", "out_dtype": torch.float32}, "out_dtype", "fp8"),
    "quantize_and_grad": ((X, W.clone().requires_grad_()), {"quantize": "fp8"}, "quantize", "gradient"),
    "impl": ((X,), {"impl": "nope"}, "impl", "'nope'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, options, what, got = BAD[name]
    for function in (tw.layer_norm,) if name.startswith("bias") else (tw.layer_norm, tw.rms_norm):
        with pytest.raises(InputError) as caught:
            function(*arguments, **options)
        assert caught.value.name == what
        assert got in str(caught.value.got)
        assert all((caught.value.expected, caught.value.hint))


def test_codes_inside_no_grad_are_fine() -> None:
    with torch.no_grad():
        assert tw.rms_norm(X, W.clone().requires_grad_(), quantize="fp8")[0].dtype == torch.float8_e4m3fn


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"impl='triton'.*expected an NVIDIA GPU .*got cpu"):
        tw.rms_norm(X, impl="triton")
    with pytest.raises(UnsupportedError, match=r"impl='triton'.*expected an NVIDIA GPU .*got meta"):
        tw.rms_norm(X.to("meta"), impl="triton")


# torch.compile -------------------------------------------------------------------------------------------------------


def _operator_arguments(case: NormCase, quantize: str | None = None):
    inputs = norm.make_inputs(case, torch.float32)
    inputs = {k: x.detach().requires_grad_(quantize is None) for k, x in inputs.items()}
    tensors = [inputs.get(name) for name in ("x", "weight", "bias", "residual")]
    call = make_call(*tensors, case.centred, case.eps, case.offset, None, quantize)
    return [x for x in tensors if x is not None], _written(call), "cpu"


@pytest.mark.parametrize("name", ["layer_residual", "rms_7", "rms_residual", "layer_alone"])
def test_opcheck(name: str) -> None:
    arguments = _operator_arguments(BY_NAME[name])
    torch.library.opcheck(torch.ops.tilewise.norm.default, arguments)


@pytest.mark.parametrize("name", ["layer_residual", "rms_7"])
def test_opcheck_of_codes(name: str) -> None:
    arguments = _operator_arguments(BY_NAME[name], "int8")
    torch.library.opcheck(torch.ops.tilewise.norm.default, arguments)


@pytest.mark.parametrize("name", ["layer_residual", "rms_7"])
def test_opcheck_of_the_backward(name: str) -> None:
    tensors, how, impl = _operator_arguments(BY_NAME[name])
    x, *others = (t.detach() for t in tensors)
    found = torch.ops.tilewise.norm([x, *others], how, impl)
    centred = BY_NAME[name].centred
    kept = [found[1] if centred else x, *others[: 1 + centred], found[-1]]
    incoming = [torch.randn_like(y) for y in found[:-1]]
    wanted = "x weight bias" if centred else "x weight"
    torch.library.opcheck(torch.ops.tilewise.norm_backward.default, (kept, incoming, how, wanted, impl))
    assert NORM.name == "norm"


PROGRAM = """
from dataclasses import replace
from tilewise.testing import norm
names = ("rms_7", "layer_residual", "rms_residual", "offset")
for backend, names in (("aot_eager", names), ("inductor", names[2:3])):
    for name in names:
        inputs = norm.make_inputs(norm.BY_NAME[name], torch.float32)
        ours = norm.ours(norm.BY_NAME[name], None)
        def loss(**leaves):
            found = ours(**{k: x * 1.5 for k, x in leaves.items()})
            return sum(x.sin().sum() for x in (found if isinstance(found, tuple) else (found,)))
        torch._dynamo.reset()
        found = []
        for run in (torch.compile(loss, fullgraph=True, backend=backend), loss):
            value = run(**inputs)
            found.append((value, *torch.autograd.grad(value, list(inputs.values()))))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
x = torch.randn(3, 8)
codes = torch.compile(lambda x: tw.rms_norm(x, quantize="int8"), fullgraph=True, backend="aot_eager")(x)
torch.testing.assert_close(codes, tw.rms_norm(x, quantize="int8"))
"""


def test_compiles_whole_as_the_first_call_of_a_process() -> None:
    run_fresh(PROGRAM)
