"""Attention over pages on a GPU: the properties that the CPU path faces, pools beyond 2**31 elements, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.paging import DTYPES, LARGE, PAGED_CASES, decoding
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.graphs import captured
from tilewise.testing.properties import Setting

IMPL = "triton_paged"


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
            torch.testing.assert_close(results[0][r : r + 1], want, rtol=2e-2, atol=2e-3)


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
