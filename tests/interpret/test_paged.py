"""Attention over pages in the interpreter: any lengths, pages and number of programs, and a plan like the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_paged, triton_work
from tilewise.ops.attention.problem import make_call
from tilewise.ops.attention.triton_work import (
    LOOK,
    UNIT,
    piece_at,
    piece_of_turn,
    piece_span,
    program_start,
    row_pieces,
    tile_at,
)
from tilewise.schedule.worklist import WorkList
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, INTERPRETER_CASES
from tilewise.testing.cases import alibi as alibi_of
from tilewise.testing.cases import causal as causal_of
from tilewise.testing.inputs import make_inputs, untouched
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting

CASES_OF_PAGES = [
    case
    for case in INTERPRETER_CASES
    if case.memory == "dense" and not case.dropout and (case.packed or case.group > 1 or case.seqlen_q < 20)
]
PAGED = Setting("triton_paged")


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six programs, and no plan remembered from others."""
    monkeypatch.setattr(triton_launch, "remember", False)
    programs(monkeypatch, 3)


def programs(patch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    patch.setattr(triton_paged, "multiprocessors", lambda device: multiprocessors)


ANY_BATCH = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.tuples(st.integers(0, 5), st.integers(0, 150)), min_size=1, max_size=4),
        "multiprocessors": st.integers(1, 6),
        "page_size": st.integers(1, 40),
        "group": st.integers(1, 3),
    }
)


