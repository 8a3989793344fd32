"""A cache that keeps summaries of its pages: what they are after forks, cuts and copies, and attention by them."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.kv import KVCache, Sequence

SIZE, HEADS, DIM = 4, 2, 8


def _step(cache: KVCache, sequences: list[Sequence], counts: list[int]) -> tw.Paged:
    batch = cache.extend(sequences, counts)
    for layer in range(2):
        k, v = (torch.randn(sum(counts), HEADS, DIM) for _ in range(2))
        batch.write(layer, k, v)
    _check(cache, sequences)
    return batch.layout_of(1)


def _check(cache: KVCache, sequences: list[Sequence]) -> None:
    """Summaries are those of the tokens that each sequence has."""
    for layer in range(2):
        summaries = cache.pool.summaries(layer)
        assert summaries is not None
        for sequence in sequences:
            for n, page in enumerate(sequence.pages):
                k, v = (x[page, : min(SIZE, sequence.length - n * SIZE)] for x in cache.pages(layer))
                assert torch.equal(summaries.least[page], k.amin(0))
                assert torch.equal(summaries.largest[page], k.amax(0))
                torch.testing.assert_close(summaries.k_mean[page], k.mean(0))
                torch.testing.assert_close(summaries.v_mean[page], v.mean(0))


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_follow_the_pages(order: str) -> None:
    torch.manual_seed(0)
    cache = KVCache(2, 64, SIZE, HEADS, DIM, dtype=torch.float32, order=order, summaries=True)
    first, second = cache.new(), cache.new()
    _step(cache, [first, second], [10, 3])
    (branch,) = cache.fork(first)
    _step(cache, [first, branch, second], [1, 5, 0])  # the page that both would write is copied
    cache.truncate(branch, 6)
    layout = _step(cache, [branch, first, second], [1, 1, 1])
    q = torch.randn(3, 4, DIM)
    pages = cache.pages(1)
    o = tw.attention(q, *pages, layout=layout, mask=tw.causal, select=tw.TopPages(2))
    every = tw.attention(q, *pages, layout=layout, mask=tw.causal)
    torch.testing.assert_close(o[[0, 2]], every[[0, 2]])  # of two pages and one
    assert not torch.allclose(o[1], every[1])


def test_bytes_are_counted() -> None:
    sizes = (2, 64, SIZE, HEADS, DIM)
    with_them, without = KVCache(*sizes, summaries=True).pool, KVCache(*sizes).pool
    assert with_them.nbytes == without.nbytes * (1 + 4 / (2 * SIZE))
    assert without.summaries(0) is None


def test_codes_have_none() -> None:
    with pytest.raises(InputError, match="summaries"):
        KVCache(2, 64, SIZE, HEADS, DIM, encoding="int8", summaries=True)
