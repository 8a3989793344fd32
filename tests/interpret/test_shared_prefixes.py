"""Prefixes that requests share, in the interpreter: any groups, any number of programs (`test_shared_plans`: plans)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_paged, triton_parts, triton_prefixes
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.triton_work import UNIT
from tilewise.quant import encode
from tilewise.testing.case import Case
from tilewise.testing.cases import causal, softcap
from tilewise.testing.properties import Setting, same_bits
from tilewise.testing.sharing import Batch, alike, shared_prefixes_hold_the_keys

PAGED = Setting("triton_paged")
BATCHES = {  # keys of each request, and how many first ones are those of the request before
    "all_alike": ([300] * 5, [0] + [300] * 4),
    "all_but_the_end": ([300, 301, 420, 299], [0, 290, 290, 290]),
    "inside_pages_and_tiles": ([300, 280, 500], [0, 261, 139]),
    "two_groups": ([300, 310, 290, 400, 390, 650], [0, 280, 280, 10, 380, 380]),
    "side_by_side_within_one": ([600, 610, 620, 700, 690, 650], [0, 590, 590, 140, 600, 600]),
    "empty_and_alone": ([0, 300, 310, 0, 1, 200, 0], [0, 0, 290, 0, 0, 1, 0]),
    "none": ([300, 200, 400], [0, 0, 0]),
    "too_little": ([300, 200, 400], [0, 100, 127]),
    "more_than_a_tile": ([300] * 37, [0] + [270] * 36),
}


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six programs, and no plan remembered from others."""
    monkeypatch.setattr(triton_launch, "remember", False)
    programs(monkeypatch, 3)


