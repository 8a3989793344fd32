"""The Triton kernels of `quantize_qkv`: the bits of the CPU, in tiles of any size, and broken twins are caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tests.ops.quantize.shapes import SAMPLED, any_case
from tilewise.ops import triton_launch
from tilewise.ops.quantize import triton_columns, triton_quantize, triton_statistics
from tilewise.ops.quantize.problem import Call
from tilewise.ops.quantize.table import QUANTIZE
from tilewise.testing import quantize as cases
from tilewise.testing.quantize import BY_NAME, CASES, QuantizeCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _unwritten_memory_shows() -> Iterator[None]:
    """What a kernel leaves as it is has other bits than those of results, or of what kernels tell each other."""
    plain, made = QUANTIZE.results, triton_quantize._Work.__init__

    def with_memory(work: Any, *arguments: Any) -> None:
        made(work, *arguments)
        for x in work.memory.values():
            x.view(torch.uint8).fill_(0x55)

    def marked(call: Call) -> dict[str, torch.Tensor]:
        found = plain(call)
        for x in found.values():
            x.view(torch.uint8).fill_(0x55)
        return found

    object.__setattr__(QUANTIZE, "results", marked)
    triton_quantize._Work.__init__ = with_memory
    yield
    triton_quantize._Work.__init__ = made
    object.__setattr__(QUANTIZE, "results", plain)


@pytest.mark.parametrize("case", [*CASES, *SAMPLED], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(case: QuantizeCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_case(), dtype=st.sampled_from(DTYPES))
def test_any_shape(case: QuantizeCase, dtype: torch.dtype) -> None:
    # Triton's interpreter cuts bfloat16 off where GPUs round
    numbers = isinstance(case.scheme, tw.Sage) and case.scheme.pv == "bf16"
    cases.check(replace(case, scheme=replace(case.scheme, pv="fp16")) if numbers else case, dtype, "triton")


@pytest.mark.parametrize("name", ["long", "all_centred_packed", "fa3_packed", "rotated_packed", "rotated_head"])
def test_other_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in (("_CHUNK", 64), ("_STEP", 16), ("_PARTS", 2), ("_ROTATED", (16, 32))):
        monkeypatch.setattr(triton_quantize, constant, value)
    case = BY_NAME[name]
    cases.check(case, torch.float32, "triton")


def test_a_wide_rotation_takes_steps() -> None:
    cases.check(
        QuantizeCase("wide", tw.Sage(smooth=("q", "k"), rotate="hadamard"), ((65, 3),), (2, 1), 128, 8),
        torch.float32,
        "triton",
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["sage2", "all_centred", "fa3", "blocks", "nothing_centred", "rotated"])
def test_what_is_not_finite(name: str, bad: float) -> None:
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.float32)
    inputs["q"][0, 3, 0, 5] = inputs["k"][0, 130, 1, 2] = inputs["v"][1, 7, 1, 4] = bad
    got, want = (cases.tensors(tw.quantize_qkv(**inputs, scheme=case.scheme, impl=impl)) for impl in ("triton", "cpu"))
    for x in (got, want):  # numbers of a block that is rotated with them, or lies beside them in a product
        x["q_bias"] = x.get("q_bias", torch.zeros(1)).nan_to_num(posinf=0.0, neginf=0.0, nan=0.0)[1:]
    cases.alike(got, want, rotated=case.scheme.rotate != "none")


@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.FP8(), tw.FP8("token", "block", "block")], ids=str)
def test_zeros_and_tiny_numbers(scheme: cases.Scheme) -> None:
    zeros = torch.zeros(1, 70, 2, 8)
    for number in (0.0, -0.0, 2.0**-124):
        x = tw.quantize_qkv(zeros + number, zeros, zeros + number, scheme=scheme, impl="triton")
        assert not any(part.float().any() for name, part in cases.tensors(x).items())


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for _ in range(2):
        for case in CASES[:12]:
            cases.check(case, torch.float32, "triton")


TWINS = [
    ("encode_rows", "reshape(ROWS // 16, 2, 8), 1)", "reshape(ROWS // 16, 8, 2), 2)", "sage2"),
    ("encode_rows", "ROWS // 8, 4, 2), 2), 0)", "ROWS // 8, 2, 4), 1), 0)", "sage2"),
    ("encode_rows", "h // (HEADS // HEADS_K)", "h % HEADS_K", "sage2"),
    ("encode_rows", "tl.where(inside, tl.max(size_of(x), 1), 0.0)", "tl.max(size_of(x), 1)", "sage2"),
    ("encode_rows", "tl.minimum(length - block * ROWS, ROWS)", "ROWS", "sage2_int4"),
    ("encode_rows", "cell - block, tl.cdiv", "cell, tl.cdiv", "fa3"),
    ("encode_rows", "first + h.to(tl.int64) * total", "first + h.to(tl.int64) * length", "sage2_packed"),
    ("encode_rows", "tl.where(block * ROWS < length, scale_of(by_group, CODE), 0.0)", "scale_of(by_group, CODE)",
     "blank_slot"),
    ("encode_rows", "b * seqlen + row\n    columns", "row\n    columns", "turned"),
    ("sum_chunks", "token = first + row if CU", "token = row if CU", "turned_packed"),
    ("encode_columns", "place // 2 % 2 * 8", "place // 2 % 2 * 4", "sage2"),
    ("encode_columns", "if block == 0:", "if block == 1:", "odd_head"),
    ("encode_columns", "line * DIM * ROWS", "line * ROWS", "sage2_packed"),
    ("join_chunks", "mean - tl.min(low, 0)", "tl.min(low, 0) - mean", "all_centred"),
    ("join_chunks", "tl.maximum(summed, 1)", "(parts * ROWS)", "sage2"),
    ("join_chunks", "length - first_row, count", "length - first_row, ROWS", "sampled"),
    ("sum_chunks", "(5 * chunk + 3)", "(5 * chunk + 2)", "sampled"),
    ("sum_chunks", "length >= MANY, (5", "length > MANY, (5", "sampled_exactly"),
    ("join_chunks", "tl.where(parts > 0, size_of(size), 0.0)", "size_of(size)", "all_centred_packed"),
    ("sum_chunks", "block * PER + start // count", "block * PER", "sampled"),
    ("sum_chunks", "tl.zeros_like(d), mask", "tl.zeros_like(d) + 0x70000000, mask", "sage2"),
    ("join_chunks", "part * PER + n", "part * PER", "sampled"),
]  # fmt: skip
MODULES = {"encode_rows": triton_quantize, "encode_columns": triton_columns}
# a slot between two of one sequence's that no block has
BLANK = QuantizeCase("blank_slot", tw.FA3FP8(), ((64, 128), (3, 3)), packed=True)


@pytest.mark.parametrize(("kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = (BY_NAME | {case.name: case for case in (BLANK, *SAMPLED)})[name]
    cases.check(case, torch.float32, "triton")  # whole, it passes
    copy = broken_copy(MODULES.get(kernel, triton_statistics), old, new, tmp_path)
    monkeypatch.setattr(triton_quantize, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        cases.check(case, torch.float32, "triton")
