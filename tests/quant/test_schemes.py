"""Schemes: what their fields may be, when two are one, and what the published ones are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.quant.schemes import check_scheme


def test_schemes_of_one_meaning_are_one() -> None:
    one, other = tw.Sage(smooth=("v", "k")), tw.Sage(smooth=["k", "v"])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
    assert one.smooth == ("k", "v")
    assert one != tw.Sage()
    assert tw.Sage(qk="fp8") != tw.FP8()
    assert len({tw.FP8(), tw.FP8(), tw.FP8(v_scale="block")}) == 2


def test_repr_makes_the_same_again() -> None:
    for scheme in (tw.Sage1(), tw.Sage2("int4"), tw.Sage2pp(), tw.FA3FP8(), tw.Sage(smooth=(), rotate="hadamard")):
        assert eval(repr(scheme), {"Sage": tw.Sage, "FP8": tw.FP8}) == scheme


def test_nothing_changes_a_scheme() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tw.Sage().qk = "fp8"  # type: ignore[misc]


def test_published_ones() -> None:
    assert tw.Sage1() == tw.Sage("int8", "fp16", "block", "block", ("k",))
    assert tw.Sage2() == tw.Sage("int8", "fp8", "thread", "thread", ("k",))
    assert tw.Sage2("int4") == tw.Sage("int4", "fp8", "thread", "thread", ("q", "k"))
    assert tw.Sage2pp() == tw.Sage(pv_sum="fp16")
    assert tw.Sage2pp("int4").smooth == ("q", "k")
    assert tw.FA3FP8() == tw.FP8("head", "head", "head")


def test_64_keys_fit_where_sums_are_float16() -> None:
    scheme = tw.Sage2pp()
    assert (scheme.p_largest, scheme.v_largest) == (224.0, 4.5)
    assert 64 * scheme.p_largest * scheme.v_largest < 65504
    assert (tw.Sage2().p_largest, tw.Sage2().v_largest, tw.FP8().p_largest) == (448.0, 448.0, 256.0)


def test_every_combination_of_values_is_a_scheme() -> None:
    sides = [tuple(x for x in "qkv" if x in chosen) for chosen in ("", "q", "k", "v", "qk", "qv", "kv", "qkv")]
    fields = itertools.product(
        ("int8", "fp8", "int4"), ("fp8", "fp16", "bf16"), ("token", "thread", "warp", "block"),
        ("token", "thread", "block"), sides, ("none", "hadamard"), (1, 4),
    )  # fmt: skip
    assert len({tw.Sage(*values) for values in fields}) == 3 * 3 * 4 * 3 * 8 * 2 * 2
    assert len({tw.FP8(*x) for x in itertools.product(*[("head", "block")] * 3)}) == 8


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (tw.Sage, {"qk": "int2"}, "Sage qk: got 'int2'; expected one of 'int8', 'fp8', 'int4'"),
    (tw.Sage, {"qk": None}, "Sage qk: got None"),
    (tw.Sage, {"pv": "int8"}, "Sage pv: got 'int8'"),
    (tw.Sage, {"q_scale": "head"}, "Sage q_scale: got 'head'"),
    (tw.Sage, {"k_scale": "warp"}, "Sage k_scale: got 'warp'; expected one of 'token', 'thread', 'block'"),
    (tw.Sage, {"smooth": "k"}, "Sage smooth: got 'k'; expected a tuple"),
    (tw.Sage, {"smooth": ("k", "k")}, "Sage smooth: got"),
    (tw.Sage, {"smooth": ("o",)}, "Sage smooth: got"),
    (tw.Sage, {"smooth": None}, "Sage smooth: got None"),
    (tw.Sage, {"rotate": True}, "Sage rotate: got True"),
    (tw.Sage, {"pv_flush": 0}, "Sage pv_flush: got 0; expected 1 or more"),
    (tw.Sage, {"pv_flush": True}, "Sage pv_flush: got True"),
    (tw.Sage, {"pv_flush": 1.0}, "Sage pv_flush: got 1.0"),
    (tw.Sage, {"pv_sum": "bf16"}, "Sage pv_sum: got 'bf16'"),
    (tw.Sage, {"pv": "fp16", "pv_sum": "fp16"}, "Sage pv_sum: got 'fp16'; expected one of 'fp32'"),
    (tw.Sage, {"v_scale": "head"}, "Sage v_scale: got 'head'; expected one of 'channel', 'block'"),
    (tw.Sage, {"pv": "fp16", "v_scale": "block"}, "Sage v_scale: got 'block'; expected one of 'channel'"),
    (tw.Sage2, {"qk": "fp4"}, "Sage qk: got 'fp4'"),
    (tw.FP8, {"q_scale": "thread"}, "FP8 q_scale: got 'thread'; expected one of 'head', 'block', 'token'"),
    (tw.FP8, {"k_scale": 1}, "FP8 k_scale: got 1"),
    (tw.FP8, {"v_scale": "token"}, "FP8 v_scale: got 'token'; expected one of 'head', 'block', 'channel'"),
    (tw.FP8, {"rotate": "random"}, "FP8 rotate: got 'random'"),
    (tw.FP8, {"pv_flush": -1}, "FP8 pv_flush: got -1"),
]


@pytest.mark.parametrize(("make", "fields", "message"), WRONG, ids=lambda x: getattr(x, "__name__", str(x)[:40]))
def test_refused(make: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make(**fields)
    assert message in str(caught.value)


def test_what_is_no_scheme_is_refused() -> None:
    assert check_scheme(tw.FP8()) == tw.FP8()
    with pytest.raises(InputError, match=r"scheme: got 'sage2'; expected a tilewise\.Sage or"):
        check_scheme("sage2")
