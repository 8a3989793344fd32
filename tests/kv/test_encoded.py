"""A cache of codes: what is written reads as its codes say, in every layer, through forks and copies."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.kv import KVCache, PagePool
from tilewise.quant import KINDS, Encoded, decode, encode

LAYERS, HEADS_Q, HEADS, DIM, DIM_V = 2, 4, 2, 8, 12


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_decoded_sequences(kind: str, order: str) -> None:
    """Two prompts, a fork whose page is copied, and another step."""
    cache = KVCache(LAYERS, 12, 3, HEADS, DIM, DIM_V, order=order, encoding=kind)
    for layer in range(LAYERS):
        for pages in cache.pages(layer):
            assert isinstance(pages, Encoded)
            pages.scale.fill_(torch.nan)
    one, two = cache.new(), cache.new()
    texts = {one: [], two: []}

    def step(counts: dict) -> None:
        batch = cache.extend(list(counts), list(counts.values()))
        total = sum(counts.values())
        for layer in range(LAYERS):
            make = torch.Generator().manual_seed(100 * layer + total)
            k, v = (torch.randn(total, HEADS, dim, generator=make).bfloat16() for dim in (DIM, DIM_V))
            batch.write(layer, k, v)
            if layer == 0:
                start = 0
                for sequence, count in counts.items():
                    texts[sequence].append([])
                    start += count
            start = 0
            for sequence, count in counts.items():
                texts[sequence][-1].append((k[start : start + count], v[start : start + count]))
                start += count
            q = torch.randn(total, HEADS_Q, DIM, generator=make)
            got = tw.attention(q, *cache.pages(layer), layout=batch.layout, mask=tw.causal)
            want = []
            for sequence, rows in zip(counts, q.split(list(counts.values())), strict=True):
                keys, values = (torch.cat([part[layer][n] for part in texts[sequence]]) for n in (0, 1))
                keys, values = (decode(encode(x, kind))[None] for x in (keys, values))
                want.append(tw.attention(rows[None], keys, values, mask=tw.causal, impl="cpu_tiled")[0])
            torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-6)

    step({one: 4, two: 7})
    (fork,) = cache.fork(one)
    texts[fork] = [list(parts) for parts in texts[one]]
    step({one: 1, fork: 2, two: 1})
    step({one: 1, fork: 1, two: 3})


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_copied_in_all_layers(kind: str, order: str) -> None:
    pool = PagePool(3, 5, 4, 2, 8, 16, order=order, encoding=kind)
    for layer in range(3):
        for pages in pool.pages(layer):
            number = torch.arange(5)[:, None, None] + 10 * layer
            pages.data.view(torch.uint8).copy_(number[..., None])
            pages.scale.copy_(number)
    pool.copy(torch.tensor([[1, 3], [1, 0]], dtype=torch.int32))
    for layer in range(3):
        want = [10 * layer + page for page in (1, 1, 2, 1, 4)]
        for pages in pool.pages(layer):
            for x in (pages.data.view(torch.uint8), pages.scale):
                assert x.flatten(1)[:, 0].tolist() == want
                assert (x.flatten(1) == x.flatten(1)[:, :1]).all()


def test_bytes_count_scales() -> None:
    rows = 3 * 5 * 4 * 2  # of keys, and of values
    for kind, of_row in (("int8", 8 + 16), ("fp8", 8 + 16), ("int4", 4 + 8)):
        pool = PagePool(3, 5, 4, 2, 8, 16, encoding=kind)
        assert pool.nbytes == rows * (of_row + 2 * 4)
        k, v = pool.pages(2)
        assert (k.shape, v.shape, k.kind) == ((5, 4, 2, 8), (5, 4, 2, 16), kind)
        assert pool.dtype == KINDS[kind].dtype


def test_new_pages_are_zeros() -> None:
    for kind in KINDS:
        for pages in PagePool(1, 2, 2, 1, 4, encoding=kind).pages(0):
            assert not decode(pages).any()


def test_what_a_pool_refuses() -> None:
    with pytest.raises(InputError, match="encoding: got 'int3'; expected one of 'int8', 'fp8', 'int4'"):
        PagePool(1, 1, 1, 1, 2, encoding="int3")
    with pytest.raises(InputError, match="head_dim_v: got head_dim 3; expected an even head_dim for 'int4'"):
        KVCache(1, 1, 1, 1, 2, 3, encoding="int4")
