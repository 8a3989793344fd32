"""Kernels that are launched before those before them have ended read and write nothing that these still write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core import dispatch
from tilewise.ops.quantize import triton_quantize
from tilewise.ops.quantize.table import QUANTIZE
from tilewise.ops.triton_launch import Plan
from tilewise.testing import quantize as cases
from tilewise.testing.quantize import BY_NAME, QuantizeCase
from tilewise.tiles.early import AT_FIRST, BEHIND

WRITES = {
    "sum_chunks": ("SUMS", "SPANS", "MOST", "ZEROS"),
    "join_chunks": ("MEAN", "TURNED", "MOST"),
    "encode_rows": ("CODES", "SCALE", "BIAS", "SUM", "UNIT_SUM"),
    "encode_columns": ("CODES", "SCALE"),
}
Launch = tuple[str, int, set[int], set[int]]  # a kernel, when it waits, and where what it reads and writes begins


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would be launched on Hopper."""
    found: list[Launch] = []
    kept: list[Any] = []  # so that no memory is another's later

    def launch(plan: Plan, pointers: tuple[Any, ...], _formula: Any, _scalars: Any = ()) -> None:
        name = plan.kernel.__name__
        given = dict(zip(plan.kernel.arg_names, pointers, strict=False))
        writes = set(WRITES[name])
        if name == "encode_rows" and given["CODES"] is None:
            writes = {"MOST"}
        elif name == "encode_rows" and plan.constants[3]:  # means of blocks of queries
            writes.add("MEAN")
        kept.append(pointers)
        there = {key: x.data_ptr() for key, x in given.items() if isinstance(x, torch.Tensor) and x.numel()}
        early = plan.constants[plan.kernel.arg_names.index("EARLY") - len(plan.kernel.arg_names)]
        assert plan.early is (early > 0)
        found.append((name, early, set(there.values()), {there[key] for key in writes & there.keys()}))

    monkeypatch.setattr(Plan, "launch", launch)
    monkeypatch.setattr("tilewise.tiles.early.capability", lambda device: 90)
    monkeypatch.setattr(triton_quantize._PLANS, "get", lambda key: None)
    return found


def check(launches: list[Launch]) -> None:
    """Of one that waits first all before it are complete, of one that does not all before its predecessor."""
    for n, (name, early, uses, writes) in enumerate(launches):
        running = launches[n - 1 : n] if n and early == BEHIND.value else []
        for other, _early, others_use, others_write in running:
            assert not uses & others_write, f"{name}, number {n}, needs what {other} still writes"
            assert not writes & others_use, f"{name}, number {n}, writes what {other} still reads"


LARGE = [
    QuantizeCase("sampled", tw.Sage2(), ((70, 2304),) * 2, (4, 2), 32, 24),
    QuantizeCase("sampled_rotated", tw.Sage(smooth=("k", "v"), rotate="hadamard"), ((70, 2304),), (4, 2), 32, 24),
    QuantizeCase("sampled_fp8", tw.FP8("block", "head", "head"), ((70, 2304),), (4, 2), 32, 24),
]


@pytest.mark.parametrize("case", [*(case for case in BY_NAME.values() if case.lengths), *LARGE], ids=repr)
def test_nobody_reads_what_is_not_there(case: QuantizeCase, launches: list[Launch]) -> None:
    inputs = cases.make_inputs(case, torch.float16)
    run(inputs, case, launches)
    assert launches[0][1] == AT_FIRST.value
    check(launches)


def run(inputs: dict[str, Any], case: QuantizeCase, launches: list[Launch]) -> None:
    """Calls as `quantize_qkv` makes them, whatever can run."""
    row, choose = next(row for row in QUANTIZE.rows if row.name == "triton"), dispatch.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose", lambda rows, *call: row if rows is QUANTIZE.rows else choose(rows, *call))
        tw.quantize_qkv(**inputs, scheme=case.scheme)
    assert launches


def test_one_that_does_not_wait_would_show(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quantize, "early_for", lambda device, behind=False: BEHIND.value)
    run(cases.make_inputs(BY_NAME["sage2"], torch.float16), BY_NAME["sage2"], launches)
    with pytest.raises(AssertionError, match="still writes"):
        check(launches)