@contextmanager
def any_batch(batch: dict[str, Any], **formula: Any) -> Iterator[tuple[Case, int]]:
    """The case and the page size of an `ANY_BATCH`, while kernels have as many programs and remember no plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "remember", False)
        programs(patch, batch["multiprocessors"])
        group = batch["group"]
        case = Case(
            "any", packed=tuple(batch["lengths"]), heads_q=2 * group, mask=causal_of, sink=group == 2, **formula
        )
        yield case, batch["page_size"]


@pytest.mark.parametrize("case", CASES_OF_PAGES, ids=repr)
def test_pages_hold_the_keys(case: Case) -> None:
    properties.pages_hold_the_keys(PAGED, case, 5 if case.packed else 64, flat=case.packed is not None)


@pytest.mark.parametrize("multiprocessors", [1, 2, 20])
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
@pytest.mark.parametrize("name", ["few_queries", "packed_cross_causal", "packed_window_sink"])
def test_pages_and_programs_change_nothing(
    name: str, page_size: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(monkeypatch, multiprocessors)
    properties.pages_hold_the_keys(PAGED, CASES[name], page_size)


def test_half_precision() -> None:
    for name in ("one_query", "packed_cross_causal", "gqa_4"):
        properties.pages_hold_the_keys(Setting("triton_paged", torch.float16), CASES[name], 16)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(16, 16), (40, 8), (71, 1), (128, 128)])
def test_heads_of_models(heads_q: int, heads_kv: int) -> None:
    case = Case("heads", packed=((1, 40), (2, 7)), heads_q=heads_q, heads_kv=heads_kv, mask=causal_of)
    properties.pages_hold_the_keys(PAGED, case, 16)


@pytest.mark.parametrize(
    ("page_size", "of_pool", "of_q"),
    [(16, (128, 8, 2**30, 1), None), (3, (24, 2**30, 8, 1), None), (16, None, (8, 8, 2**30, 1))],
    ids=["heads", "tokens", "queries"],
)
def test_offsets_beyond_32_bits(page_size: int, of_pool: tuple[int, ...] | None, of_q: tuple[int, ...] | None) -> None:
    """Pools whose heads, or places in a page, lie outermost, 2**30 elements from one to the next, and queries whose
    heads do; of their memory only what is named is touched.
    """
    far = untouched(2**31 + 2**16, torch.float16)
    pool, q = (torch.empty(shape, dtype=torch.float16) for shape in ((20, page_size, 3, 8), (2, 1, 3, 8)))
    pool = pool if of_pool is None else far.as_strided(pool.shape, of_pool)
    q = q if of_q is None else far.as_strided(q.shape, of_q)
    for x in (pool, q):
        x.normal_()
    table = torch.tensor([[5, 19, 7], [0, 2, 11]], dtype=torch.int32)
    layout = tw.Paged(table, torch.tensor([2 * page_size + 1, 3 * page_size], dtype=torch.int32))
    got = tw.attention(q, pool, pool, layout=layout, impl="triton_paged")
    torch.testing.assert_close(got, tw.attention(q, pool, pool, layout=layout, impl="reference"), rtol=2e-3, atol=2e-3)


def test_rows_beyond_a_tile() -> None:
    """More rows than a tile has, of one request; and of several, whose mean is small."""
    long = Case("rows", batch=1, seqlen_q=40, seqlen_k=50, heads_q=4, heads_kv=2, mask=causal_of)
    properties.pages_hold_the_keys(PAGED, long, 16)
    uneven = Case("uneven", packed=((30, 60), (1, 90), (0, 5), (1, 1), (1, 0)), heads_q=4, mask=causal_of)
    properties.pages_hold_the_keys(PAGED, uneven, 7, flat=True)


def test_a_run_differs_by_head() -> None:
    """A window whose width depends on the head: one unit visits what any head sees."""
    widths = torch.tensor([3, 40, 9, 25])

    def mask(case: Case, make: Any) -> Any:
        formula = tw.causal & (lambda b, h, i, j: i - j < widths[h])
        return type(causal_of(case, make))(formula, lambda b, h, i, j: (j <= i) & (i - j < widths[h]))

    properties.pages_hold_the_keys(PAGED, Case("by_head", seqlen_q=3, seqlen_k=200, heads_q=4, mask=mask), 16)


@settings(max_examples=25, deadline=None)
@given(batch=ANY_BATCH)
def test_any_lengths(batch: dict[str, Any]) -> None:
    with any_batch(batch, score=alibi_of) as (case, page_size):
        properties.pages_hold_the_keys(PAGED, case, page_size)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), min_size=1, max_size=6),
    multiprocessors=st.integers(1, 9),
    group=st.integers(1, 3),
    window=st.none() | st.integers(1, 120),
)
def test_the_device_plans_as_the_host(
    lengths: list[tuple[int, int]], multiprocessors: int, group: int, window: int | None
) -> None:
    mask = None if window is None else tw.causal & tw.window(window)
    case = Case("plan", packed=tuple(lengths), heads_q=2 * group)
    inputs = make_inputs(case, torch.float32)
    pool = paged(inputs, 16)
    left: dict[str, torch.Tensor] = {}

    def spy(plan: Any, pointers: tuple[Any, ...], *rest: Any) -> None:
        launch(plan, pointers, *rest)
        if plan.kernel is triton_work.plan_work:
            left.update(units=pointers[2], before=pointers[3])

    launch = triton_launch.Plan.launch
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(triton_launch, "remember", False)
        patch.setattr(triton_launch.Plan, "launch", spy)
        programs(patch, multiprocessors)
        call = make_call(inputs.q, pool.k, pool.v, layout=pool.layout, mask=mask)
        rows, block_n = triton_paged._tile(call)
        triton_paged.forward(call)
    work = WorkList.build(
        [q for q, _ in lengths], [k for _, k in lengths], heads_q=2 * group, heads_kv=2,
        programs=triton_paged._PROGRAMS_PER_SM * multiprocessors, rows=rows, block_n=block_n, mask=mask,
    )  # fmt: skip
    units = left["units"].view(-1, UNIT.value).numpy()[: len(work.request)]
    for column, want in enumerate((work.request, work.tile, work.begin, work.count)):
        assert np.array_equal(units[:, column], want), f"column {column} of the units"
    count = triton_paged._PROGRAMS_PER_SM * multiprocessors
    found = torch.empty(count + 1, 4, dtype=torch.int32)
    shares[(count + 1,)](found, left["before"], left["units"], len(left["before"]) - 2, count, 2)
    assert np.array_equal(found[:, 0].numpy(), work.starts)
    busy = work.starts < work.work
    for column, want in enumerate(work.places(work.starts), 1):
        assert np.array_equal(found[:, column].numpy()[busy], want[busy]), f"column {column} of the shares"


@triton.jit
def shares(FOUND, BEFORE, UNITS, slots, programs, HEADS_KV: tl.constexpr):
    p = tl.program_id(0)
    start = program_start(p, programs, tl.load(BEFORE + slots) * HEADS_KV)
    unit, head, tile = tile_at(start, BEFORE, UNITS, slots, tl.arange(0, LOOK), HEADS_KV)
    tl.store(FOUND + 4 * p, start)
    tl.store(FOUND + 4 * p + 1, unit)
    tl.store(FOUND + 4 * p + 2, head)
    tl.store(FOUND + 4 * p + 3, tile)


@triton.jit
def pieces_and_owners(STARTS, OWNERS, TURNS, programs, rounds, work, N: tl.constexpr):
    n = tl.arange(0, N)
    start, _count = piece_span(n, programs, rounds, work)
    tl.store(STARTS + n, start)
    tl.store(OWNERS + n, piece_at(n, programs, rounds, work))
    tl.store(TURNS + n, piece_of_turn(n, programs, rounds))


@settings(max_examples=60, deadline=None)
@given(programs=st.integers(1, 40), rounds=st.integers(1, 4), work=st.integers(1, 1000))
def test_pieces_make_up_the_line(programs: int, rounds: int, work: int) -> None:
    starts, owners, turns = torch.empty(3, 1024, dtype=torch.int32)
    pieces_and_owners[(1,)](starts, owners, turns, programs, rounds, work, 1024)
    ends = starts[: programs * rounds + 1].tolist()
    assert (ends[0], ends[-1]) == (0, work)
    assert ends == sorted(ends)
    for position, piece in enumerate(owners[:work].tolist()):
        assert ends[piece] <= position < ends[piece + 1]
    assert sorted(turns[: programs * rounds].tolist()) == list(range(programs * rounds))
    if work >= 8 * 2**rounds * programs:  # pieces of large shares
        sizes = np.diff(ends).reshape(programs, rounds)
        assert sizes.min() > 0
        assert (np.diff(sizes, axis=1)[:, :-1] <= 0).all(), "the last takes what is left"
        assert rounds == 1 or (sizes[:, 0] >= 7 * sizes.sum(1) // 8).all()
        assert turns[:programs].tolist() == list(range(0, programs * rounds, rounds))


@triton.jit
def but_the_first(row_start, count, programs, rounds, work):
    first, last = row_pieces(row_start, count, programs, rounds, work)
    return first + 1, last + 1


def test_a_merge_that_forgets_the_first_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "row_pieces", but_the_first)
    with pytest.raises(AssertionError):
        properties.pages_hold_the_keys(PAGED, CASES["one_query_long"], 16)
