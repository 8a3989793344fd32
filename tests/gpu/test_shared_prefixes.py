"""Prefixes that requests share, computed once: any groups, graphs with other groups, and the same bits at each run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.ops.attention import gluon_decode, triton_paged
from tilewise.ops.triton_launch import Plans
from tilewise.quant import encode
from tilewise.schedule.sharing import programs_of_lines
from tilewise.testing.case import Case
from tilewise.testing.cases import causal, softcap
from tilewise.testing.graphs import captured
from tilewise.testing.properties import Setting
from tilewise.testing.sharing import Batch, alike, shared_prefixes_hold_the_keys

IMPLS = ("triton_paged", "hopper_decode")
GROUPS = (  # keys of each request, and how many first ones are those of the request before
    ([2000 + n for n in range(9)], [0] + [1999] * 8),
    ([900, 910, 890, 0, 1400, 1390, 1650, 1, 64, 64, 300], [0, 880, 880, 0, 0, 1380, 1380, 0, 0, 64, 0]),
    ([700, 710, 720, 800, 790, 750], [0, 690, 690, 140, 700, 700]),
    ([300] * 37, [0] + [290] * 36),
)


def case_of(keys: list[int], queries: int = 1, **changes: Any) -> Case:
    sizes = {"heads_q": 8, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128} | changes
    return Case("shared", packed=tuple((queries, n) for n in keys), **sizes)


def many(batch: int = 32, prefix: int = 3000) -> Batch:
    """Requests of 32 heads on 8 with a long prefix in common, in bfloat16."""
    case = case_of([prefix + 7 * n for n in range(batch)], heads_q=32, heads_kv=8)
    return alike(Setting("hopper_decode", torch.bfloat16, DEVICE), case, [0] + [prefix] * (batch - 1))


def close(got: tuple[torch.Tensor, ...], batch: Batch, **changed: Any) -> None:
    want = tw.attention_with_lse(batch.q, batch.k, batch.v, impl="reference", **batch.arguments | changed)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("groups", GROUPS, ids=["one", "several", "side_by_side", "many"])
@pytest.mark.parametrize("impl", IMPLS)
def test_shared_prefixes_hold_the_keys(
    impl: str, groups: tuple[list[int], list[int]], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the whole GPU, and on few programs, of which each does many rows, in pieces."""
    setting = Setting(impl, torch.bfloat16, DEVICE)
    shared_prefixes_hold_the_keys(setting, case_of(groups[0]), groups[1], page_size, flat=page_size == 1)
    for module in (triton_paged, gluon_decode):
        monkeypatch.setattr(module, "_PLANS", Plans())
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    shared_prefixes_hold_the_keys(setting, case_of(groups[0]), groups[1], page_size)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (1, 7), (3, 4), (4, 4), (5, 3)])
@pytest.mark.parametrize("impl", IMPLS)
def test_groups_and_queries(impl: str, queries: int, group: int, head_dim: int) -> None:
    keys, common = GROUPS[1]
    changes = {"heads_q": 2 * group, "head_dim": head_dim, "head_dim_v": head_dim, "sink": group == 7}
    case = case_of(keys, queries, mask=causal, score=softcap if queries == 3 else None, **changes)
    shared_prefixes_hold_the_keys(Setting(impl, torch.float16, DEVICE), case, common)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_codes(kind: str) -> None:
    batch = many(8, 1000)
    k, v = (encode(x.nan_to_num(), kind) for x in (batch.k, batch.v))
    assert "; shares prefixes" in str(tw.why(batch.q, k, v, **batch.arguments))
    got = tw.attention_with_lse(batch.q, k, v, impl="triton_paged", **batch.arguments)
    close(got, batch._replace(k=k, v=v))  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", IMPLS)
def test_runs_of_one_plan_give_the_same_bits(impl: str) -> None:
    """Whoever happens to merge; and counters are 0 in between."""
    batch = many()
    want = tw.attention_with_lse(batch.q, batch.k, batch.v, impl=impl, **batch.arguments)
    close(want, batch)
    plan = tw.plan(batch.q, batch.k, batch.v, impl=impl, **batch.arguments)
    for _ in range(300):
        assert all(map(torch.equal, want, plan.run_with_lse(batch.q, batch.k, batch.v)))
        assert all(
            map(torch.equal, want, tw.attention_with_lse(batch.q, batch.k, batch.v, impl=impl, **batch.arguments))
        )
    assert plan._prepared._memory.arrived.eq(0).all()  # type: ignore[union-attr, attr-defined]


