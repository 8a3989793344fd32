"""A KV cache: pages in memory, who holds them, and for each step of a model where its tokens go and lie."""

from __future__ import annotations

import collections.abc
import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch

from tilewise.core.errors import InputError
from tilewise.kv.allocator import PageAllocator
from tilewise.kv.arguments import check_count, listed
from tilewise.kv.open import Opened, OpenPages
from tilewise.kv.pool import PagePool
from tilewise.kv.prefix import PrefixCache
from tilewise.kv.sequence import Sequence, Write
from tilewise.kv.transfer import send_lists
from tilewise.layouts import Paged
from tilewise.ops.kv_write import kv_write
from tilewise.ops.page_summaries import summarize_pages
from tilewise.quant import ByChannel, Encoded
from tilewise.rotary import Rope

Tokens = collections.abc.Sequence[int]


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of a model: the new tokens of some sequences, one sequence after another. `KVCache.extend` makes it.

    Attributes:
        slot_mapping: int32 (total,): the slot of each new token, for `tilewise.kv_write`.
        positions: int32 (total,): the position of each new token in its sequence, for `tilewise.Rope`.
        layout: a `tilewise.Paged` with which new queries q (total, num_heads_q, head_dim) read all tokens of their
            sequences, the new ones included.
        pool: the pages.

    Example:
        >>> cache = tw.KVCache(1, 8, 16, 2, 16, dtype=torch.float32)
        >>> batch = cache.extend([cache.new()], 5)
        >>> batch.positions
        tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    """

    slot_mapping: torch.Tensor
    positions: torch.Tensor
    layout: Paged
    pool: PagePool

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, *, rope: Rope | None = None) -> None:
        """Write keys and values of the new tokens into the pages of a layer; summaries, where it has some, are updated.

        Args:
            layer: number of the layer, from 0.
            k: (total, num_heads_kv, head_dim), of the cache's dtype and device.
            v: (total, num_heads_kv, head_dim_v), likewise.
            rope: rotates keys before they are written: `tilewise.Rope(cos, sin, batch.positions)`. None does not.

        Raises:
            InputError: a tensor does not fit, or takes a gradient while gradients are enabled.
        """
        k_pages, v_pages = self.pool.pages(layer)
        rows = self.slot_mapping.shape[0]
        if isinstance(k, torch.Tensor) and k.ndim == 3 and k.shape[0] != rows:
            expected, hint = f"{rows}, the new tokens of this batch", "rows lie one sequence after another"
            raise InputError("k", got=f"{k.shape[0]} tokens", expected=expected, hint=hint)
        kv_write(k, v, k_pages, v_pages, self.slot_mapping, rope=rope)
        summaries = self.pool.summaries(layer)
        if summaries is not None:
            assert isinstance(k_pages, torch.Tensor)
            assert isinstance(v_pages, torch.Tensor)
            summarize_pages(k_pages, v_pages, summaries, self.layout, self.slot_mapping.shape[0])

    def layout_of(self, layer: int) -> Paged:
        """The layout with the summaries of a layer's pages, for `attention(select=tilewise.TopPages(...))`.

        Args:
            layer: number of the layer, from 0.

        Returns:
            A `tilewise.Paged`; without summaries where the cache has none.

        Raises:
            InputError: there is no such layer.
        """
        return replace(self.layout, summaries=self.pool.summaries(layer))


class KVCache:
    """Keys and values of many sequences, in pages; sequences that begin alike share pages.

    A step is `batch = cache.extend(sequences, counts)`, then in every layer `batch.write(layer, k, v)` and
    `tilewise.attention(q, *cache.pages(layer), layout=batch.layout, mask=tilewise.causal)`. Finish a step before the
    next `extend`, `fork`, `truncate`, `free` or `remember`; on a GPU that is an order of launches, on one stream.
    `cache.allocator` counts pages (`num_free`), `cache.pool` holds the memory (`nbytes`).

    Args:
        num_layers, num_pages, page_size, num_heads_kv, head_dim: sizes; a page holds page_size tokens of every layer.
        head_dim_v: of values; None for head_dim.
        dtype: float16, bfloat16 or float32.
        device: of the pages.
        order, encoding, keys_by_channel, open_pages, summaries, columns: as `PagePool` takes them.

    Raises:
        InputError: as `PagePool` raises it.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.

    Example:
        >>> cache = tw.KVCache(1, 8, 16, num_heads_kv=2, head_dim=16, dtype=torch.float32)
        >>> request = cache.new()
        >>> for tokens in (40, 1):  # the prompt, then a step of decoding
        ...     batch = cache.extend([request], tokens)
        ...     batch.write(0, k[0, :tokens], v[0, :tokens])
        ...     o = tw.attention(q[0, :tokens], *cache.pages(0), mask=tw.causal, layout=batch.layout)
        >>> request.length
        41
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        order: str | None = None,
        encoding: str | None = None,
        keys_by_channel: int | None = None,
        open_pages: int | None = None,
        summaries: bool = False,
        columns: int | None = None,
    ) -> None:
        self.pool = PagePool(
            num_layers, num_pages, page_size, num_heads_kv, head_dim, head_dim_v, dtype=dtype, device=device,
            order=order, encoding=encoding, keys_by_channel=keys_by_channel, open_pages=open_pages,
            summaries=summaries, columns=columns,
        )  # fmt: skip
        self._open = None if open_pages is None else OpenPages(open_pages)
        self.allocator = PageAllocator(num_pages, page_size)
        self._prefixes = PrefixCache(self.allocator)

    def __repr__(self) -> str:
        pool, allocator = self.pool, self.allocator
        encoding = pool.encoding or str(pool.dtype).removeprefix("torch.")
        if pool.key_bits is not None:
            encoding = f"keys int{pool.key_bits}, values {encoding}"
        return (
            f"KVCache(pages: {allocator.num_used} used and {allocator.num_cached} cached of {pool.num_pages}, "
            f"page_size: {pool.page_size}, sequences: {len(allocator.sequences)}, layers: {pool.num_layers}, "
            f"{encoding}, {pool.device})"
        )

    def pages(self, layer: int) -> tuple[torch.Tensor | Encoded | ByChannel, torch.Tensor | Encoded]:
        """The pages of a layer, as `tilewise.attention` takes them for k and v.

        Args:
            layer: number of the layer, from 0.

        Returns:
            (k_pages, v_pages), each (num_pages, page_size, num_heads_kv, dim): tensors, or quantized as the cache is.

        Raises:
            InputError: there is no such layer.
        """
        return self.pool.pages(layer)

    def new(self, tokens: Tokens = (), extra: Hashable = None) -> Sequence:
        """Start a sequence, with the longest known prefix of its prompt.

        Args:
            tokens: the prompt, as integers; at least one token of it is left to compute.
            extra: what else keys and values depend on, such as an adapter of the weights: any hashable value. Sequences
                with different values share nothing.

        Returns:
            The sequence; its `length` is the number of tokens whose keys and values need not be computed.

        Raises:
            InputError: tokens are no sequence of integers, or extra is not hashable.
        """
        return self._prefixes.start(tokens, extra)

    def remember(self, sequence: Sequence, tokens: Tokens, extra: Hashable = None) -> int:
        """Let later sequences begin with the full pages of this one.

        Args:
            sequence: one whose `tokens` have been written in all layers.
            tokens: its tokens from the first on, as many as wanted.
            extra: as given to `new`.

        Returns:
            How many of its tokens lie in known pages.

        Raises:
            InputError: more tokens than the sequence has, others than before, or a sequence that was freed.
        """
        return self._prefixes.insert(sequence, tokens, extra)

    def extend(self, sequences: Iterable[Sequence], counts: int | Iterable[int]) -> Batch:
        """Make room for new tokens at the end of each sequence.

        A page that other sequences read, too, is copied first, in all layers. All indices of a step go to the device in
        one transfer.

        Args:
            sequences: each once, in the order of the batch.
            counts: number of new tokens of each, or one number for all; may be 0.

        Returns:
            A `Batch`: the slots and positions of the new tokens, and the layout.

        Raises:
            OutOfPagesError: too few pages for all of them; nothing has changed.
            InputError: counts that do not fit, a sequence twice, or one that was freed.
        """
        sequences = listed("sequences", sequences, "sequences that live")
        for sequence in sequences:
            if not isinstance(sequence, Sequence):
                hint = "KVCache.new makes one"
                raise InputError("sequences", got=type(sequence).__name__, expected="live sequences", hint=hint)
        counts = [counts] * len(sequences) if isinstance(counts, int) else listed("counts", counts, "integers")
        for count in counts:
            if type(count) is not int or count < 0:
                check_count("counts", count, 0)
        if len(counts) != len(sequences):
            raise InputError(
                "counts",
                got=f"{len(counts)}",
                expected=f"{len(sequences)}, one for each sequence",
                hint="or one integer for all",
            )
        wanted = list(zip(sequences, counts, strict=True))
        if self._open is not None:
            self._open.check(self.allocator, wanted)
        before = [sequence.pages[-1] if sequence.pages else -1 for sequence in sequences]
        writes = self.allocator.append_all(wanted)
        opened = Opened((), ()) if self._open is None else self._open.follow(self.allocator, wanted, before)
        slots, positions, pairs, rows, places, layout = self._indices(sequences, counts, writes, opened)
        if pairs.shape[0]:
            self.pool.copy(pairs)
        if places.shape[0]:
            self.pool.open(rows, places)
        return Batch(slots, positions, layout, self.pool)

    def fork(self, sequence: Sequence, n: int = 1) -> list[Sequence]:
        """Start sequences with the tokens of another one, in the same pages until one of them is extended.

        Args:
            sequence: the sequence to start from.
            n: number of new sequences.

        Returns:
            The n new sequences.

        Raises:
            InputError: the sequence was freed, or n is no count.
        """
        return self.allocator.fork(sequence, n)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the last tokens of a sequence: drafts that were rejected, for example.

        With `keys_by_channel`, a page of codes stays one until `extend` writes into it; it is then dequantized, and its
        keys keep their rounding.

        Args:
            sequence: the sequence.
            length: number of tokens that stay.

        Raises:
            InputError: the sequence was freed, or length is no number from 0 to its length.
        """
        self.allocator.truncate(sequence, length)

    def free(self, sequence: Sequence) -> None:
        """End a sequence and hand back its pages. What was remembered of it stays until its pages are needed.

        Args:
            sequence: the sequence.

        Raises:
            InputError: the sequence was freed before.
        """
        self.allocator.free(sequence)

    def _indices(
        self, sequences: list[Sequence], counts: list[int], writes: list[Write], opened: Opened
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Paged]:
        """(slots and positions of the new tokens, pairs of pages to copy, pages to open with their rows, places that
        change, layout), parts of one tensor that is sent once.
        """
        most = max((len(sequence.pages) for sequence in sequences), default=0)
        parts = [
            list(itertools.accumulate(counts, initial=0)),
            [sequence.length for sequence in sequences],
            [slot for write in writes for slot in write.slots],
            [at for s, count in zip(sequences, counts, strict=True) for at in range(s.length - count, s.length)],
            [page for write in writes for pair in write.copies for page in pair],
            *([number for pair in pairs for number in pair] for pairs in opened),
            [page for sequence in sequences for page in (*sequence.pages, *[0] * (most - len(sequence.pages)))],
        ]
        cu_seqlens_q, seqlens_k, slots, positions, *pairs, table = send_lists(parts, self.pool.device)
        layout = Paged(table.view(len(sequences), most), seqlens_k, cu_seqlens_q)
        copied, rows, changed = (x.view(-1, 2) for x in pairs)
        return slots, positions, copied, rows, changed, layout
