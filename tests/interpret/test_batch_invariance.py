"""The bits of a request over pages do not depend on its batch, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_paged
from tilewise.ops.attention.problem import make_call
from tilewise.testing import properties, serving
from tilewise.testing.case import Case
from tilewise.testing.cases import INTERPRETER_CASES
from tilewise.testing.cases import causal as causal_of
from tilewise.testing.cases import window as window_of
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting

INVARIANT = Setting("triton_paged")
CASES = [case for case in INTERPRETER_CASES if case.memory == "dense" and not case.dropout and case.packed]
LENGTHS = st.tuples(st.integers(0, 9), st.integers(0, 900))


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two tiles, six programs, and no plan remembered from others."""
    monkeypatch.setattr(triton_launch, "remember", False)
    small(monkeypatch, 3)


def small(patch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    patch.setattr(triton_paged, "multiprocessors", lambda device: multiprocessors)
    patch.setattr(triton_paged, "CHUNK_KEYS", 256)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_pages_hold_the_keys(case: Case) -> None:
    properties.pages_hold_the_keys(INVARIANT, case, 5, batch_invariant=True)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5), multiprocessors=st.integers(1, 9), group=st.integers(1, 3),
    window=st.none() | st.integers(1, 700),
)  # fmt: skip
@example(lengths=[(1, 300), (1, 900), (1, 900)], multiprocessors=1, group=1, window=None)  # rows of a program's own
def test_any_lengths(lengths: list[tuple[int, int]], multiprocessors: int, group: int, window: int | None) -> None:
    mask = causal_of if window is None else window_of(window)
    case = Case("any", packed=tuple(lengths), heads_q=2 * group, mask=mask, sink=group == 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "remember", False)
        small(patch, multiprocessors)
        properties.pages_hold_the_keys(INVARIANT, case, 16, batch_invariant=True)


@settings(max_examples=12, deadline=None)
@given(
    mine=st.tuples(st.integers(1, 9), st.integers(1, 900)), others=st.lists(LENGTHS, min_size=1, max_size=3),
    multiprocessors=st.integers(1, 9), page_size=st.integers(1, 40), group=st.integers(1, 3),
)  # fmt: skip
@example(mine=(1, 900), others=[(1, 77), (40, 500)], multiprocessors=3, page_size=128, group=2)
def test_other_requests_change_nothing(
    mine: tuple[int, int], others: list[tuple[int, int]], multiprocessors: int, page_size: int, group: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "remember", False)
        small(patch, 2)
        case = Case("mine", packed=(mine,), heads_q=2 * group, mask=causal_of, sink=group == 2)
        alone = serving.among_others(INVARIANT, case, [], 0, 16, batch_invariant=True)
        small(patch, multiprocessors)  # nor does the GPU's size
        for place in {0, len(others) // 2, len(others)}:
            got = serving.among_others(INVARIANT, case, others, place, page_size, batch_invariant=True)
            properties.same_bits(got, alone, f"place {place} among {others}")


def test_by_default_they_do() -> None:
    case = Case("mine", packed=((1, 900),), heads_q=4, heads_kv=2, mask=causal_of)
    alone = serving.among_others(INVARIANT, case, [], 0, 16)
    for others in ([(1, 130), (1, 700)], [(40, 500)]):  # others divide the keys elsewhere, or make for other tiles
        with pytest.raises(AssertionError, match="differs"):
            properties.same_bits(serving.among_others(INVARIANT, case, others, 1, 16), alone, "by default")


def test_one_query_has_the_same_bits_packed_or_not() -> None:
    case = Case("one", batch=3, seqlen_q=1, seqlen_k=600, heads_q=4, heads_kv=2)
    inputs = make_inputs(case, torch.float32)
    k, v, layout = paged(inputs, 16)
    packed = tw.Paged(layout.block_table, layout.seqlens_k, torch.arange(4, dtype=torch.int32))
    arguments: dict[str, Any] = {"impl": "triton_paged", "batch_invariant": True}
    with torch.no_grad():
        dense = tw.attention(inputs.q, k, v, layout=layout, **arguments)
        assert torch.equal(dense[:, 0], tw.attention(inputs.q[:, 0], k, v, layout=packed, **arguments))


def test_a_plan_keeps_it_and_counters_return_to_zero() -> None:
    case = Case("plan", packed=((1, 900), (9, 700), (1, 0), (2, 300)), heads_q=4, heads_kv=2, mask=causal_of)
    inputs = make_inputs(case, torch.float32)
    k, v, layout = paged(inputs, 16)
    q = inputs.q.detach()
    arguments = {"layout": layout, "mask": tw.causal, "impl": "triton_paged", "batch_invariant": True}
    plan = tw.plan(q, k, v, **arguments)
    want = tw.attention(q, k, v, **arguments)
    memory = plan._prepared._memory  # type: ignore[union-attr, attr-defined]
    for _ in range(3):
        memory.o_part.fill_(torch.nan)
        memory.lse_part.fill_(torch.nan)
        assert torch.equal(plan.run(q, k, v), want)
        assert memory.arrived.eq(0).all()


def test_tiles_do_not_depend_on_the_batch() -> None:
    pool = torch.zeros(4, 16, 2, 64)
    for group, rows in ((1, 16), (4, 16), (8, 32), (16, 64), (64, 64)):
        found = set()
        for queries in ([1], [1, 1], [64], [1, 64]):
            ends = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            layout = tw.Paged(
                torch.zeros(len(queries), 4, dtype=torch.int32), torch.full((len(queries),), 64).int(), ends
            )
            q = torch.zeros(sum(queries), 2 * group, 64)
            found.add(triton_paged._tile(make_call(q, pool, pool, layout=layout, batch_invariant=True)))
        assert found == {(rows, 128)}
