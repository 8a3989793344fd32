"""A cache with tensors, end to end: attention over its pages is attention over each sequence's own keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, OutOfPagesError
from tilewise.kv import Batch, KVCache, PageAllocator, PagePool, Sequence, cache

LAYERS, HEADS_Q, HEADS, DIM, DIM_V = 2, 4, 2, 8, 12
VOCABULARY = 3
Rows = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Mirror:
    """A cache, and for each sequence its tokens: keys and values follow from them, layer by layer.

    Those of a token depend on all tokens before it, so a page that was found for another prefix reads wrong.
    """

    cache: KVCache
    texts: dict[Sequence, list[int]] = field(default_factory=dict)

    def rows(self, tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k (tokens, heads, dim) and v of a text."""
        make = torch.Generator().manual_seed(layer)
        table = torch.randn(VOCABULARY, HEADS, DIM + DIM_V, generator=make)
        weights = 0.5 ** torch.arange(len(tokens))
        mixed = [(table[tokens[: n + 1]] * weights[: n + 1].flip(0)[:, None, None]).sum(0) for n in range(len(tokens))]
        kv = torch.stack(mixed) if mixed else torch.zeros(0, HEADS, DIM + DIM_V)
        kv = kv.to(self.cache.pool.dtype)
        return kv[..., :DIM], kv[..., DIM:]

    def extend(self, sequences: list[Sequence], news: list[list[int]]) -> Batch:
        """Room for new tokens, which are then written in all layers; each layer's attention is checked."""
        batch = self.cache.extend(sequences, [len(new) for new in news])
        for sequence, new in zip(sequences, news, strict=True):
            self.texts[sequence] = self.texts.get(sequence, []) + new
        for layer in range(LAYERS):
            rows = [self.rows(self.texts[sequence], layer) for sequence in sequences]
            if not sequences:
                continue
            new_k, new_v = (
                torch.cat([x[i][len(x[i]) - len(new) :] for x, new in zip(rows, news, strict=True)]) for i in (0, 1)
            )
            batch.write(layer, new_k, new_v)
            self.check(sequences, [len(new) for new in news], batch, layer, rows)
        return batch

    def check(self, sequences: list[Sequence], counts: list[int], batch: Batch, layer: int, rows: Rows) -> None:
        """The last tokens attend to their sequence's keys alone, as if it had tensors of its own."""
        q = torch.randn(sum(counts), HEADS_Q, DIM, generator=torch.Generator().manual_seed(layer)).to(rows[0][0].dtype)
        got = tw.attention(q, *self.cache.pages(layer), layout=batch.layout, mask=tw.causal)
        own = []
        for part, (k, v) in zip(q.split(counts), rows, strict=True):  # type: ignore[no-untyped-call]
            own.append(tw.attention(part[None], k[None], v[None], mask=tw.causal, impl="cpu_tiled")[0])
        torch.testing.assert_close(got, torch.cat(own), rtol=1e-5, atol=1e-6)

    def check_all(self) -> None:
        """Every sequence reads as it should, though nothing is written; then every slot that no token has is NaN."""
        allocator = self.cache.allocator
        unused = torch.ones(allocator.num_pages * allocator.page_size, dtype=torch.bool)
        unused.view(allocator.num_pages, -1)[list(allocator.kept)] = False
        assert allocator.violations() == []
        assert allocator.sequences == tuple(self.texts)
        for sequence, text in self.texts.items():
            assert sequence.length == len(text)
            slots = [sequence.slot(token) for token in range(len(text))]
            for layer in range(LAYERS):
                for pages, want in zip(self.cache.pages(layer), self.rows(text, layer), strict=True):
                    assert torch.equal(pages.flatten(0, 1)[slots], want)
            unused[slots] = False
        for layer in range(LAYERS):
            for pages in self.cache.pages(layer):
                pages[unused.view(allocator.num_pages, -1)] = torch.nan


