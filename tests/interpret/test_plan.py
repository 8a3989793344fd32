"""Plans that several calls share, in the interpreter: what runs launch, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_paged
from tilewise.testing import serving
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, INTERPRETER_CASES
from tilewise.testing.cases import causal as causal_of
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting

CASES_OF_PAGES = [
    case for case in INTERPRETER_CASES if case.memory == "dense" and not case.dropout and (case.packed or case.sink)
]


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six programs, and no plan remembered from others."""
    monkeypatch.setattr(triton_launch, "remember", False)
    monkeypatch.setattr(triton_paged, "multiprocessors", lambda device: 3)


@pytest.mark.parametrize("case", CASES_OF_PAGES, ids=repr)
def test_a_run_is_a_call(case: Case) -> None:
    serving.a_run_is_a_call(Setting("triton_paged"), case, 5)


def test_rows_without_a_plan_are_called() -> None:
    for impl, name in (("triton", "causal"), ("triton", "packed_causal"), ("triton_decode", "one_query")):
        serving.a_run_is_a_call(Setting(impl), CASES[name], None)


def _uneven() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tw.Paged]:
    case = Case("uneven", packed=((1, 700), (3, 90), (0, 5), (1, 1), (1, 0)), heads_q=4, heads_kv=2)
    inputs = make_inputs(case, torch.float32)
    pool = paged(inputs, 16)
    return inputs.q.detach(), pool.k, pool.v, pool.layout


def test_a_run_launches_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, layout = _uneven()
    launched: list[str] = []
    launch = triton_launch.Plan.launch

    def spy(plan: Any, *arguments: Any) -> None:
        launched.append(plan.kernel.fn.__name__)
        launch(plan, *arguments)

    monkeypatch.setattr(triton_launch.Plan, "launch", spy)
    plan = tw.plan(q, k, v, layout=layout, impl="triton_paged")
    plan.run(q, k, v)
    plan.run(q, k, v)
    plan.update()
    assert launched == ["plan_work", "attention_work", "attention_work", "plan_work"]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900)), min_size=1, max_size=4),
    multiprocessors=st.integers(1, 7),
)
def test_runs_leave_the_plan_as_they_found_it(lengths: list[tuple[int, int]], multiprocessors: int) -> None:
    """Counters are 0 again after each run, and no run reads what the one before it left."""
    case = Case("any", packed=tuple(lengths), heads_q=2, mask=causal_of)
    inputs = make_inputs(case, torch.float32)
    k, v, layout = paged(inputs, 16)
    q = inputs.q.detach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "remember", False)
        patch.setattr(triton_paged, "multiprocessors", lambda device: multiprocessors)
        arguments = {"layout": layout, "mask": tw.causal, "impl": "triton_paged"}
        want = tw.attention(q, k, v, **arguments)
        plan = tw.plan(q, k, v, **arguments)
        for _ in range(3):
            if plan._prepared is not None:
                memory = plan._prepared._memory  # type: ignore[attr-defined]
                assert memory.arrived.eq(0).all()
                memory.o_part.fill_(torch.nan)
                memory.lse_part.fill_(torch.nan)
            assert torch.equal(plan.run(q, k, v), want)


def test_an_update_plans_for_the_lengths_that_are_there() -> None:
    q, k, v, layout = _uneven()
    assert layout.cu_seqlens_q is not None
    plan = tw.plan(q, k, v, layout=layout, mask=tw.causal, impl="triton_paged")
    for lengths, ends in (((3, 600, 0, 650, 1), (0, 2, 2, 2, 6, 6)), ((0, 0, 704, 0, 3), (0, 0, 1, 6, 6, 6))):
        layout.seqlens_k.copy_(torch.tensor(lengths))
        layout.cu_seqlens_q.copy_(torch.tensor(ends))
        layout.block_table.random_(k.shape[0])  # type: ignore[union-attr]
        plan.update()
        pool = (k.nan_to_num(), v.nan_to_num())
        for impl in ("triton_paged", "cpu_tiled"):
            want = tw.attention(q, *pool, layout=layout, mask=tw.causal, impl=impl)
            same = {"rtol": 0.0, "atol": 0.0} if impl == "triton_paged" else {}
            torch.testing.assert_close(plan.run(q, *pool), want, **same)  # type: ignore[arg-type]


def test_tensors_that_start_elsewhere() -> None:
    """Only on a GPU does it count where rows start: kernels that were planned for any start take all."""
    q, k, v, layout = _uneven()
    plan = tw.plan(q, k, v, layout=layout, impl="triton_paged")
    moved = torch.empty(k.numel() + 1)[1:].view(k.shape).copy_(k)
    want = plan.run(q, k, v)
    assert torch.equal(plan.run(q, moved, v), want)
    plan = tw.plan(q, moved, v, layout=layout, impl="triton_paged")
    assert torch.equal(plan.run(q, moved, v), want)
    assert torch.equal(plan.run(q, k, v), want)
