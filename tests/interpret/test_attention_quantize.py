"""The portable kernel of attention in few bits: results of the codes, and broken twins are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops.attention import triton_codes, triton_codes_fwd
from tilewise.testing import attention_codes as cases
from tilewise.testing.attention_codes import CASES, CodedCase

ROW = "triton_codes"
BY_NAME = {case.name: case for case in CASES}


def in_float16(case: CodedCase) -> CodedCase:
    """Triton's interpreter multiplies bfloat16 wrongly."""
    if isinstance(case.scheme, tw.Sage) and case.scheme.pv == "bf16":
        return replace(case, scheme=replace(case.scheme, pv="fp16"))
    return case


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_are_those_of_the_codes(case: CodedCase, dtype: torch.dtype) -> None:
    cases.check_forward(in_float16(case), dtype, ROW)


def test_blocks_of_values_far_apart() -> None:
    cases.check_values_apart(torch.float32, ROW)


@pytest.mark.parametrize("name", ["sage2_causal", "sage2_int4", "packed", "sink"])
def test_gradients_go_straight_through(name: str) -> None:
    cases.check_gradients(BY_NAME[name], torch.float32, ROW)


SCHEMES = st.one_of(
    st.builds(
        tw.Sage,
        qk=st.sampled_from(["int8", "fp8", "int4"]),
        pv=st.sampled_from(["fp8", "fp16"]),
        q_scale=st.sampled_from(["token", "thread", "warp", "block"]),
        k_scale=st.sampled_from(["token", "thread", "block"]),
        smooth=st.sets(st.sampled_from(["q", "k", "v"])).map(tuple),
    ),
    st.builds(tw.Sage, smooth=st.sampled_from([(), ("v",)]), v_scale=st.just("block")),
    st.builds(
        tw.FP8,
        q_scale=st.sampled_from(["head", "block", "token"]),
        k_scale=st.sampled_from(["head", "block", "token"]),
        v_scale=st.sampled_from(["head", "block", "channel"]),
    ),
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheme=SCHEMES,
    lengths=st.tuples(st.integers(1, 140), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    causal=st.booleans(),
)
def test_any_shape(
    scheme: cases.Scheme, lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], causal: bool
) -> None:
    made = (lambda device: {"mask": tw.causal}) if causal else (lambda device: {})
    cases.check_forward(CodedCase("drawn", scheme, made, (lengths,), heads, *dims), torch.float32, ROW)


TWINS = [
    ("place // 2 % 2 * 8", "place // 2 % 2 * 4", "sage2"),
    ("row // 16 * 8 + row % 8", "row // 8 * 4 + row % 8", "sage2"),
    ("row % 8 // 2", "row % 4", "sage2"),
    ("offs_n % KEYS, K_GROUPS", "offs_n % 64, K_GROUPS", "tokens"),
    ("n * BLOCK_N // KEYS).to(tl.int64) * K_GROUPS", "n).to(tl.int64) * K_GROUPS", "tokens"),
    ("s += bias[:, None]", "s += 0.0 * bias[:, None]", "softcap"),
    ("* q_mean[None, :], 1)", "* 0.9 * q_mean[None, :], 1)", "sage2_int4"),
    ("(share / l_safe)[:, None]", "1.0", "rotated_centred_sink"),
    ("row0_k // KEYS + b", "row0_k // KEYS", "packed"),
    ("tl.load(VS + n * BLOCK_N // KEYS)", "tl.load(VS)", "value_blocks"),
    ("acc * tl.load(VS + of_head + d_v", "acc * tl.load(VS + d_v", "sage2"),
    ("block = h64 * blocks_q + slot", "block = h64 * blocks_q + m", "packed"),
]
SINK = replace(BY_NAME["sink"], name="rotated_centred_sink")


@pytest.mark.parametrize(("old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = (BY_NAME | {SINK.name: SINK})[name]
    cases.check_forward(case, torch.float32, ROW)  # whole, it passes
    copy = broken_copy(triton_codes_fwd, old, new, tmp_path)
    monkeypatch.setattr(triton_codes, "attention_codes_fwd", copy.attention_codes_fwd)
    with pytest.raises(AssertionError):
        cases.check_forward(case, torch.float32, ROW)
