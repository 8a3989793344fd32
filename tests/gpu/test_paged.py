"""Attention over pages on a GPU: the properties that the CPU path faces, pools beyond 2**31 elements, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.test_attention_runtime import captured
from tilewise.quant import KINDS, encode
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CPU_CASES, alibi, causal, softcap, window
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting

IMPL = "triton_paged"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAGED_CASES = [case for case in CPU_CASES if case.memory == "dense" and not case.dropout]
FORMULAS = [case for case in PAGED_CASES if (case.mask or case.score) and "undefined" not in case.name]
LARGE = [
    Case("decode", batch=9, seqlen_q=1, seqlen_k=3000, heads_q=32, heads_kv=8, head_dim=128, head_dim_v=128),
    Case("decode_window", batch=5, seqlen_q=1, seqlen_k=3000, heads_q=8, heads_kv=8, head_dim=64, head_dim_v=64,
         mask=window(700)),
    Case("verify", batch=4, seqlen_q=6, seqlen_k=2000, heads_q=16, heads_kv=2, head_dim=128, head_dim_v=128,
         mask=causal, score=softcap),
    Case("chunk", batch=2, seqlen_q=500, seqlen_k=1300, heads_q=8, heads_kv=2, head_dim=128, head_dim_v=128,
         mask=causal, score=alibi),
    Case("wide", batch=3, seqlen_q=2, seqlen_k=700, heads_q=8, heads_kv=1, head_dim=256, head_dim_v=256, mask=causal),
    Case("wider", batch=3, seqlen_q=2, seqlen_k=300, heads_q=4, heads_kv=1, head_dim=512, head_dim_v=512, mask=causal),
    Case("mixed", packed=((1, 900), (700, 700), (0, 40), (1, 1), (5, 2100), (1, 0), (64, 65)), heads_q=12, heads_kv=4,
         head_dim=128, head_dim_v=128, mask=causal, sink=True),
]  # fmt: skip


@pytest.mark.parametrize("case", PAGED_CASES, ids=repr)
def test_pages_hold_the_keys(case: Case) -> None:
    dtype = DTYPES[sum(map(ord, case.name)) % len(DTYPES)]
    if "undefined" in case.name:
        dtype = torch.float32
    properties.pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, (1, 16, 7)[len(case.name) % 3])


@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.bfloat16), (5, torch.float16), (64, torch.float32)])
@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_large_cases(case: Case, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, page_size, flat=page_size in (5, 64))


@pytest.mark.parametrize(
    ("impl", "page_size", "dtype"),
    [("hopper", 16, torch.float16), ("hopper", 32, torch.bfloat16), ("hopper", 384, torch.bfloat16),
     ("hopper_decode", 1, torch.bfloat16), ("hopper_decode", 5, torch.float16), ("hopper_decode", 64, torch.bfloat16)],
)  # fmt: skip
@pytest.mark.parametrize("case", [case for case in LARGE if case.head_dim <= 256], ids=repr)
def test_large_cases_on_hopper(case: Case, impl: str, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting(impl, dtype, DEVICE), case, page_size, flat=page_size in (5, 64, 384))


@pytest.mark.parametrize("case", FORMULAS, ids=repr)
def test_formulas_on_hopper(case: Case) -> None:
    wide = case.with_(head_dim=80, head_dim_v=96)
    properties.pages_hold_the_keys(Setting("hopper_decode", torch.float16, DEVICE), wide, 7)


@pytest.mark.parametrize("group", [1, 2, 8, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_and_shares_on_hopper(head_dim: int, group: int) -> None:
    """Empty requests, ones of a key, shares of one tile and ones that are divided further."""
    short = tuple((1, n) for n in (0, 1, 127, 128, 129, 0, 1000))
    long = ((1, 40_000), (1, 150_000), (2, 3))
    for packed in (short, long):
        case = Case("groups", packed=packed, heads_q=2 * group, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim)
        properties.pages_hold_the_keys(Setting("hopper_decode", torch.bfloat16, DEVICE), case, 16)


def test_keys_that_copies_of_16_bytes_cannot_reach() -> None:
    """Other strides are refused, and what starts elsewhere is read by the portable kernel."""
    q, pool, layout = _decode([500, 1, 700])
    want = tw.attention(q, *pool, layout=layout, impl="triton_paged")
    for start in (1, 4):
        moved = [
            torch.empty(x.numel() + 8, dtype=x.dtype, device=DEVICE)[start:][: x.numel()].view(x.shape) for x in pool
        ]
        for x, like in zip(moved, pool, strict=True):
            x.copy_(like)
        torch.testing.assert_close(tw.attention(q, *moved, layout=layout, impl="hopper_decode"), want, rtol=0, atol=0)
    apart = [torch.zeros(*x.shape[:2], 8, 136, dtype=x.dtype, device=DEVICE)[..., :128].copy_(x) for x in pool]
    with pytest.raises(tw.UnsupportedError, match="multiples of 16 elements"):
        tw.attention(q, *apart, layout=layout, impl="hopper_decode")
    torch.testing.assert_close(tw.attention(q, *apart, layout=layout), want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("mask", [None, causal, window(100)], ids=["full", "causal", "window"])
def test_lengths_around_pages_on_hopper(mask: Any, head_dim: int) -> None:
    """What lies behind the last key of a page is NaN, in K and in V."""
    ends = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 257, 300, 1000)
    packed = tuple((max(0, n - 40), n) for n in ends)
    case = Case("ends", packed=packed, heads_q=4, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim, mask=mask)
    for page_size in (16, 64, 256):
        for impl in ("hopper", "hopper_decode"):
            properties.pages_hold_the_keys(Setting(impl, torch.bfloat16, DEVICE), case, page_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["decode", "chunk", "mixed"])
def test_codes_hold_the_keys(name: str, kind: str) -> None:
    """Of all kinds in bfloat16, and of one in float16, whose small numbers are few."""
    case = next(case for case in LARGE if case.name == name)
    dtype = torch.float16 if (name, kind) == ("mixed", "int8") else torch.bfloat16
    properties.encoded_pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, kind, 5 if name == "mixed" else 16)


def test_one_graph_serves_other_lengths_of_encoded_pages() -> None:
    """On the row that is chosen unasked, which waits for nothing."""
    q, pool, layout = _decode([1000, 900, 800, 1000])
    k, v = (encode(x.nan_to_num(), "int8") for x in pool)
    assert tw.why(q, k, v, layout=layout).chosen == IMPL
    torch.cuda.synchronize()
    graph, results = captured(lambda: tw.attention_with_lse(q, k, v, layout=layout, mask=tw.causal))
    layout.seqlens_k.copy_(torch.tensor([1, 0, 700, 65]))
    graph.replay()
    want = tw.attention_with_lse(q, k, v, layout=layout, mask=tw.causal, impl="reference")
    for got, expected in zip(results, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


def _decode(
    lengths: list[int], page_size: int = 16
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], tw.Paged]:
    case = Case("decode", packed=tuple((1, n) for n in lengths), heads_q=32, heads_kv=8, head_dim=128, head_dim_v=128)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    pool = paged(inputs, page_size)
    return inputs.q.detach(), (pool.k, pool.v), pool.layout


def test_tables_and_lengths_may_start_anywhere() -> None:
    """Kernels that were compiled for aligned pointers are not given others."""
    q, pool, layout = _decode([500, 1, 700, 3, 63, 64, 65, 9, 100])
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
    q, pool, layout = _decode([5000, 1, 700, 0, 63, 64, 65])
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
    q, pool, layout = _decode([100, 200])
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
