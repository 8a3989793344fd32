"""`attention(select=)` by the Triton kernels: tiles that are taken, and summaries of the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops.attention import triton_codes, triton_codes_fwd
from tilewise.testing import attention_select as cases
from tilewise.testing.attention_select import CASES, SelectCase

OF_BATCH = "empty_rows"  # whose mask is for two elements
SMALL = [
    case
    if case.packed
    else replace(
        case,
        lengths=tuple((min(q, 50), min(k, 50)) for q, k in case.lengths[: 2 if case.name == OF_BATCH else 1]),
    )
    for case in CASES
    if case.name not in ("mass_by_head", "share", "short")
]


@pytest.mark.parametrize("case", SMALL, ids=repr)
def test_results_and_gradients(case: SelectCase) -> None:
    cases.check(case, torch.float32, "triton")


def test_in_few_bits() -> None:
    q, k, v = (x.detach() for x in cases.make_inputs(SMALL[0], torch.float32))
    selected = tw.select_tiles(q, k, tw.Select(tw.TopK(2), block=16))
    o = tw.attention(q, k, v, quantize=tw.Sage2(), select=selected, impl="triton_codes")
    want = tw.attention(q, k, v, quantize=tw.Sage2(), mask=tw.blocks(selected.kept, 16), impl="cpu_codes")
    assert float((o - want).norm()) <= 2.0**-4 * float(want.norm())  # each rounds its weights


def test_small_weights_are_left_out() -> None:
    cases.check_left_out(torch.float32, "triton")


@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.FP8()], ids=repr)
def test_small_weights_of_codes_are_left_out(scheme: tw.Sage | tw.FP8) -> None:
    cases.check_left_out(torch.float32, "triton_codes", quantize=scheme)


@pytest.mark.parametrize(("old", "new"), [(">= -skip", ">= skip"), ("if SKIPS:", "if False:"), ("SKIP + h)", "SKIP)")])
def test_a_kernel_that_leaves_out_others_is_caught(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = broken_copy(triton_codes_fwd, old, new, tmp_path)
    monkeypatch.setattr(triton_codes, "attention_codes_fwd", copy.attention_codes_fwd)
    with pytest.raises(AssertionError):
        cases.check_left_out(torch.float32, "triton_codes", quantize=tw.Sage2())
