"""Attention over pages on a GPU: the properties that the CPU path faces, pools beyond 2**31 elements, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.paging import DTYPES, LARGE, PAGED_CASES, decoding
from tilewise.core.errors import InputError
from tilewise.quant import KINDS, encode
from tilewise.testing import properties, serving
from tilewise.testing.case import Case
from tilewise.testing.cases import causal
from tilewise.testing.graphs import captured
from tilewise.testing.properties import Setting

IMPL = "triton_paged"


def test_tensors_that_start_elsewhere_are_refused() -> None:
    """Kernels that were planned for 16-byte rows are not given others; those planned for any take all."""
    q, (k, v), layout = decoding([40, 700])
    moved = torch.empty(k.numel() + 1, dtype=k.dtype, device=k.device)[1:].view(k.shape).copy_(k)
    plan = tw.plan(q, k, v, layout=layout, impl=IMPL)
    with pytest.raises(InputError, match="k: got a data_ptr\\(\\) that is not a multiple of 16 bytes"):
        plan.run(q, moved, v)
    want = plan.run(q, k, v)
    plan = tw.plan(q, moved, v, layout=layout, impl=IMPL)
    assert torch.equal(plan.run(q, moved, v), want)
    assert torch.equal(plan.run(q, k, v), want)


# a sample of formulas: the other GPU tests and the interpreter have them all
@pytest.mark.parametrize("case", PAGED_CASES[::2], ids=repr)
def test_pages_hold_the_keys(case: Case) -> None:
    dtype = DTYPES[sum(map(ord, case.name)) % len(DTYPES)]
    if "undefined" in case.name:
        dtype = torch.float32
    properties.pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, (1, 16, 7)[len(case.name) % 3])


@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.bfloat16), (5, torch.float16), (64, torch.float32)])
@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_large_cases(case: Case, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, page_size, flat=page_size in (5, 64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["decode", "chunk", "mixed"])
def test_codes_hold_the_keys(name: str, kind: str) -> None:
    """Of all kinds in bfloat16, and of one in float16, whose small numbers are few."""
    case = next(case for case in LARGE if case.name == name)
    dtype = torch.float16 if (name, kind) == ("mixed", "int8") else torch.bfloat16
    properties.encoded_pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, kind, 5 if name == "mixed" else 16)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", ["decode", "chunk", "mixed"])
def test_keys_by_channel(name: str, bits: int) -> None:
    """Pages of several tiles and tiles of several pages, the last page of a request open."""
    case = next(case for case in LARGE if case.name == name)
    dtype = torch.float16 if (name, bits) == ("mixed", 4) else torch.bfloat16
    for page_size in (5, 64, 128):
        setting, kind = Setting(IMPL, dtype, DEVICE), "int4" if bits == 4 else "int8"
        properties.encoded_pages_hold_the_keys(setting, case, kind, page_size, bits=bits)


@pytest.mark.parametrize("impl", [IMPL, "hopper_decode"])
def test_one_graph_serves_other_lengths_of_encoded_pages(impl: str) -> None:
    q, pool, layout = decoding([1000, 900, 800, 1000])
    k, v = (encode(x.nan_to_num(), "int8") for x in pool)
    assert tw.why(q, k, v, layout=layout).chosen == "hopper_decode"
    torch.cuda.synchronize()
    graph, results = captured(lambda: tw.attention_with_lse(q, k, v, layout=layout, mask=tw.causal, impl=impl))
    layout.seqlens_k.copy_(torch.tensor([1, 0, 700, 65]))
    graph.replay()
    want = tw.attention_with_lse(q, k, v, layout=layout, mask=tw.causal, impl="reference")
    for got, expected in zip(results, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


def test_tables_and_lengths_may_start_anywhere() -> None:
    """Kernels that were compiled for aligned pointers are not given others."""
    q, pool, layout = decoding([500, 1, 700, 3, 63, 64, 65, 9, 100])
    assert isinstance(layout.block_table, torch.Tensor)
    want = tw.attention(q, *pool, layout=layout)
    for start in range(1, 5):
        shifted = [torch.empty(x.numel() + start, dtype=torch.int32, device=DEVICE)[start:].view(x.shape)
                   for x in (layout.block_table, layout.seqlens_k, layout.cu_seqlens_q)]  # fmt: skip
        for x, like in zip(shifted, (layout.block_table, layout.seqlens_k, layout.cu_seqlens_q), strict=True):
            x.copy_(like)
        assert torch.equal(want, tw.attention(q, *pool, layout=tw.Paged(*shifted)))
        few = [x[start:] for x in (layout.block_table, layout.seqlens_k)]
        rows = q[start:, None].contiguous()
        some = tw.attention(rows, *pool, layout=tw.Paged(*few))[:, 0]  # divided otherwise among programs
        torch.testing.assert_close(some, want[start:], rtol=2e-2, atol=2e-3)


def test_repeats_give_the_same_bits() -> None:
    q, pool, layout = decoding([5000, 1, 700, 0, 63, 64, 65])
    first = tw.attention_with_lse(q, *pool, layout=layout)
    for _ in range(250):
        again = tw.attention_with_lse(q, *pool, layout=layout)
        assert all(map(torch.equal, first, again))


def test_one_graph_serves_other_lengths_and_pages() -> None:
    """Captured for eight requests of up to 1,024 tokens; replayed with others, with fewer, and with empty ones."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    pool = [torch.randn(600, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.zeros(8, 64, dtype=torch.int32, device=DEVICE)
    seqlens = torch.ones(8, dtype=torch.int32, device=DEVICE)
    q = torch.randn(8, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    layout = tw.Paged(table, seqlens)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return tw.attention_with_lse(q, *pool, layout=layout, mask=tw.causal)

    graph, results = captured(step)
    for lengths in ([1024] * 8, [1, 0, 500, 1000, 17, 0, 0, 0], [64, 65, 63, 1, 2, 3, 900, 128]):
        table.copy_(torch.randperm(600, generator=generator)[: 8 * 64].view(8, 64))
        seqlens.copy_(torch.tensor(lengths))
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, step()))
        for r, n in enumerate(lengths):
            k, v = (x[table[r].long()].flatten(0, 1)[None, :n] for x in pool)
            want = tw.attention(q[r : r + 1], k, v, impl="reference") if n else torch.zeros_like(q[:1])
            # weights and the result are rounded once each, to half of eps of what they add up at most
            most = tw.attention(q[r : r + 1], k, v.abs(), impl="reference") if n else want
            apart = (results[0][r : r + 1].double() - want.double()).abs()
            assert (apart <= torch.finfo(torch.bfloat16).eps * most.double()).all()