def programs(patch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    patch.setattr(triton_paged, "multiprocessors", lambda device: multiprocessors)


def case_of(keys: list[int], queries: int = 1, **changes: Any) -> Case:
    return Case("shared", packed=tuple((queries, n) for n in keys), **{"heads_q": 4, **changes})


def call_of(batch: Batch) -> Call:
    with torch.no_grad():
        return make_call(batch.q, batch.k, batch.v, **batch.arguments)


@pytest.mark.parametrize("multiprocessors", [1, 3, 20])
@pytest.mark.parametrize("name", BATCHES)
def test_shared_prefixes_hold_the_keys(name: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(monkeypatch, multiprocessors)
    keys, common = BATCHES[name]
    shared_prefixes_hold_the_keys(PAGED, case_of(keys), common, 16, flat=multiprocessors == 3)


@pytest.mark.parametrize("queries", [2, 3, 5])
@pytest.mark.parametrize("name", ["all_alike", "side_by_side_within_one", "empty_and_alone"])
def test_several_queries(name: str, queries: int) -> None:
    """The last ones of each request, of which each sees one key more; with sinks; of groups of one, two and three."""
    keys, common = BATCHES[name]
    case = case_of(keys, queries, heads_q=2 * (6 - queries) // 2 * 2, mask=causal, sink=queries < 5)
    shared_prefixes_hold_the_keys(PAGED, case, common, 7)


def test_half_precision_and_a_score() -> None:
    keys, common = BATCHES["side_by_side_within_one"]
    case = case_of(keys, 2, mask=causal, score=softcap, head_dim=64, head_dim_v=80)
    shared_prefixes_hold_the_keys(Setting("triton_paged", torch.float16), case, common, 16)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_codes(kind: str) -> None:
    """As in a call that shares nothing."""
    keys, common = BATCHES["two_groups"]
    batch = alike(PAGED, case_of(keys, 2, mask=causal), common)
    k, v = (encode(x.nan_to_num(), kind) for x in (batch.k, batch.v))
    layout = batch.arguments["layout"]
    plain = batch.arguments | {"layout": replace(layout, share_prefixes=False)}
    with torch.no_grad():
        got, want = (
            tw.attention_with_lse(batch.q, k, v, impl="triton_paged", **arguments)
            for arguments in (batch.arguments, plain)
        )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert not torch.equal(got[0], want[0]), "nothing was shared"


def test_queries_may_lie_anywhere() -> None:
    """Rows of a request apart from those of the next one."""
    batch = alike(PAGED, case_of([300, 310, 290], 2, mask=causal), [0, 280, 280])
    want = tw.attention(batch.q, batch.k, batch.v, impl="triton_paged", **batch.arguments)
    wide = torch.full((3, 5, *batch.q.shape[2:]), torch.nan)
    wide[:, 1:3] = batch.q
    got = tw.attention(wide[:, 1:3], batch.k, batch.v, impl="triton_paged", **batch.arguments)
    assert torch.equal(got, want)


GROUPINGS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=2, max_size=7)


@settings(max_examples=25, deadline=None)
@given(
    requests=GROUPINGS,
    multiprocessors=st.integers(1, 9),
    page_size=st.integers(1, 40),
    queries=st.integers(1, 3),
    group=st.integers(1, 5),
)
def test_any_groups(
    requests: list[tuple[int, int]], multiprocessors: int, page_size: int, queries: int, group: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "remember", False)
        programs(patch, multiprocessors)
        case = case_of([keys for keys, _ in requests], queries, heads_q=2 * group, mask=causal, sink=group == 2)
        shared_prefixes_hold_the_keys(PAGED, case, [0, *(n for _, n in requests[1:])], page_size)


def test_where_nothing_is_shared_nothing_changes() -> None:
    """The same bits as without."""
    for name in ("none", "too_little"):
        keys, common = BATCHES[name]
        batch = alike(PAGED, case_of(keys, 2, mask=causal), common)
        plain = batch.arguments | {"layout": replace(batch.arguments["layout"], share_prefixes=False)}
        with torch.no_grad():
            got, want = (
                tw.attention_with_lse(batch.q, batch.k, batch.v, impl="triton_paged", **arguments)
                for arguments in (batch.arguments, plain)
            )
        assert all(map(torch.equal, got, want)), name


def test_why_says_what_is_shared() -> None:
    batch = alike(PAGED, case_of([300, 300]), [0, 300])
    with torch.no_grad():
        found = tw.why(batch.q, batch.k, batch.v, impl="triton_paged", **batch.arguments)
    assert "; shares prefixes of neighbours in a launch before, 8 requests to a tile" in str(found)


def test_repeats_and_runs_of_a_plan_give_the_same_bits() -> None:
    keys, common = BATCHES["side_by_side_within_one"]
    batch = alike(PAGED, case_of(keys, 2, mask=causal, sink=True), common)
    with torch.no_grad():
        want = tw.attention_with_lse(batch.q, batch.k, batch.v, impl="triton_paged", **batch.arguments)
        sink = batch.arguments["sink"]
        plan = tw.plan(batch.q, batch.k, batch.v, impl="triton_paged", **batch.arguments)
        for _ in range(2):
            got = plan.run_with_lse(batch.q, batch.k, batch.v, sink=sink)
            same_bits(dict(zip(("o", "lse"), got, strict=True)), dict(zip(("o", "lse"), want, strict=True)), "a call")
            assert plan._prepared._memory.arrived.eq(0).all()  # type: ignore[union-attr, attr-defined]


def test_a_plan_is_renewed_for_other_groups() -> None:
    """Lengths and pages that change in place: other groups, none, and all alike."""
    first, *others = (
        alike(PAGED, case_of(keys), common)
        for keys, common in (([400, 400, 400], [0, 390, 0]), ([400, 390, 300], [0, 0, 290]), ([400] * 3, [0, 0, 0]),
                             ([400] * 3, [0, 400, 400]))
    )  # fmt: skip
    layout = first.arguments["layout"]
    pages = max(len(batch.k) for batch in (first, *others))
    pool = [torch.empty(pages, *x.shape[1:]) for x in (first.k, first.v)]
    plan = tw.plan(first.q, *pool, layout=layout, impl="triton_paged")
    for batch in (*others, first):
        own = batch.arguments["layout"]
        with torch.no_grad():
            for x, like in zip((*pool, layout.block_table, layout.seqlens_k),
                               (batch.k, batch.v, own.block_table, own.seqlens_k), strict=True):  # fmt: skip
                x[: len(like)] = like
        plan.update()
        got = plan.run_with_lse(batch.q, *pool)
        arguments = batch.arguments | {"layout": replace(own, share_prefixes=True)}
        want = tw.attention_with_lse(batch.q, batch.k, batch.v, impl="triton_paged", **arguments)
        assert all(map(torch.equal, got, want))


@triton.jit
def of_the_first(PREFIXES, UNITS, u, unit, hk, rows_q, batch, HEADS_KV: tl.constexpr, GROUP: tl.constexpr,
                 PREFIX_TILE: tl.constexpr):  # fmt: skip
    """Forgets which rows of a prefix's tile a request has."""
    first = (0 * unit[0] + tl.load(PREFIXES[0] + tl.load(UNITS + u * UNIT + 7) * UNIT), *unit[1:])
    return triton_prefixes.parts_of_prefix(PREFIXES, UNITS, u, first, hk, rows_q, batch, HEADS_KV, GROUP, PREFIX_TILE)


@triton.jit
def but_one(PREFIXES, UNITS, u, unit, hk, rows_q, batch, HEADS_KV: tl.constexpr, GROUP: tl.constexpr,
            PREFIX_TILE: tl.constexpr):  # fmt: skip
    """Forgets a prefix's last part."""
    shared, row = triton_prefixes.parts_of_prefix(
        PREFIXES, UNITS, u, unit, hk, rows_q, batch, HEADS_KV, GROUP, PREFIX_TILE
    )
    return tl.maximum(shared - 1, 0), row


@triton.jit
def one_behind(batch, of_request, HEADS_KV: tl.constexpr, PREFIX_TILE: tl.constexpr):
    """Looks for a request's own parts where others lie."""
    return triton_prefixes.room_of_prefixes(batch, of_request, HEADS_KV, PREFIX_TILE) * 0


@pytest.mark.parametrize(
    ("name", "broken"),
    [("parts_of_prefix", of_the_first), ("parts_of_prefix", but_one), ("room_of_prefixes", one_behind)],
)
def test_a_wrong_merge_is_noticed(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(monkeypatch, 20)
    monkeypatch.setattr(triton_parts, name, broken)
    keys, common = BATCHES["two_groups"]
    keys, common = [*keys, 500], [*common, 0]
    with pytest.raises(AssertionError):
        shared_prefixes_hold_the_keys(PAGED, case_of(keys), common)
