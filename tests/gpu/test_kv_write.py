"""Writing into pages on a GPU: the properties of other tiers, pools beyond 2**31 elements, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.core.errors import InputError
from tilewise.kv import KVCache
from tilewise.quant import KINDS, decode
from tilewise.testing import writing
from tilewise.testing.graphs import captured
from tilewise.testing.properties import Setting
from tilewise.testing.writing import (
    BY_NAME,
    CASES,
    CHANNEL_CASES,
    CHANNEL_ROPE_CASES,
    ENCODED_ROPE_CASES,
    ROPE_CASES,
    RopeCase,
    WriteCase,
)

SETTINGS = [Setting("triton", dtype, DEVICE) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
LARGE = [
    WriteCase("decode", tokens=64, heads=8, head_dim=128, head_dim_v=128, page_size=16, num_pages=500),
    WriteCase("prefill", tokens=5000, heads=8, head_dim=128, head_dim_v=128, page_size=16, num_pages=400, sliced=True),
    WriteCase("latent", tokens=700, heads=1, head_dim=512, head_dim_v=64, page_size=64, num_pages=20, memory="HND"),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_writes_where_told(setting: Setting, case: WriteCase) -> None:
    writing.writes_where_told(setting, case)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_copies_whole_pages(setting: Setting, case: WriteCase) -> None:
    writing.copies_whole_pages(setting, case)


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_where_told(kind: str) -> None:
    writing.encodes_where_told(SETTINGS[0], LARGE[1], kind)
    writing.copies_encoded_pages(SETTINGS[0], BY_NAME["joint"], kind)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("case", [*CHANNEL_CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_encodes_full_pages(setting: Setting, case: WriteCase, bits: int) -> None:
    """Tokens of the large cases are pages here: of thousands, programs look at a run of tokens each."""
    writing.encodes_full_pages(setting, replace(case, num_pages=min(case.num_pages, 100)), bits)


PREFILL = replace(LARGE[1], tokens=700, num_pages=60)
LARGE_ROPES = [
    RopeCase("decode", LARGE[0], 128),
    RopeCase("prefill", PREFILL, 128, joint=True),
    RopeCase("pairs", PREFILL, 64, interleaved=True, table=torch.bfloat16),
    RopeCase("latent", LARGE[2], 64, interleaved=True),
    RopeCase("pages_of_64", replace(LARGE[0], page_size=64, num_pages=40, skip=False), 96),
]


@pytest.mark.parametrize("rotary", [*ROPE_CASES, *LARGE_ROPES], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_rotates_where_told(setting: Setting, rotary: RopeCase) -> None:
    """Bit for bit as on a CPU: no product is left unrounded."""
    writing.rotates_where_told(setting, rotary)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", [*ENCODED_ROPE_CASES, *LARGE_ROPES[::2]], ids=repr)
def test_rotates_and_encodes_where_told(rotary: RopeCase, kind: str) -> None:
    writing.rotates_where_told(SETTINGS[0], rotary, kind)


@pytest.mark.parametrize("rotary", [*CHANNEL_ROPE_CASES, *LARGE_ROPES[::2]], ids=repr)
def test_rotates_before_pages_are_full(rotary: RopeCase) -> None:
    """Bit for bit as on a CPU."""
    case = replace(rotary.case, num_pages=min(rotary.case.num_pages, 40))
    writing.encodes_full_pages(SETTINGS[0], case, 4, rotary=rotary)


def test_ropes_do_not_share_a_plan() -> None:
    """With and without, of other widths, pairs and tables."""
    case = BY_NAME["all_slots"]
    for rotary in (*ROPE_CASES, *ROPE_CASES):
        writing.rotates_where_told(SETTINGS[0], replace(rotary, case=case, rotary_dim=min(rotary.rotary_dim, 16)))
        writing.writes_where_told(SETTINGS[0], case)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_graph_replays_with_other_positions(kind: str | None) -> None:
    rotary = ROPE_CASES[0]
    held, wanted = (
        writing.encoded_memory(rotary.case, SETTINGS[0], kind)
        if kind
        else writing.make_memory(rotary.case, SETTINGS[0])
        for _ in range(2)
    )
    k, v, slots = writing.make_tokens(rotary.case, SETTINGS[0])
    given = writing.make_rope(rotary, slots)
    rope = replace(given, positions=torch.zeros_like(given.positions))

    def step() -> tuple[torch.Tensor, ...]:
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots, rope=rope)
        return ()

    graph, _ = captured(step)
    rope.positions.copy_(given.positions)
    graph.replay()
    tw.kv_write(k, v, wanted.k_pages, wanted.v_pages, slots, rope=given)
    assert all(torch.equal(a, b) for a, b in zip(held.bits, wanted.bits, strict=True))


def test_a_step_of_an_encoded_cache() -> None:
    """Pages copied, tokens written and read, as the same cache has it on the CPU: codes bit for bit."""
    found, codes = [], []
    angle = torch.outer(torch.arange(64.0), 10_000.0 ** (-torch.arange(64) / 64))
    for device in (DEVICE, "cpu"):
        cache = KVCache(2, 40, 16, 8, 128, device=device, encoding="fp8")
        sequences = [cache.new() for _ in range(3)]
        cos, sin = (x.to(device) for x in (angle.cos(), angle.sin()))
        make = torch.Generator().manual_seed(0)
        for counts in ([40, 3, 17], [1, 1, 1], [1, 1, 1]):
            batch = cache.extend(sequences, counts)
            k, v = torch.randn(2, sum(counts), 8, 128, generator=make).to(device, torch.bfloat16)
            for layer in range(2):
                batch.write(layer, k, v, rope=tw.Rope(cos, sin, batch.positions))
            sequences[1] = cache.fork(sequences[0])[0]  # the next step copies a page
            q = torch.randn(sum(counts), 32, 128, generator=make).to(device, torch.bfloat16)
            o = tw.attention(q, *cache.pages(1), layout=batch.layout, mask=tw.causal)
            found.append(o.cpu())
        codes.append([x.cpu() for pages in cache.pages(1) for x in (pages.data.view(torch.uint8), pages.scale)])
    assert all(map(torch.equal, *codes))
    half = torch.finfo(torch.bfloat16).eps / 2  # weights are rounded before the product, and o after it
    largest = float(decode(cache.pages(1)[1]).abs().max())
    for got, want in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(got, want, rtol=2 * half, atol=2 * half * largest)


def test_steps_of_a_cache_of_keys_by_channel() -> None:
    """Pages filled, copied, cut and opened again, as the same cache has it on the CPU: all it holds bit for bit."""
    found, held = [], []
    for device in (DEVICE, "cpu"):
        cache = KVCache(2, 40, 16, 8, 128, device=device, encoding="int4", keys_by_channel=4, open_pages=4)
        sequences = [cache.new() for _ in range(3)]
        make = torch.Generator().manual_seed(0)
        for counts in ([40, 3, 17], [1, 13, 15], [9, 1, 40], [1, 1, 1]):
            batch = cache.extend(sequences, counts)
            k, v = torch.randn(2, sum(counts), 8, 128, generator=make).to(device, torch.bfloat16)
            for layer in range(2):
                batch.write(layer, k, v)
            q = torch.randn(sum(counts), 32, 128, generator=make).to(device, torch.bfloat16)
            found.append(tw.attention(q, *cache.pages(1), layout=batch.layout, mask=tw.causal).cpu())
            cache.free(sequences[1])
            sequences[1] = cache.fork(sequences[0])[0]  # the next step copies a page
            cache.truncate(sequences[2], sequences[2].length - 3)
        keys, values = cache.pages(1)
        rows = [x.view(torch.int16) for x in (keys.scale, keys.least, keys.open)]
        held.append([x.cpu() for x in (keys.data, *rows, keys.place, values.data, values.scale)])
    assert all(map(torch.equal, *held))
    for got, want in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    pages, page_size = 140_000, 16
    pool = [torch.zeros(pages, page_size, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    assert pool[0].numel() > 2**31
    k, v = (torch.randn(page_size, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.arange((pages - 1) * page_size, pages * page_size, device=DEVICE)
    tw.kv_write(k, v, *pool, slots)
    tw.copy_pages(*pool, torch.tensor([[pages - 1, pages - 3]], device=DEVICE))
    for x, want in zip(pool, (k, v), strict=True):
        assert torch.equal(x[-1], want)
        assert torch.equal(x[-3], want)
        assert not x[-2].any()
        assert not x[:10].any()


def test_a_graph_replays_with_other_slots() -> None:
    case = replace(BY_NAME["skips"], num_pages=50)
    held, wanted = (writing.make_memory(case, SETTINGS[0]) for _ in range(2))
    k, v, slots = writing.make_tokens(case, SETTINGS[0])
    slots.fill_(-1)

    def step() -> tuple[torch.Tensor, ...]:
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots)
        return ()

    graph, _ = captured(step)
    slots.copy_(torch.arange(case.tokens) * 3)
    graph.replay()
    tw.kv_write(k, v, wanted.k_pages, wanted.v_pages, slots)
    assert all(torch.equal(a, b) for a, b in zip(held.bits, wanted.bits, strict=True))


def test_a_step_of_a_cache_waits_for_nothing() -> None:
    cache = KVCache(2, 100, 16, 8, 128, device=DEVICE)
    sequences = [cache.new() for _ in range(8)]
    k = torch.randn(8, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(8, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.rand(100, 64, device=DEVICE)

    def step() -> torch.Tensor:
        batch = cache.extend(sequences, 1)
        for layer in range(2):
            batch.write(layer, k, k, rope=tw.Rope(table, table, batch.positions))
        return tw.attention(q, *cache.pages(1), layout=batch.layout, mask=tw.causal)

    step()
    sequences[0] = cache.fork(sequences[1])[0]  # the next step copies a page
    step()
    sequences[0] = cache.fork(sequences[1])[0]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_slots_are_checked_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held = writing.make_memory(BY_NAME["plain"], SETTINGS[0])
    k, v, slots = writing.make_tokens(BY_NAME["plain"], SETTINGS[0])
    monkeypatch.setenv("TILEWISE_DEBUG", "1")
    with pytest.raises(InputError, match="below 28"):
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots + 28)
    rope = tw.Rope(torch.ones(9, 8, device=DEVICE), torch.ones(9, 8, device=DEVICE), torch.arange(1, 10, device=DEVICE))
    with pytest.raises(InputError, match="position 9; expected 0 to 8"):
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots, rope=rope)


@pytest.mark.parametrize("rotates", [False, True])
def test_inductor_compiles_it_whole(rotates: bool) -> None:
    torch._dynamo.reset()
    case, setting = BY_NAME["skips"], SETTINGS[2]
    found = []
    table = torch.rand(30, 8, device=DEVICE)
    rope = tw.Rope(table, table, torch.arange(case.tokens, device=DEVICE)) if rotates else None
    for compiled in (True, False):
        held = writing.make_memory(case, setting)
        k, v, slots = writing.make_tokens(case, setting)

        def step(k: torch.Tensor, v: torch.Tensor, *pages: torch.Tensor) -> None:
            tw.kv_write(k * 2.0, v + 1.0, *pages, slots, rope=rope)  # noqa: B023

        run = torch.compile(step, fullgraph=True) if compiled else step
        run(k, v, held.k_pages, held.v_pages)
        found.append(held.bits)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