@pytest.mark.parametrize("impl", ["triton_paged", "hopper_decode"])
def test_one_plan_serves_all_layers_of_a_graph(impl: str) -> None:
    """Planned once in each replay, and run in three layers, for lengths whose shares are one piece or several."""
    generator = torch.Generator().manual_seed(0)
    pools = [[torch.randn(9000, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)] for _ in range(3)]
    table = torch.zeros(8, 8192, dtype=torch.int32, device=DEVICE)
    seqlens = torch.ones(8, dtype=torch.int32, device=DEVICE)
    q = torch.randn(8, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"layout": tw.Paged(table, seqlens), "mask": tw.causal, "impl": impl}
    plan = tw.plan(q, *pools[0], **arguments)

    def step() -> tuple[torch.Tensor, ...]:
        plan.update()
        return tuple(plan.run(q, *pool) for pool in pools)

    graph, results = captured(step)
    uneven = [[120_000, 0, 500, 1000, 17, 0, 0, 0], [30_000, 1, 8000, 900, 128, 0, 1, 131_072]]
    for lengths in ([1024] * 8, uneven[0], [1] * 8, uneven[1]):
        table.copy_(torch.randint(9000, table.shape, generator=generator))
        seqlens.copy_(torch.tensor(lengths))
        q.normal_()
        for _ in range(2):
            graph.replay()
            assert plan._prepared._memory.arrived.eq(0).all()  # type: ignore[union-attr, attr-defined]
            assert all(map(torch.equal, results, (tw.attention(q, *pool, **arguments) for pool in pools)))


@pytest.mark.parametrize("impl", ["triton_paged", "hopper_decode"])
def test_many_runs_of_one_plan_give_the_same_bits(impl: str) -> None:
    q, pool, layout = decoding([100_000, 1, 7000, 0, 63, 64, 65])
    plan = tw.plan(q, *pool, layout=layout, impl=impl)
    want = tw.attention_with_lse(q, *pool, layout=layout, impl=impl)
    for _ in range(500):
        assert all(map(torch.equal, want, plan.run_with_lse(q, *pool)))


