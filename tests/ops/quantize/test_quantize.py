"""`quantize_qkv` on a CPU: bits of the specification, distances from what was given, where things lie, what is odd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.ops.quantize.shapes import SAMPLED, any_case
from tilewise.ops import quantize
from tilewise.ops.quantize import cpu
from tilewise.quant import encode, rotate
from tilewise.quant.blocks import KEY_ORDER, row_groups
from tilewise.quant.codes import SMALLEST
from tilewise.testing import quantize as cases
from tilewise.testing.quantize import BY_NAME, CASES, QuantizeCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", [*CASES, *SAMPLED], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_specification(case: QuantizeCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "cpu", like="reference")


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_codes_mean_what_was_given(case: QuantizeCase, impl: str) -> None:
    cases.check_meaning(case, torch.bfloat16, impl)


@settings(max_examples=60)
@given(case=any_case(), dtype=st.sampled_from(DTYPES))
def test_any_shape(case: QuantizeCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "cpu", like="reference")
    cases.check_meaning(case, dtype, "cpu")


@pytest.mark.parametrize("name", [case.name for case in CASES if case.turns[0]])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_turned_rows_are_those_of_rope(impl: str, name: str) -> None:
    inputs = cases.make_inputs(BY_NAME[name], torch.bfloat16)
    scheme, ropes = BY_NAME[name].scheme, inputs["rope"]
    found = tw.quantize_qkv(**inputs, scheme=scheme, impl=impl)
    turned = {side: tw.rope(inputs[side], rope=rope) for side, rope in zip("qk", ropes, strict=True)}
    want = tw.quantize_qkv(**inputs | turned | {"rope": None}, scheme=scheme, impl=impl)
    cases.alike(cases.tensors(found), cases.tensors(want), rotated=False)
    one = tw.quantize_qkv(**inputs | {"rope": (ropes[0], None)}, scheme=scheme, impl=impl)
    assert torch.equal(one.q, found.q)
    assert not torch.equal(one.k, found.k)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.packed])
def test_packed_sequences_are_what_they_are_alone(name: str) -> None:
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.float16)
    together = tw.quantize_qkv(**inputs, scheme=case.scheme).numbers()
    cu_q, cu_k = inputs["layout"].cu_seqlens_q.tolist(), inputs["layout"].cu_seqlens_k.tolist()
    for b in range(len(case.lengths)):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        given = (inputs["q"][rows][None], inputs["k"][keys][None], inputs["v"][keys][None])
        ropes = [
            replace(rope, positions=rope.positions[at])
            for rope, at in zip(inputs.get("rope", ()), (rows, keys), strict=False)
        ]
        alone = tw.quantize_qkv(*given, scheme=case.scheme, rope=ropes or None).numbers()
        for whole, part, at in zip(together, alone, (rows, keys, keys), strict=True):
            # products with the rotation's matrix depend on how many rows there are
            tolerance = 1e-2 if case.scheme.rotate != "none" else 1e-6
            torch.testing.assert_close(whole[at], part[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_slots_that_no_block_has_hold_zeros(impl: str) -> None:
    inputs = cases.make_inputs(BY_NAME["sage2_packed"], torch.float32)  # queries: 5, 0, 129, 64, 1
    x = tw.quantize_qkv(**inputs, scheme=tw.Sage2(), impl=impl)
    assert x.q_scale.shape == (4, 199 // 64 + 5, 32)
    assert [n for n, part in enumerate(x.q_scale.transpose(0, 1)) if part.any()] == [0, 2, 3, 4, 5, 7]
    taken = [n for n, part in enumerate(x.v.float().unflatten(-1, (-1, 128)).movedim(-2, 0)) if part.any()]
    assert taken == [1, 2, 3, 4, 5, 7]  # keys: 0, 3, 257, 128, 1


# where things lie ----------------------------------------------------------------------------------------------------


def test_which_rows_share_a_scale() -> None:
    """As a lane of a warp holds the accumulator of m64nNk32: rows t/4 and t/4 + 8, columns 2 (t % 4) and the next."""
    groups = row_groups("q", "thread")
    assert len(set(groups)) == 32
    assert [r for r in range(64) if groups[r] == groups[16 + 3]] == [19, 27]
    groups = row_groups("k", "thread")
    assert [r for r in range(128) if groups[r] == 1] == [8 * n + 2 + e for n in range(16) for e in (0, 1)]
    assert [row_groups("q", "warp").count(n) for n in range(4)] == [16] * 4
    assert row_groups("q", "block") == row_groups("q", "head") == [0] * 64
    assert row_groups("k", "token") == list(range(128))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(("q_scale", "k_scale"), [("token", "token"), ("thread", "thread"), ("warp", "block")])
def test_a_scale_is_the_largest_number_of_its_rows(q_scale: str, k_scale: str, impl: str) -> None:
    q, k = torch.arange(1.0, 71.0)[None, :, None, None], torch.arange(1.0, 201.0)[None, :, None, None]
    x = tw.quantize_qkv(q, k, k, scheme=tw.Sage(q_scale=q_scale, k_scale=k_scale, smooth=()), impl=impl)
    for side, rows, shared, scale in (("q", q, q_scale, x.q_scale), ("k", k, k_scale, x.k_scale)):
        groups = row_groups(side, shared)
        for block, part in enumerate(rows[0, :, 0, 0].split(len(groups))):
            for group in set(groups):
                members = [float(value) for value, at in zip(part, groups, strict=False) if at == group]
                assert scale[0, 0, block, group] == torch.tensor(max(members, default=0.0)) / 127


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_values_stand_as_products_of_bytes_want_them(impl: str) -> None:
    """Position 4 t + 2 e + o of 16 keys has key 8 e + 2 t + o; behind the last key there are zeros."""
    assert [8 * e + 2 * t + o for t in range(4) for e in range(2) for o in range(2)] == list(KEY_ORDER)
    v = torch.arange(20.0)[None, :, None, None].repeat(1, 1, 1, 2)
    v[..., 1] = 19.0
    x = tw.quantize_qkv(v, v, v, scheme=tw.FP8(v_scale="channel"), impl=impl)
    assert x.v.shape == (1, 1, 2, 128)
    assert x.v_scale.tolist() == [[[float(torch.tensor(19.0) / 448)] * 2]]
    found = (x.v.float() * x.v_scale[..., None])[0, 0, 0, :32]
    want = torch.zeros(32)
    want[:16] = torch.tensor(KEY_ORDER).float()
    want[[0, 1, 4, 5]] = want[[0, 1, 4, 5]]
    want[16:] = torch.tensor([n + 16 if n < 4 else 0 for n in KEY_ORDER]).float()
    torch.testing.assert_close(found, want, rtol=1 / 16, atol=0.0)
    assert int((x.v[0, 0, 1].float() != 0).sum()) == 20


def test_codes_of_tokens_are_those_of_encode() -> None:
    """Without centring and rotation these are codes of a cache, which are quotients and not products with 1 / scale: of
    two codes that are as near one may be the other's neighbour.
    """
    q, k, v = (torch.randn(2, 70, 3, 32) for _ in range(3))
    for kind in ("int8", "fp8"):
        x = tw.quantize_qkv(q, k, v, scheme=tw.Sage(kind, q_scale="token", k_scale="token", smooth=()))
        want = encode(q, kind)
        apart = x.q.view(torch.uint8).int() - want.data.view(torch.uint8).int()
        assert int((apart.abs() > 1).sum()) == 0
        assert int((apart != 0).sum()) <= 1 + 1e-4 * apart.numel()
        assert torch.equal(x.q_scale.flatten(2)[..., :70], want.scale.transpose(1, 2))


def test_four_bits_are_numbers_to_7() -> None:
    x = tw.quantize_qkv(**cases.make_inputs(BY_NAME["nothing_centred"], torch.float32), scheme=tw.Sage("int4"))
    assert x.q.dtype == x.k.dtype == torch.int8
    assert (int(x.q.min()), int(x.q.max()), int(x.k.min()), int(x.k.max())) == (-7, 7, -7, 7)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_means_and_biases(impl: str) -> None:
    inputs = cases.make_inputs(BY_NAME["sage2"], torch.float16)
    q, k, v = (inputs[name].double() for name in "qkv")
    x = tw.quantize_qkv(**inputs, scheme=tw.Sage(smooth=("q", "k", "v")), impl=impl)
    torch.testing.assert_close(x.k_mean.double(), k.mean(1), rtol=2e-7, atol=1e-7)
    torch.testing.assert_close(x.v_mean.double(), v.mean(1), rtol=2e-7, atol=1e-7)
    means = torch.stack([q[:, :64].mean(1), q[:, 64:].mean(1)], 2)
    assert x.q_mean.dtype == torch.float16
    torch.testing.assert_close(x.q_mean.double(), means, rtol=2**-11, atol=2**-24)
    centred = q - x.q_mean.double().repeat_interleave(64, 2)[:, :, :70].transpose(1, 2)
    bias = torch.einsum("bihd,bhd->bhi", centred, x.k_mean.double().repeat_interleave(2, 1))
    torch.testing.assert_close(x.q_bias.double(), bias, rtol=1e-5, atol=1e-4)
    assert x.k_exact.data_ptr() == inputs["k"].data_ptr()


def test_what_is_rotated_is_what_rotate_gives() -> None:
    inputs = cases.make_inputs(BY_NAME["rotated"], torch.float32)
    scheme = tw.Sage(smooth=(), rotate="hadamard")
    x = tw.quantize_qkv(**inputs, scheme=scheme)
    turned = {name: rotate(inputs[name]) for name in "qk"} | {"v": inputs["v"]}
    y = tw.quantize_qkv(**turned, scheme=replace(scheme, rotate="none"))
    assert torch.equal(x.k, y.k)
    assert torch.equal(x.k_scale, y.k_scale)


def test_values_that_nothing_changes_are_not_copied() -> None:
    q = torch.randn(1, 5, 2, 8, dtype=torch.float16)
    assert tw.quantize_qkv(q, q, q, scheme=tw.Sage1()).v.data_ptr() == q.data_ptr()
    x = tw.quantize_qkv(q, q, q, scheme=replace(tw.Sage1(), pv="bf16"))
    assert torch.equal(x.v, q.bfloat16())
    assert x.v_scale is None
    centred = tw.quantize_qkv(q, q, q, scheme=tw.Sage(pv="bf16", smooth=("v",)))
    assert torch.equal(centred.v, (q.float() - centred.v_mean[:, None]).bfloat16())


def test_bytes() -> None:
    q = torch.zeros(1, 64, 2, 32, dtype=torch.bfloat16)
    x = tw.quantize_qkv(q, q, q, scheme=tw.Sage2())
    scales = 4 * 2 * (32 + 4 + 32)
    assert x.nbytes == 2 * 64 * 2 * 32 + 2 * 128 * 32 + scales + 4 * (2 * 32) + 4 * 2 * 64
    assert tw.quantize_qkv(q, q, q, scheme=tw.Sage2("int4")).nbytes == x.nbytes + 2 * 2 * 32  # means of queries


# zeros, NaN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.Sage2("int4"), tw.FP8(), tw.FP8("token", "block", "block")])
def test_groups_of_zeros_and_tiny_numbers(scheme: Any, impl: str) -> None:
    zeros = torch.zeros(1, 70, 2, 8)
    for number in (0.0, -0.0, 1e-44, SMALLEST * 6):
        x = tw.quantize_qkv(zeros + number, zeros, zeros + number, scheme=scheme, impl=impl)
        for name, part in cases.tensors(x).items():
            assert name in ("q_mean", "k_exact") or not part.float().any(), name
        assert not any(part.isnan().any() for part in x.numbers())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_what_is_not_finite_is_nan_in_its_group_alone(impl: str, bad: float) -> None:
    scheme = tw.Sage("int8", q_scale="thread", k_scale="thread", smooth=())
    q, k, v = (torch.randn(1, 200, 2, 8) for _ in range(3))
    whole = tw.quantize_qkv(q, k, v, scheme=scheme, impl=impl).numbers()
    q[0, 3, 0, 5] = k[0, 130, 1, 2] = v[0, 7, 1, 4] = bad
    found = tw.quantize_qkv(q, k, v, scheme=scheme, impl=impl).numbers()
    want = [x.clone() for x in whole]
    want[0][0, [3, 11], 0] = torch.nan
    want[1][0, [128 + r for r in range(72) if r % 8 in (2, 3)], 1] = torch.nan
    want[2][0, :, 1, 4] = torch.nan
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x.nan_to_num(nan=99.0), y.nan_to_num(nan=99.0))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_what_shares_a_mean_with_nan_is_nan(impl: str) -> None:
    scheme = tw.Sage(smooth=("q", "k", "v"))
    q, k, v = (torch.randn(2, n, 2, 8) for n in (130, 256, 256))
    q[0, 70, 0, 1] = k[0, 3, 1, 2] = v[1, 4, 0, 5] = torch.nan
    x = tw.quantize_qkv(q, k, v, scheme=scheme, impl=impl)
    assert x.q_scale.isnan().flatten(3).all(-1).nonzero().tolist() == [[0, 0, 1]]
    assert x.k_scale.isnan().flatten(2).all(-1).nonzero().tolist() == [[0, 1]]
    assert x.v_scale.isnan().nonzero().tolist() == [[1, 0, 5]]


def test_values_beyond_float16() -> None:
    v = torch.full((1, 2, 1, 4), 1e5, dtype=torch.bfloat16)
    assert tw.quantize_qkv(v, v, v, scheme=tw.Sage1()).v.isinf().all()


def test_a_wrong_order_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "KEY_ORDER", tuple(range(16)))
    with pytest.raises(AssertionError, match="off by"):
        cases.check_meaning(BY_NAME["sage2"], torch.float32, "cpu")


def test_a_wrong_scale_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu._scale
    monkeypatch.setattr(cpu, "_scale", lambda largest, code: 1.001 * real(largest, code))
    with pytest.raises(AssertionError, match="other bits"):
        cases.check(BY_NAME["sage2"], torch.float32, "cpu", like="reference")


# how launches follow each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (tw.FP8("block", "block", "block"), {"k": False, "v": True, "q": True}),
        (tw.Sage("fp8", v_scale="block"), {"k": False, "q": True}),  # values come along with keys
        (tw.Sage2(), {"k": False, "q": True}),
        (tw.Sage(rotate="hadamard"), {"k": False, "q": False}),  # rotated means of keys are forgotten
        (tw.Sage(smooth=("k", "v")), {"k": False, "q": True}),
        (tw.Sage(pv="bf16"), {"k": False, "q": False}),  # values, which no kernel of ours encodes, between
        (tw.Sage(smooth=()), {"k": False, "v": True, "q": True}),
        (tw.FP8("head", "block", "block"), {"k": False, "v": True, "q": True}),
        (tw.FP8("block", "head", "block"), {"k": False, "v": False, "q": True}),
    ],
    ids=repr,
)
def test_who_need_not_wait_for_the_one_before(
    scheme: Any, expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind one whose kernels leave no memory that they may take (`tiles.early`)."""
    found: dict[str, bool] = {}
    run = type(quantize.QUANTIZE).__call__

    def noted(operation: Any, call: Any, impl: Any = None) -> Any:
        found[call.side] = call.behind
        return run(operation, call, impl)

    monkeypatch.setattr(type(quantize.QUANTIZE), "__call__", noted)
    q = torch.randn(1, 130, 2, 64)
    tw.quantize_qkv(q, q, q, scheme=scheme)
    assert found == expected
