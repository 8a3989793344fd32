"""Which pages, or tokens, of a KV cache a step of decoding reads, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.schedule.selection import MOST

BY = ("bounds", "mean")
FAR = ("drop", "summary")


@dataclass(frozen=True)
class TopPages:
    """Sparse decoding over the pages that score best for a query, for each key/value head.

    For `attention(select=...)` with `layout=tilewise.Paged(..., summaries=...)`; see `KVCache(summaries=True)`.

    Args:
        pages: number of pages that are read; a request with fewer reads all of its own.
        first: how many of these are the request's first pages, whatever their scores; at least 0.
        local: how many of these are its newest pages, whatever their scores; at least 1.
        by: a page's score. "bounds": the largest score that a key within the page's minima and maxima could have.
            "mean": the score of the mean of its keys. Of the query heads that share keys, the largest score counts.
        far: what stands for the pages that are not read. "drop": nothing. "summary": each is one more key in the same
            softmax, the mean of its keys, with the mean of its values and log(page_size) added to its score.

    Raises:
        InputError: another value.

    Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024.

    Example:
        >>> cache = tw.KVCache(1, 8, 16, 2, 16, dtype=torch.float32, summaries=True)
        >>> batch = cache.extend([cache.new()], 100)
        >>> batch.write(0, k[0], v[0])
        >>> last = tw.Paged(batch.layout.block_table, batch.layout.seqlens_k, summaries=batch.layout_of(0).summaries)
        >>> o = tw.attention(q[:1, -1:], *cache.pages(0), layout=last, select=tw.TopPages(4))  # 4 of 7 pages
    """

    pages: int
    first: int = 1
    local: int = 1
    by: str = "bounds"
    far: str = "drop"

    def __post_init__(self) -> None:
        for name, least in (("pages", 1), ("first", 0), ("local", 1)):
            _check_count(f"TopPages {name}", getattr(self, name), least, "a number of pages")
        if self.first + self.local > self.pages:
            raise InputError(
                "TopPages pages",
                got=f"{self.pages}, with first={self.first} and local={self.local}",
                expected=f"at least {self.first + self.local}",
                hint="first and local count among the pages that are read",
            )
        for name, known in (("by", BY), ("far", FAR)):
            if getattr(self, name) not in known:
                got, expected = repr(getattr(self, name)), f"one of {', '.join(map(repr, known))}"
                raise InputError(f"TopPages {name}", got=got, expected=expected, hint="see tilewise.TopPages")


@dataclass(frozen=True)
class SparQ:
    """Sparse decoding over the tokens that score best in a query's largest dimensions, for each key/value head.

    Scores are predicted from the `rank` dimensions with the largest abs(q), at a temperature that makes up for the
    other dimensions; queries that share keys add up their sizes and their scores. Then o = a * o_topk + (1 - a) *
    mean(v), with a the predicted weight of the tokens that are read. For `attention(select=...)` with
    `layout=tilewise.Paged(..., summaries=...)`; see `KVCache(summaries=True, columns=8)`.

    Args:
        rank: number of dimensions of all keys that are read.
        keys: number of tokens that are read; a request with fewer reads all of its own.
        local: how many of these are its newest tokens, at least 1; None for a quarter of `keys`.
        compensate: if False, a is 1: no mean of values is added.

    Raises:
        InputError: another value.

    Source: Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", 2023.

    Example:
        >>> cache = tw.KVCache(1, 8, 16, 2, 16, dtype=torch.float32, summaries=True, columns=8)
        >>> batch = cache.extend([cache.new()], 100)
        >>> batch.write(0, k[0], v[0])
        >>> last = tw.Paged(batch.layout.block_table, batch.layout.seqlens_k, summaries=batch.layout_of(0).summaries)
        >>> o = tw.attention(q[:1, -1:], *cache.pages(0), layout=last, select=tw.SparQ(rank=4, keys=32))
    """

    rank: int
    keys: int
    local: int | None = None
    compensate: bool = True

    def __post_init__(self) -> None:
        check_flags(**{"SparQ compensate": self.compensate})
        _check_count("SparQ rank", self.rank, 1, "a number of dimensions")
        _check_count("SparQ keys", self.keys, 1, "a number of tokens")
        if self.local is not None:
            _check_count("SparQ local", self.local, 1, "a number of tokens")
        if self.newest > self.keys:
            raise InputError(
                "SparQ local",
                got=shown(self.local),
                expected=f"at most keys={self.keys}",
                hint="local tokens count among the keys that are read",
            )

    @property
    def newest(self) -> int:
        """Number of the newest tokens that are read."""
        return max(1, self.keys // 4) if self.local is None else self.local


def _check_count(name: str, value: object, least: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise InputError(name, got=shown(value), expected=f"an integer from {least} to 2**31 - 1", hint=hint)