def test_few_keys_of_requests_are_read_meanwhile() -> None:
    """On multiprocessors that prefixes leave free, merged by all, and with the same bits at each run."""
    batch = many(8)
    plan = tw.plan(batch.q, batch.k, batch.v, impl="hopper_decode", **batch.arguments)
    memory = plan._prepared._memory  # type: ignore[union-attr, attr-defined]
    (*_, tiles, of_prefixes), (*_, own, of_own) = memory.prefixes[1].tolist(), memory.before.tolist()
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    assert (of_prefixes, of_own) == programs_of_lines(
        8 * tiles, 8 * own, prefix_n=128, block_n=64, programs=programs, own_programs=2 * programs, meanwhile=True
    )
    assert 0 < of_own == 2 * (programs - of_prefixes)
    want = plan.run_with_lse(batch.q, batch.k, batch.v)
    close(want, batch)
    for _ in range(100):
        assert all(map(torch.equal, want, plan.run_with_lse(batch.q, batch.k, batch.v)))
    assert memory.arrived.eq(0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_one_graph_serves_other_groups(impl: str) -> None:
    """Planned once in each replay and run in two layers: other pages, lengths and groups, none, and empty requests."""
    generator = torch.Generator().manual_seed(0)
    pools = [[torch.randn(4000, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)]
    table = torch.zeros(16, 400, dtype=torch.int32, device=DEVICE)
    seqlens = torch.ones(16, dtype=torch.int32, device=DEVICE)
    q = torch.randn(16, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    layout = tw.Paged(table, seqlens, share_prefixes=True)
    arguments: dict[str, Any] = {"layout": layout, "mask": tw.causal, "impl": impl}
    plan = tw.plan(q, *pools[0], **arguments)

    def step() -> tuple[torch.Tensor, ...]:
        plan.update()
        return tuple(plan.run(q, *pool) for pool in pools)

    graph, results = captured(step)
    ends = [[6400] * 16, [5000 + 3 * n for n in range(16)], [0, 1, 6400, 3000] * 4, [17] * 16]
    for lengths, groups in zip(ends, ([16], [4, 12], [1] * 16, [2, 14]), strict=True):
        pages = torch.randint(4000, table.shape, generator=generator)
        first = 0
        for count in groups:
            pages[first : first + count, :280] = pages[first, :280].clone()
            first += count
        table.copy_(pages)
        seqlens.copy_(torch.tensor(lengths))
        q.normal_()
        for _ in range(2):
            graph.replay()
            assert plan._prepared._memory.arrived.eq(0).all()  # type: ignore[union-attr, attr-defined]
            assert all(map(torch.equal, results, (tw.attention(q, *pool, **arguments) for pool in pools)))
        plain = arguments | {"layout": replace(layout, share_prefixes=False)}
        for got, pool in zip(results, pools, strict=True):
            torch.testing.assert_close(got, tw.attention(q, *pool, **plain), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("impl", "together", "tile", "prefix_tile"), [("triton_paged", 16, 128, 64), ("hopper_decode", 32, 64, 128)]
)
def test_a_prefix_is_read_once(impl: str, together: int, tile: int, prefix_tile: int) -> None:
    """A unit for each request, behind 2,944 keys, and in a line before one for as many of them as fit a tile."""
    batch = many(32, 3000)
    plan = tw.plan(batch.q, batch.k, batch.v, impl=impl, **batch.arguments)
    memory = plan._prepared._memory  # type: ignore[union-attr, attr-defined]
    units, prefixes, before = memory.units.view(-1, 8), memory.prefixes[0].view(-1, 8), memory.prefixes[1]
    first = list(range(0, 32, together))
    assert units[:32, 7].tolist() == [n // together for n in range(32)]
    assert units[:32, 2].eq(2944 // tile).all()
    assert prefixes[: len(first), 0].tolist() == first
    assert prefixes[: len(first), 3].eq(2944 // prefix_tile).all()
    assert before[len(first) : -1].eq(len(first) * 2944 // prefix_tile).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_where_nothing_is_shared_nothing_changes(impl: str) -> None:
    """The same tiles, and so the same bits, as without."""
    case = case_of([2000 + 7 * n for n in range(40)], heads_q=32, heads_kv=8)
    batch = alike(Setting(impl, torch.bfloat16, DEVICE), case, [0] * 40)
    plain = batch.arguments | {"layout": replace(batch.arguments["layout"], share_prefixes=False)}
    got, want = (
        tw.attention_with_lse(batch.q, batch.k, batch.v, impl=impl, **arguments)
        for arguments in (batch.arguments, plain)
    )
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_waits(impl: str) -> None:
    batch = many(4, 500)
    tw.plan(batch.q, batch.k, batch.v, impl=impl, **batch.arguments).run(batch.q, batch.k, batch.v)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = tw.plan(batch.q, batch.k, batch.v, impl=impl, **batch.arguments)
        plan.update()
        plan.run(batch.q, batch.k, batch.v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