def _cache(num_pages: int = 12, page_size: int = 3, order: str = "NHD", dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache whose slots are NaN before anything is written."""
    made = KVCache(LAYERS, num_pages, page_size, HEADS, DIM, DIM_V, dtype=dtype, order=order)
    for layer in range(LAYERS):
        for pages in made.pages(layer):
            pages.fill_(torch.nan)
    return made


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=7)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    page_size=st.integers(1, 5),
    num_pages=st.integers(3, 24),
    order=st.sampled_from(["NHD", "HND"]),
)
def test_attention_is_that_of_dense_sequences(data: Any, page_size: int, num_pages: int, order: str) -> None:
    """Prompts, steps of some sequences, forks, cuts, ends and remembered prefixes, on a pool that may be too small."""
    mirror = Mirror(_cache(num_pages, page_size, order))
    made, texts = mirror.cache, mirror.texts
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["new", "step", "step", "fork", "truncate", "free", "remember"]))
        if action == "new" or not texts:
            prompt = data.draw(TOKENS)
            sequence = made.new(prompt)
            assert sequence.length <= max(0, len(prompt) - 1)
            texts[sequence] = prompt[: sequence.length]
            chosen, news = [sequence], [prompt[sequence.length :]]
        else:
            sequence = data.draw(st.sampled_from(list(texts)))
            chosen = data.draw(st.lists(st.sampled_from(list(texts)), unique_by=id))
            news = [data.draw(TOKENS) for _ in chosen]
        if action in ("new", "step") or not texts:
            before = _state(made)
            try:
                mirror.extend(chosen, news)
            except OutOfPagesError:
                assert _state(made) == before
        elif action == "fork":
            texts.update((fork, list(texts[sequence])) for fork in made.fork(sequence, data.draw(st.integers(0, 2))))
        elif action == "truncate":
            made.truncate(sequence, data.draw(st.integers(0, sequence.length)))
            texts[sequence] = texts[sequence][: sequence.length]
        elif action == "remember":
            made.remember(sequence, texts[sequence])
        else:
            made.free(sequence)
            del texts[sequence]
        mirror.check_all()


def _state(made: KVCache) -> Any:
    """All that a refused step may not change."""
    allocator = made.allocator
    bits = [pages.contiguous().view(torch.int32).tolist() for layer in range(LAYERS) for pages in made.pages(layer)]
    held = [(sequence, list(sequence.pages), sequence.length) for sequence in allocator.sequences]
    return list(allocator._free), list(allocator._cached), allocator.kept, held, bits


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    """The first sequences would have found room."""
    mirror = Mirror(_cache(num_pages=5))
    a, b = mirror.cache.new(), mirror.cache.new()
    mirror.extend([a, b], [[0, 1], [1, 1, 2, 0]])
    (fork,) = mirror.cache.fork(a)
    mirror.texts[fork] = list(mirror.texts[a])
    before = _state(mirror.cache)
    with pytest.raises(OutOfPagesError, match="3 needed; expected at most 2"):
        mirror.cache.extend([a, fork, b], [1, 1, 7])
    assert _state(mirror.cache) == before
    mirror.extend([a, fork, b], [[1], [2], [0, 0]])  # one of the two that share a page keeps it
    mirror.check_all()
    assert mirror.cache.allocator.num_free == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    made = _cache(dtype=dtype)
    mirror = Mirror(made)
    sequence = made.new()
    batch = made.extend([sequence], 7)
    for layer in range(LAYERS):
        batch.write(layer, *mirror.rows([0, 1, 2, 0, 1, 2, 0], layer))
    mirror.texts[sequence] = [0, 1, 2, 0, 1, 2, 0]
    mirror.check_all()


def test_a_remembered_prefix_gives_the_same_output() -> None:
    prompt = [0, 1, 2, 2, 1, 0, 1, 1]
    outputs = []
    mirror = Mirror(_cache())
    for known in (0, 6):
        sequence = mirror.cache.new(prompt)
        assert sequence.length == known
        mirror.texts[sequence] = prompt[:known]
        batch = mirror.extend([sequence], [prompt[known:]])
        q = torch.ones(len(prompt) - known, HEADS_Q, DIM)
        outputs.append(tw.attention(q, *mirror.cache.pages(1), layout=batch.layout, mask=tw.causal)[-2:])
        assert mirror.cache.remember(sequence, prompt) == 6
        mirror.cache.free(sequence)
        del mirror.texts[sequence]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)  # tiles of other sizes round otherwise
    assert mirror.cache.new(prompt, extra="adapter").length == 0


def _fork_and_write() -> None:
    mirror = Mirror(_cache())
    sequence = mirror.cache.new()
    mirror.extend([sequence], [[0, 1, 2, 1]])
    (fork,) = mirror.cache.fork(sequence)
    mirror.texts[fork] = list(mirror.texts[sequence])
    mirror.extend([fork], [[2]])
    mirror.check_all()


def test_the_checks_see_a_copy_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "copy", lambda self, pairs: None)
    with pytest.raises(AssertionError):
        _fork_and_write()


def test_the_checks_see_one_layer_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_layer_only(self: PagePool, pairs: torch.Tensor) -> None:
        tw.copy_pages(*self.pages(0), pairs)

    monkeypatch.setattr(PagePool, "copy", first_layer_only)
    with pytest.raises(AssertionError):
        _fork_and_write()


def test_a_fork_is_copied_in_every_layer() -> None:
    _fork_and_write()


def test_all_indices_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    tensor = torch.tensor

    def count(values: Any, **options: Any) -> torch.Tensor:
        sent.append(len(values))
        return tensor(values, **options)

    made = _cache()
    sequences = [made.new() for _ in range(3)]
    made.extend(sequences, [2, 3, 4])
    forks = [made.fork(sequence)[0] for sequence in sequences]
    monkeypatch.setattr(cache.torch, "tensor", count)
    batch = made.extend(forks, 1)
    assert len(sent) == 1
    assert isinstance(batch.layout.block_table, torch.Tensor)
    parts = (batch.slot_mapping, batch.layout.block_table, batch.layout.seqlens_k, batch.layout.cu_seqlens_q)
    assert len({x.untyped_storage().data_ptr() for x in parts if x is not None}) == 1
    assert all(x.storage_offset() % 4 == 0 for x in parts if x is not None)


def test_a_batch_of_nothing() -> None:
    made = _cache()
    batch = made.extend([], 1)
    assert batch.slot_mapping.shape == (0,)
    sequence = made.new()
    batch = made.extend([sequence], 0)
    assert batch.layout.seqlens_k.tolist() == [0]


def test_what_extend_refuses() -> None:
    made = _cache()
    sequence = made.new()
    with pytest.raises(InputError, match="counts: got 2; expected 1"):
        made.extend([sequence], [1, 2])
    with pytest.raises(InputError, match="sequences: got the same one twice"):
        made.extend([sequence, sequence], 1)
    with pytest.raises(InputError, match="counts: got -1; expected an integer, at least 0"):
        made.extend([sequence], -1)
    made.free(sequence)
    with pytest.raises(InputError, match=r"a sequence that was freed.*KVCache\.new"):
        made.extend([sequence], 1)
    assert made.allocator.num_free == 12


@settings(max_examples=300, deadline=None)
@given(
    page_size=st.integers(1, 4),
    length=st.integers(0, 9),
    spare=st.integers(0, 4),
    batch=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=4),
    others=st.integers(0, 1),
    known=st.booleans(),
)
@example(page_size=2, length=1, spare=1, batch=[(1, 0), (1, 0)], others=0, known=True)
@example(page_size=2, length=1, spare=1, batch=[(1, 0), (1, 0)], others=0, known=False)
def test_appending_to_all_is_appending_to_each_or_to_none(
    page_size: int, length: int, spare: int, batch: list[tuple[int, int]], others: int, known: bool
) -> None:
    """Forks grow by some tokens after a cut. A batch is refused where its appends, one by one, would run out of pages,
    and else only where one of them gives back a known page that the next would take.
    """
    tried = []
    for together in (True, False):
        allocator = PageAllocator(max(1, -(-length // page_size) + spare), page_size)
        first = allocator.create()
        allocator.append(first, length)
        forks = [first, *allocator.fork(first, len(batch) - 1 + others)]
        if known and length:
            allocator.keep(first.pages[-1])
        for fork, (_, cut) in zip(forks, batch, strict=False):
            allocator.truncate(fork, max(0, length - cut))
        wanted = [(fork, n) for fork, (n, _) in zip(forks, batch, strict=False)]
        before = [(list(fork.pages), fork.length) for fork in forks]
        done = None
        try:
            done = allocator.append_all(wanted) if together else [allocator.append(*one) for one in wanted]
        except OutOfPagesError:
            assert not together or before == [(fork.pages, fork.length) for fork in forks]
        tried.append(done)
        assert allocator.violations() == []
        if together:  # the copies may be made at once
            pairs = [pair for write in done or () for pair in write.copies]
            assert not {source for source, _ in pairs} & {target for _, target in pairs}
    assert tried[0] == tried[1] or (known and tried[0] is None)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pool(order: str) -> None:
    pool = PagePool(3, 5, 4, 2, 8, 16, dtype=torch.float16, order=order)
    k, v = pool.pages(2)
    assert (k.shape, v.shape, pool.nbytes) == ((5, 4, 2, 8), (5, 4, 2, 16), 3 * 5 * 4 * 2 * 24 * 2)
    assert (k.stride(1) > k.stride(2)) == (order == "NHD")
    for layer in range(3):
        for x in pool.pages(layer):
            x.copy_(torch.arange(5)[:, None, None, None] + 10 * layer)
    pool.copy(torch.tensor([[1, 3], [1, 0]], dtype=torch.int32))
    for layer in range(3):
        for x in pool.pages(layer):
            assert x[:, 0, 0, 0].tolist() == [10 * layer + page for page in (1, 1, 2, 1, 4)]
            assert (x == x[:, :1, :1, :1]).all()


def test_what_a_pool_refuses() -> None:
    with pytest.raises(InputError, match="order: got 'DHN'"):
        PagePool(1, 1, 1, 1, 1, order="DHN")
    with pytest.raises(InputError, match=r"dtype: got torch\.float64"):
        PagePool(1, 1, 1, 1, 1, dtype=torch.float64)
    with pytest.raises(InputError, match="page_size: got 0"):
        PagePool(1, 1, 0, 1, 1)
    with pytest.raises(InputError, match=r"fewer than 2\*\*31 slots"):
        PagePool(1, 2**27, 16, 1, 1)
    with pytest.raises(InputError, match="layer: got 1"):
        PagePool(1, 1, 1, 1, 1).pages(1)
