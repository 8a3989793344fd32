"""`attention(quantize=)` on the CPU: results of the codes, gradients straight through them, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, TilewiseError, UnsupportedError
from tilewise.ops.attention import cpu_codes
from tilewise.ops.attention.codes import encoded
from tilewise.ops.attention.cpu import BLOCK_N
from tilewise.ops.attention.cpu_parts import MAX_RUN
from tilewise.quant.blocks import Quantized
from tilewise.testing import attention_codes as cases
from tilewise.testing.attention_codes import CASES, CodedCase
from tilewise.testing.weight_codes import rounded_weights

BY_NAME = {case.name: case for case in CASES}
EMPTY = ("no_queries", "no_keys")


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_those_of_the_codes(case: CodedCase, dtype: torch.dtype) -> None:
    cases.check_forward(case, dtype, "cpu_codes")


@pytest.mark.parametrize("first", [0.0, 14.0, 300.0], ids=str)
@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.Sage2pp(), tw.Sage1()], ids=repr)
def test_the_largest_difference_is_that_of_a_rounded_output(scheme: tw.Sage, first: float) -> None:
    tensors = cases.with_first_key(3000, 64, torch.bfloat16, first)
    dtype = torch.float8_e4m3fn if scheme.pv == "fp8" else torch.float16

    def coded(x: Quantized, off: float, keys: int = MAX_RUN * BLOCK_N) -> torch.Tensor:
        return rounded_weights(x, off, keys, fall=0.0, dtype=dtype)

    cases.check_codes_of_weights(tensors, scheme, "cpu_codes", coded, sums_of_codes=False)
    if first == 0.0 and scheme.pv == "fp8":  # counted from another tile's largest, weights are other codes
        with pytest.raises(AssertionError, match="half a step"):
            cases.check_codes_of_weights(
                tensors, scheme, "cpu_codes", functools.partial(coded, keys=BLOCK_N), sums_of_codes=False
            )


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in EMPTY], ids=repr)
def test_the_specification_as_an_implementation(case: CodedCase) -> None:
    (q, k, v), arguments = cases.make_inputs(case, torch.float32)
    o, lse = tw.attention_with_lse(q, k, v, quantize=case.scheme, impl="reference_codes", **arguments)
    x = tw.quantize_qkv(q, k, v, scheme=case.scheme, layout=arguments.pop("layout", None), impl="reference")
    want, want_lse = cases.attention_of_codes(x, **arguments)
    torch.testing.assert_close(o, want.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_gradients_go_straight_through(case: CodedCase) -> None:
    if case.name not in EMPTY:
        cases.check_gradients(case, torch.float32, "cpu_codes")


def test_a_gradient_of_lse_sees_the_means() -> None:
    (q, k, v), _ = cases.make_inputs(BY_NAME["sage2"], torch.float32)
    q.requires_grad_()
    _, lse = tw.attention_with_lse(q, k, v, quantize=tw.Sage2())
    (found,) = torch.autograd.grad(lse.sum(), q)
    exact = q.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(tw.attention_with_lse(exact, k, v)[1].sum(), exact)
    assert float((found - want).norm()) <= 0.03 * float(want.norm())  # a key's means are most of it


def test_captured_tensors_take_gradients() -> None:
    (q, k, v), _ = cases.make_inputs(BY_NAME["sage2"], torch.float32)
    slopes = torch.linspace(0.1, 0.5, 4).requires_grad_()
    o = tw.attention(q, k, v, score=tw.alibi(slopes), quantize=tw.Sage2())
    (found,) = torch.autograd.grad(o.square().sum(), slopes)
    (want,) = torch.autograd.grad(tw.attention(q, k, v, score=tw.alibi(slopes)).square().sum(), slopes)
    assert float((found - want).norm()) <= 2.0**-3 * float(want.norm())


def test_second_derivatives_raise() -> None:
    (q, k, v), _ = cases.make_inputs(BY_NAME["sage2"], torch.float32)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(tw.attention(q, k, v, quantize=tw.Sage2()).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(dq.sum(), q)


def test_future_keys_do_not_matter() -> None:
    """Codes of blocks of keys that a query does not see change nothing; a mean of all keys would move scales."""
    case = replace(BY_NAME["sage2_causal"], lengths=((256, 256),), scheme=tw.FP8("token", "block", "channel"))
    (q, k, v), arguments = cases.make_inputs(case, torch.float32)
    o = tw.attention(q, k, v, quantize=case.scheme, **arguments)
    k, v = k.clone(), v.clone()
    k[:, 128:] = torch.randn_like(k[:, 128:])
    v[:, 128:] *= torch.rand_like(v[:, 128:])
    v[:, :1] += 0.0
    v[:, 255] = v[:, 128:].abs().amax(1)  # the scales of channels stay those of the first keys where these are larger
    other = tw.attention(q, k, v, quantize=replace(case.scheme, v_scale="block"), **arguments)
    same = tw.attention(q, k, v, quantize=replace(case.scheme, v_scale="block"), **arguments)
    assert torch.equal(other, same)
    first = tw.attention(
        q[:, :128], k[:, :128], v[:, :128], quantize=replace(case.scheme, v_scale="block"), **arguments
    )
    assert torch.equal(other[:, :128], first)
    assert not torch.equal(o, other)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_reaches_what_shares_its_scale(where: str) -> None:
    (q, k, v), _ = cases.make_inputs(replace(BY_NAME["sage2"], scheme=tw.Sage(smooth=())), torch.float32)
    {"q": q, "k": k, "v": v}[where][0, 3, 0, 5] = torch.nan
    o = tw.attention(q, k, v, quantize=tw.Sage(smooth=()))
    assert not o[1].isnan().any()
    assert o[0, 3].isnan().any()
    if where == "q":
        assert not o[0, 16:].isnan().any()


def test_zeros() -> None:
    zeros = torch.zeros(1, 130, 2, 32)
    v = torch.randn(1, 130, 2, 32)
    o = tw.attention(zeros, zeros, v, mask=tw.causal, quantize=tw.Sage2())
    want = tw.attention(zeros, zeros, v, mask=tw.causal)
    assert float((o - want).norm()) <= 2.0**-4 * float(want.norm())


REFUSED: dict[str, tuple[dict[str, Any], type[TilewiseError], str]] = {
    "no scheme": ({"quantize": "int8"}, InputError, "quantize"),
    "dropout": ({"dropout": 0.5}, UnsupportedError, "dropout"),
    "batch_invariant": ({"batch_invariant": True}, UnsupportedError, "batch_invariant"),
    "another row": ({"impl": "cpu_tiled"}, UnsupportedError, "quantize"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, error, says = REFUSED[name]
    q = torch.zeros(1, 5, 2, 16)
    with pytest.raises(error, match=says):
        tw.attention(q, q, q, **{"quantize": tw.Sage2(), **arguments})


def test_float64_and_wide_heads_are_refused() -> None:
    for q, says in ((torch.zeros(1, 5, 2, 16, dtype=torch.float64), "float64"), (torch.zeros(1, 5, 2, 300), "256")):
        with pytest.raises(InputError, match=says):
            tw.attention(q, q, q, quantize=tw.Sage2())


UNENCODABLE: dict[str, tuple[torch.Tensor, Any]] = {
    "float64": (torch.zeros(1, 5, 2, 16, dtype=torch.float64), tw.Sage2()),
    "wide": (torch.zeros(1, 5, 2, 300), tw.Sage2()),
    "rotated": (torch.zeros(1, 5, 2, 24), tw.Sage(rotate="hadamard")),
}


@pytest.mark.parametrize("name", UNENCODABLE)
def test_why_refuses_what_attention_refuses(name: str) -> None:
    q, scheme = UNENCODABLE[name]
    for function in (tw.why, tw.attention):
        with pytest.raises(InputError, match=r"^q: "):
            function(q, q, q, quantize=scheme)
        with pytest.raises(InputError, match=r"^q: "):  # not by a hint to a row that cannot run it either
            function(q, q, q, quantize=scheme, batch_invariant=True)


def test_rows_in_few_bits_need_a_scheme() -> None:
    q = torch.zeros(1, 5, 2, 16)
    with pytest.raises(UnsupportedError, match="expected quantize="):
        tw.attention(q, q, q, impl="cpu_codes")


def test_why_names_the_row() -> None:
    q = torch.zeros(1, 5, 2, 16)
    assert tw.why(q, q, q, quantize=tw.Sage2()).chosen == "cpu_codes"
    assert tw.why(q, q, q).chosen != "cpu_codes"


@pytest.mark.parametrize("name", ["sage2_causal", "packed", "sage2_int4"])
def test_compiles_whole(name: str) -> None:
    torch._dynamo.reset()
    case = BY_NAME[name]
    (q, k, v), arguments = cases.make_inputs(case, torch.float32)
    q.requires_grad_()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, quantize=case.scheme, **arguments)

    o = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v)
    want = step(q, k, v)
    assert torch.equal(o, want)
    assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (o, want)))


def test_blocks_of_values_far_apart() -> None:
    cases.check_values_apart(torch.float32, "cpu_codes")


def test_a_lost_block_of_values_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Quantized.values
    least = 2.0**-60  # of scales that count

    def without_small(x: Quantized, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        assert x.v_scale is not None
        kept = torch.where(x.v_scale > least * x.v_scale.max(), x.v_scale, 0.0)
        return plain(replace(x, v_scale=kept) if dtype != torch.float64 else x, dtype)

    monkeypatch.setattr(Quantized, "values", without_small)
    with pytest.raises(AssertionError, match="a row lost its values"):
        cases.check_values_apart(torch.float32, "cpu_codes")


def test_a_wrong_weight_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cpu_codes.tiled_forward
    monkeypatch.setattr(cpu_codes, "tiled_forward", lambda call, of: plain(call, lambda p: of(p) * 1.1))
    with pytest.raises(AssertionError):
        cases.check_forward(BY_NAME["sage2"], torch.float32, "cpu_codes")


def test_a_wrong_shift_of_lse_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewise.ops.attention.codes as codes

    def without_bias(call: Any, impl: str | None = None) -> Any:
        x = encoded(call, impl)
        return x if call.q.requires_grad is False else replace(x, q_bias=x.q_bias * 0.5)

    monkeypatch.setattr(
        codes, "encoded", lambda call, impl=None: replace(encoded(call), q_bias=encoded(call).q_bias * 0.5)
    )
    with pytest.raises(AssertionError):
        cases.check_gradients(BY_NAME["sage2"], torch.float32, "cpu_codes")
