"""`attention(select=)` on a GPU: tiles that are taken, summaries of the rest, at size, in few bits, replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import attention_select as cases
from tilewise.testing.attention_select import CASES, SelectCase
from tilewise.testing.graphs import captured

ROWS = ("hopper", "triton")
THIRD, FEW = tw.TopK(0.3), tw.TopK(0.2)
CAUSAL = next(case.made for case in CASES if case.name == "mass_causal")
RAGGED = ((1000, 1000), (0, 5), (129, 300), (700, 700))
LARGE = [
    SelectCase("large", tw.Select(THIRD, block=128), lengths=((1000, 1300),), dim=128, dim_v=128),
    SelectCase("large_causal", tw.Select(tw.Sparge(0.3, -1.0), block=128), CAUSAL, ((1500, 1500),), (4, 4), 64, 64),
    SelectCase("large_odd", tw.Select(THIRD, block=(64, 96)), CAUSAL, ((1100, 1100),), (4, 1), 128, 128),
    SelectCase("large_summary", tw.Select(FEW, block=128, far="summary"), CAUSAL, ((1500, 1500),), (4, 2), 128, 128),
    SelectCase("large_spread", tw.Select(FEW, block=128, far="summary2"), lengths=((1200, 1200),), dim=128),
    SelectCase("large_packed", tw.Select(THIRD, far="summary"), CAUSAL, RAGGED, (4, 2), 128, 128, packed=True),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients(case: SelectCase, row: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, row, DEVICE)


@pytest.mark.parametrize("case", LARGE[:2], ids=repr)
@pytest.mark.parametrize("row", ["hopper_codes", "triton_codes"])
def test_in_few_bits(case: SelectCase, row: str) -> None:
    q, k, v = (x.detach() for x in cases.make_inputs(case, torch.bfloat16, DEVICE))
    arguments = cases.arguments_of(case, DEVICE) | {"quantize": tw.Sage2()}
    selected = tw.select_tiles(q, k, case.select, mask=arguments.get("mask"))
    o = tw.attention(q, k, v, select=selected, impl=row, **arguments)
    here = {"mask": arguments.get("mask"), "quantize": tw.Sage2()}
    there = replace(selected, kept=selected.kept.cpu(), classes=selected.classes.cpu())
    want = tw.attention(q.cpu(), k.cpu(), v.cpu(), select=there, **here).to(DEVICE)
    assert float((o - want).float().norm()) <= 2.0**-4 * float(want.float().norm())  # each rounds its weights


def test_replayed() -> None:
    """A graph predicts anew for the queries and keys that it finds."""
    case = LARGE[1]
    q, k, v = (x.detach() for x in cases.make_inputs(case, torch.bfloat16, DEVICE))

    def run() -> torch.Tensor:
        return tw.attention(q, k, v, mask=tw.causal, select=case.select)

    graph, found = captured(run)
    q.copy_(torch.randn_like(q) * 2)
    graph.replay()
    assert torch.equal(found, run())


def test_gradients_repeat() -> None:
    case = LARGE[3]
    q, k, v = cases.make_inputs(case, torch.bfloat16, DEVICE)
    found = []
    for _ in range(2):
        o = tw.attention(q, k, v, mask=tw.causal, select=case.select, deterministic=True)
        found.append(torch.autograd.grad(o.float().square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_weights_are_left_out(row: str, dtype: torch.dtype) -> None:
    cases.check_left_out(dtype, row, DEVICE)