@pytest.mark.parametrize("impl", ["hopper", "hopper_decode", "triton_paged"])
def test_a_run_is_a_call(impl: str) -> None:
    for case in LARGE:
        if case.name in ("verify", "chunk", "mixed"):
            serving.a_run_is_a_call(Setting(impl, torch.bfloat16, DEVICE), case, 16)


@pytest.mark.parametrize("mine", [(1, 30_000), (5, 2500), (700, 3000)])
def test_other_requests_change_nothing(mine: tuple[int, int]) -> None:
    """Alone, first, in the middle and last, with pages of other sizes; by default they do change some bits."""
    case = Case("mine", packed=(mine,), heads_q=8, heads_kv=2, head_dim=128, head_dim_v=128, mask=causal, sink=True)
    others = [(1, 70_000), (300, 4097), (0, 9), (1, 1), (1, 0), *[(1, 2048)] * 40]
    setting = Setting(IMPL, torch.bfloat16, DEVICE)
    alone = serving.among_others(setting, case, [], 0, 16, batch_invariant=True)
    for place, page_size in ((0, 16), (3, 1), (len(others), 128)):
        got = serving.among_others(setting, case, others, place, page_size, batch_invariant=True)
        properties.same_bits(got, alone, f"place {place}, pages of {page_size}")
    alone, got = (serving.among_others(setting, case, batch, 0, 16) for batch in ([], others))
    with pytest.raises(AssertionError, match="differs"):
        properties.same_bits(got, alone, "by default")


def test_a_replayed_graph_changes_nothing() -> None:
    """Planned and run in two layers of a graph, with other requests in each replay."""
    generator = torch.Generator().manual_seed(0)
    pool = [torch.randn(2000, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.randint(2000, (8, 2000), generator=generator).int().to(DEVICE)
    seqlens = torch.ones(8, dtype=torch.int32, device=DEVICE)
    q = torch.randn(8, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"mask": tw.causal, "batch_invariant": True}
    plan = tw.plan(q, *pool, layout=tw.Paged(table, seqlens), **arguments)

    def step() -> tuple[torch.Tensor, ...]:
        plan.update()
        return plan.run(q, *pool), plan.run(-q, *pool)

    graph, results = captured(step)
    one = tw.Paged(table[5:6].clone(), torch.tensor([20_000], dtype=torch.int32, device=DEVICE))
    want = [tw.attention(x, *pool, layout=one, **arguments) for x in (q[5:6], -q[5:6])]
    for lengths in ([20_000] * 8, [1, 0, 32_000, 17, 5000, 20_000, 0, 3], [0] * 5 + [20_000, 0, 0]):
        seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        assert all(torch.equal(x[5:6], y) for x, y in zip(results, want, strict=True))


def test_plans_wait_for_nothing() -> None:
    q, pool, layout = decoding([100, 200])
    tw.plan(q, *pool, layout=layout).run(q, *pool)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = tw.plan(q, *pool, layout=layout)
        plan.update()
        plan.run(q, *pool)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    pages, page_size = 140_000, 16
    pool = [torch.empty(pages, page_size, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    assert pool[0].numel() > 2**31
    small = [torch.randn(10, page_size, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    for x, few in zip(pool, small, strict=True):
        x[-10:] = few
    q = torch.randn(1, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    seqlens = torch.tensor([150], dtype=torch.int32, device=DEVICE)
    table = torch.arange(10, dtype=torch.int32, device=DEVICE)[None]
    got = tw.attention(q, *pool, layout=tw.Paged(table + pages - 10, seqlens))
    assert torch.equal(got, tw.attention(q, *small, layout=tw.Paged(table, seqlens)))


def test_plain_calls_wait_for_nothing() -> None:
    """Neither a plan nor a check reads a value back from the GPU."""
    q, pool, layout = decoding([100, 200])
    tw.attention(q, *pool, layout=layout, mask=tw.causal)
    torch.cuda.synchronize()
    assert isinstance(layout.block_table, torch.Tensor)
    fresh = tw.Paged(layout.block_table.clone(), layout.seqlens_k.clone(), layout.cu_seqlens_q)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            tw.attention(q, *pool, layout=fresh, mask=tw.causal)
        finally:
            torch.cuda.set_sync_debug_mode("default")
