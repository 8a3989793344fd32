"""Prefixes that requests share, in the interpreter: any groups and number of programs, and a plan like the host's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.ops.attention import triton_launch, triton_paged, triton_parts, triton_prefixes
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.sharing import bytes_of, requests_of_tile, unshared
from tilewise.ops.attention.triton_work import UNIT
from tilewise.quant import encode
from tilewise.schedule.sharing import common_tiles, groups_of
from tilewise.schedule.worklist import WorkList
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


@settings(max_examples=40, deadline=None)
@given(requests=GROUPINGS, page_size=st.integers(1, 40), queries=st.integers(1, 4), group=st.integers(1, 6))
@example(requests=[(700, 0), (700, 140), (700, 600)], page_size=16, queries=1, group=1)
@example(requests=[(700, 0), (700, 600), (700, 140)], page_size=16, queries=1, group=1)
@example(requests=[(700, 0)] + [(700, 600)] * 6, page_size=1, queries=4, group=4)
@example(requests=[(700, 0)] + [(700, 130)] * 2, page_size=16, queries=1, group=32)  # costs more than it saves
@example(requests=[(700, 0)] + [(700, 130)] * 3, page_size=16, queries=1, group=32)  # does not
def test_the_device_plans_as_the_host(
    requests: list[tuple[int, int]], page_size: int, queries: int, group: int
) -> None:
    keys, common = [n for n, _ in requests], [0, *(n for _, n in requests[1:])]
    case = case_of(keys, queries, heads_q=2 * group)
    call = call_of(alike(PAGED, case, common, page_size))
    assert unshared(call) is None
    assert call.pages is not None
    rows, block_n = triton_paged._tile(call)
    work, _ = triton_paged._plans(call)
    memory = work.memory(call)
    memory.arrived.fill_(7)
    work.launch(call, memory)
    assert memory.arrived.eq(0).all()
    assert memory.common is not None
    tables = call.pages.table.tolist()
    tables = [table[: -(-n // page_size)] for table, n in zip(tables, keys, strict=True)]
    tiles = common_tiles(tables, keys, queries, page_size, block_n)
    assert memory.common.tolist() == tiles
    token, part = bytes_of(call)
    together = requests_of_tile(call)
    assert together * queries * group <= rows < 2 * together * queries * group
    groups = groups_of(tiles, together=together, tile_bytes=token * block_n, part_bytes=part)
    want = WorkList.build(
        [queries] * len(keys), keys, heads_q=2 * group, heads_kv=2, programs=3, rows=rows, block_n=block_n,
        groups=groups, together=together,
    )  # fmt: skip
    count = len(want.request)
    assert count <= work.slots
    units = memory.units.view(-1, UNIT.value).numpy()
    for column, name in ((0, "request"), (1, "tile"), (2, "begin"), (3, "count"), (7, "prefix")):
        assert np.array_equal(units[:count, column], getattr(want, name)), name
    assert (units[count:, 3] == 1).all()
    before = np.append(0, np.cumsum(want.count))
    assert np.array_equal(memory.before.numpy()[: count + 1], before)
    assert (memory.before.numpy()[count:] == before[-1]).all()


def test_pages_that_agree_again_are_not_shared() -> None:
    """Behind the first page that is another's, and after 4,096 pages."""
    for different, tiles in ((9, 1), (4095, 511), (4096, 512)):
        table = torch.arange(5000, dtype=torch.int32).repeat(3, 1)
        table[1, different] = 5000
        pool = [torch.zeros(5001, 16, 1, 16)] * 2
        layout = tw.Paged(table, torch.full((3,), 80_000, dtype=torch.int32), share_prefixes=True)
        call = make_call(torch.zeros(3, 1, 1, 16), *pool, layout=layout)
        work, _ = triton_paged._plans(call)
        memory = work.memory(call)
        work.launch(call, memory)
        assert memory.common is not None
        assert memory.common.tolist() == [0, tiles, tiles]


def test_why_says_what_is_shared() -> None:
    batch = alike(PAGED, case_of([300, 300]), [0, 300])
    with torch.no_grad():
        found = tw.why(batch.q, batch.k, batch.v, impl="triton_paged", **batch.arguments)
    assert "; shares prefixes of neighbours, 8 requests to a tile" in str(found)


def test_a_prefix_is_read_by_few() -> None:
    """Of 16 requests of 4 rows, one tile; where each has 32, each two."""
    for heads, tiles in ((8, 1), (64, 8)):
        call = call_of(alike(PAGED, case_of([300] * 16, heads_q=heads), [0] + [280] * 15))
        work, _ = triton_paged._plans(call)
        memory = work.memory(call)
        work.launch(call, memory)
        units = memory.units.view(-1, UNIT.value)
        assert int((units[:, 7] == -1).sum()) == tiles
        assert units[1:2, 2:4].tolist() == [[2, 1]]


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
def of_the_first(n, b, hk, parts, room, HEADS_KV: tl.constexpr, BLOCK_R: tl.constexpr):
    """Forgets which rows of a prefix's tile a request has."""
    return triton_prefixes.first_rows(n, b, hk, (1, parts[1], parts[2], parts[3], parts[4]), room, HEADS_KV, BLOCK_R)


@triton.jit
def with_prefix_of_all(u, hk, UNITS, BEFORE, split, HEADS_KV: tl.constexpr):
    """Forgets that some requests share nothing."""
    prefix, first, count, own, owns = triton_prefixes.parts_of_request(u, hk, UNITS, BEFORE, split, HEADS_KV)
    return prefix, first, tl.maximum(count, 1), own, owns


@pytest.mark.parametrize(("name", "broken"), [("first_rows", of_the_first), ("parts_of_request", with_prefix_of_all)])
def test_a_wrong_merge_is_noticed(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(monkeypatch, 20)
    monkeypatch.setattr(triton_parts, name, broken)
    keys, common = BATCHES["two_groups"]
    keys, common = [*keys, 500], [*common, 0]
    with pytest.raises(AssertionError):
        shared_prefixes_hold_the_keys(PAGED, case_of(keys), common)
