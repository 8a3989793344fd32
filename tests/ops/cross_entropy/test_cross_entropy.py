"""`cross_entropy` and `linear_cross_entropy` on a CPU: against PyTorch in float64, errors, operators, properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.cross_entropy.problem import make_linear_call
from tilewise.testing import cross_entropy as cases
from tilewise.testing.cross_entropy import BY_NAME, LINEAR, LOGITS, LossCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", [*LOGITS, *LINEAR], ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: LossCase, impl: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, impl)


@given(
    tokens=st.lists(st.integers(1, 5), max_size=2).map(tuple),
    vocabulary=st.integers(1, 100),
    hidden=st.sampled_from([None, 1, 9]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([None, 5.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    chunk=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from(DTYPES[1:]),
    sliced=st.booleans(),
)
def test_any_call(
    tokens, vocabulary, hidden, ignored, smoothing, z_loss, softcap, reduction, chunk, dtype, sliced
) -> None:
    case = LossCase(
        "any",
        tokens,
        vocabulary,
        hidden,
        hidden == 9,
        ignored,
        -100,
        smoothing,
        z_loss,
        softcap,
        reduction,
        chunk,
        sliced,
    )
    seen = cases.make_inputs(case, dtype)["target"] != -100
    if not seen.any() and reduction == "mean":
        return  # NaN: test_equals_pytorch has it
    cases.check(case, dtype, "cpu")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_is_what_pytorch_computes(reduction: str, ignored: float) -> None:
    """Directly, z-loss aside: the same arguments, the same loss, the same gradient."""
    case = LossCase("same", (10,), 20, ignored=ignored, smoothing=0.1, reduction=reduction)
    inputs = cases.make_inputs(case, torch.float64)
    arguments = {"label_smoothing": 0.1, "reduction": reduction}
    found = []
    for function in (tw.cross_entropy, F.cross_entropy):
        loss = function(inputs["logits"], inputs["target"], **arguments)
        found.append((loss, torch.autograd.grad(loss.sum(), inputs["logits"])[0]))
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_nan_stays_in_its_row(impl: str) -> None:
    logits = torch.randn(4, 6)
    logits[2, 3] = torch.nan
    logits.requires_grad_()
    loss = tw.cross_entropy(logits, torch.tensor([0, 1, 2, 3]), reduction="none", impl=impl)
    assert loss.isnan().tolist() == [False, False, True, False]
    loss.sum().backward()
    assert logits.grad.isnan().all(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(reduction: str, impl: str) -> None:
    target = torch.zeros(0, dtype=torch.int64)
    x, weight, bias = (torch.zeros(*shape, requires_grad=True) for shape in ((0, 3), (5, 3), (5,)))
    loss = tw.linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, impl=impl)
    assert bool(loss.isnan().any()) == (reduction == "mean")
    loss.sum().backward()
    assert x.grad.shape == (0, 3)
    assert not weight.grad.any()
    assert not bias.grad.any()
    loss = tw.cross_entropy(torch.zeros(0, 5), target, reduction=reduction, impl=impl)
    assert bool(loss.isnan().any()) == (reduction == "mean")


def test_chunks_follow_from_sizes() -> None:
    def sizes(tokens: int, vocabulary: int, chunk: int | None = None) -> list[int]:
        x, weight = torch.zeros(tokens, 1, device="meta"), torch.zeros(vocabulary, 1, device="meta")
        target = torch.zeros(tokens, dtype=torch.int64, device="meta")
        call = make_linear_call(x, weight, None, target, -100, 0.0, 0.0, None, "mean", chunk)
        return [rows.stop - rows.start for rows in call.chunks()]

    assert sizes(16384, 131072) == [2048] * 8
    assert sizes(9000, 32000) == [1152] * 7 + [936]
    assert sizes(3000, 2**20) == [1024, 1024, 952]
    assert sizes(100, 50) == [100]
    assert sizes(10, 50, 4) == [4, 4, 2]


def test_gradients_that_nobody_wants_are_not_made() -> None:
    inputs = cases.make_inputs(BY_NAME["linear"], torch.float32)
    weight = inputs["weight"].detach()
    call = make_linear_call(inputs["x"], weight, None, inputs["target"], -100, 0.0, 0.0, None, "mean", None)
    assert call.early == ("x",)
    with torch.no_grad():
        call = make_linear_call(inputs["x"], weight, None, inputs["target"], -100, 0.0, 0.0, None, "mean", None)
    assert call.early == ()
    loss = tw.linear_cross_entropy(inputs["x"], weight, inputs["target"])
    want = cases.plain(BY_NAME["linear"])(inputs["x"], weight, inputs["target"])
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs["x"]), torch.autograd.grad(want, inputs["x"]), rtol=1e-5, atol=1e-6
    )


def test_a_graph_that_is_kept_gives_its_gradient_again() -> None:
    inputs = cases.make_inputs(BY_NAME["linear_chunks"], torch.float32)
    loss = cases.ours(BY_NAME["linear_chunks"], "cpu")(**inputs)
    first, second = (torch.autograd.grad(loss, inputs["x"], torch.tensor(v), retain_graph=True)[0] for v in (1.0, 2.0))
    torch.testing.assert_close(2.0 * first, second)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction: str) -> None:
    terms = {"label_smoothing": 0.1, "z_loss": 0.05, "reduction": reduction}
    target = torch.tensor([1, -100, 3, 0])
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tw.cross_entropy(x, target, **terms), (logits,))
    x, weight, bias = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((4, 3), (5, 3), (5,)))

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tw.linear_cross_entropy(x, weight, target, bias=bias, softcap=3.0, chunk=3, **terms)

    assert torch.autograd.gradcheck(linear, (x, weight, bias))


LOGITS_GOOD = {"logits": torch.zeros(2, 5), "target": torch.tensor([1, -100])}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "target_list": ({"target": [1, 2]}, "target", "list"),
    "target_int32": ({"target": torch.zeros(2, dtype=torch.int32)}, "target", "torch.int32"),
    "target_shape": ({"target": torch.zeros(3, dtype=torch.int64)}, "target", "(3,)"),
    "target_elsewhere": ({"target": torch.zeros(2, dtype=torch.int64, device="meta")}, "target", "meta"),
    "target_too_large": ({"target": torch.tensor([1, 5])}, "target", "class 5"),
    "target_negative": ({"target": torch.tensor([-1, 1])}, "target", "class -1"),
    "ignore_index": ({"ignore_index": 1.0}, "ignore_index", "1.0"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing", "1.5"),
    "z_loss": ({"z_loss": -0.1}, "z_loss", "-0.1"),
    "z_loss_nan": ({"z_loss": float("nan")}, "z_loss", "nan"),
    "reduction": ({"reduction": "average"}, "reduction", "average"),
    "impl": ({"impl": "other"}, "impl", "other"),
}
BAD_LOGITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "logits_list": ({"logits": [1.0]}, "logits", "list"),
    "logits_integers": ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, "logits", "torch.int64"),
    "no_classes": ({"logits": torch.zeros(2, 0)}, "logits", "(2, 0)"),
}
LINEAR_GOOD = {"x": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "target": torch.tensor([1, -100])}
BAD_LINEAR: dict[str, tuple[dict[str, Any], str, str]] = {
    "x_rank": ({"x": torch.tensor(1.0)}, "x", "()"),
    "weight_rank": ({"weight": torch.zeros(3)}, "weight", "(3,)"),
    "weight_shape": ({"weight": torch.zeros(3, 5)}, "weight", "(3, 5)"),
    "weight_dtype": ({"weight": torch.zeros(5, 3).half()}, "weight", "torch.float16"),
    "weight_elsewhere": ({"weight": torch.zeros(5, 3, device="meta")}, "weight", "meta"),
    "bias_shape": ({"bias": torch.zeros(3)}, "bias", "(3,)"),
    "bias_dtype": ({"bias": torch.zeros(5).double()}, "bias", "torch.float64"),
    "softcap": ({"softcap": 0.0}, "softcap", "0.0"),
    "chunk": ({"chunk": 0}, "chunk", "0"),
    "chunk_float": ({"chunk": 2.0}, "chunk", "2.0"),
}


def refused(function, arguments: dict[str, Any], what: str, got: str) -> None:
    with pytest.raises(InputError) as caught:
        function(**arguments)
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


@pytest.mark.parametrize("name", [*BAD, *BAD_LOGITS])
def test_bad_arguments(name: str) -> None:
    arguments, what, got = (BAD | BAD_LOGITS)[name]
    refused(tw.cross_entropy, LOGITS_GOOD | arguments, what, got)


@pytest.mark.parametrize("name", [*BAD, *BAD_LINEAR])
def test_bad_arguments_of_a_linear_layer(name: str) -> None:
    arguments, what, got = (BAD | BAD_LINEAR)[name]
    refused(tw.linear_cross_entropy, LINEAR_GOOD | arguments, what, got)


def test_kernels_need_a_gpu() -> None:
    for function, good in ((tw.cross_entropy, LOGITS_GOOD), (tw.linear_cross_entropy, LINEAR_GOOD)):
        with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
            function(**good, impl="triton")


@pytest.mark.parametrize("name", ["vocabulary_7", "none", "linear_chunks", "linear_softcap_none", "linear_bias"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    case = BY_NAME[name]
    ours = cases.ours(case, None)

    def model(**inputs: torch.Tensor) -> torch.Tensor:
        return (2.0 * ours(**inputs)).sin().sum()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    inputs = cases.make_inputs(case, torch.float32)
    leaves = [x for x in inputs.values() if x.requires_grad]
    found = []
    for run in (compiled, model):
        loss = run(**inputs)
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found)


TERMS = "'ignore_index': -100, 'label_smoothing': 0.1, 'z_loss': 0.0"


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operators_pass_opcheck(reduction: str) -> None:
    logits, target = torch.randn(3, 5, requires_grad=True), torch.tensor([1, -100, 4])
    how = f"(['logits', 'target'], {{{TERMS}, 'reduction': '{reduction}'}})"
    torch.library.opcheck(torch.ops.tilewise.cross_entropy.default, ([logits, target], how, "cpu"))
    loss, scale, *totals = torch.ops.tilewise.cross_entropy([logits.detach(), target], how, "cpu")
    arguments = ([logits.detach(), target, *totals, scale], [torch.randn_like(loss)], how, "logits", "cpu")
    torch.library.opcheck(torch.ops.tilewise.cross_entropy_backward.default, arguments)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operators_of_a_linear_layer_pass_opcheck(reduction: str) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target, early = torch.tensor([1, -100, 4]), ("x", "weight") if reduction == "mean" else ()
    how = f"(['x', 'weight', 'target'], {{{TERMS}, 'reduction': '{reduction}', 'chunk': 2, 'early': {early}}})"
    torch.library.opcheck(torch.ops.tilewise.linear_cross_entropy.default, ([x, weight, target], how, "cpu"))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_float16_holds_gradients_whose_sums_it_does_not(reduction: str, impl: str) -> None:
    cases.check_large_sums(reduction, impl)


@pytest.mark.parametrize("offset", [1e4, -1e6, 1e9, -1e30])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_what_all_logits_have_added_changes_nothing(offset: float, linear: bool, impl: str) -> None:
    cases.check_far_logits(offset, linear, impl)
