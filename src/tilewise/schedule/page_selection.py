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
    """The pages that score best for a query, for each head of keys.

    Args:
        pages: how many of them are read; a request that has fewer reads all of its own.
        first, local: how many of these are its first pages, and its newest, whatever their scores: at least 0 and 1.
        by: what a page's score is: "bounds", the most that one of its keys within their least and largest numbers could
            have (Tang et al., "Quest", 2024), or "mean", that of the mean of its keys. Of the query heads that share
            keys the largest counts.
        far: what stands for the pages that are not read. "drop": nothing. "summary": each is one key more in the same
            softmax, the mean of its keys, with the mean of its values and log(page_size) added to its score.

    Raises:
        InputError: another value.
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
                hint="these are among the pages that are read",
            )
        for name, known in (("by", BY), ("far", FAR)):
            if getattr(self, name) not in known:
                got, expected = repr(getattr(self, name)), f"one of {', '.join(map(repr, known))}"
                raise InputError(f"TopPages {name}", got=got, expected=expected, hint="see tilewise.TopPages")


@dataclass(frozen=True)
class SparQ:
    """The tokens whose keys score best in the largest dimensions of a query, for each head of keys (Ribar et al.,
    "SparQ Attention: Bandwidth-Efficient LLM Inference", 2023).

    Scores are predicted by the `rank` dimensions in which queries are largest, at a temperature that makes up for the
    others; queries that share keys add up the sizes of their numbers, and their scores.

    Args:
        rank: how many dimensions of all keys are read.
        keys: how many tokens are read; a request that has fewer reads all of its own.
        local: how many of these are its newest, at least 1; None for a quarter of `keys`.
        compensate: whether the mean of all values has the weight that the prediction gives to tokens that are not read.

    Raises:
        InputError: another value.
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
                "SparQ local", got=shown(self.local), expected=f"at most keys={self.keys}", hint="they are among these"
            )

    @property
    def newest(self) -> int:
        """How many of the newest tokens are read."""
        return max(1, self.keys // 4) if self.local is None else self.local


def _check_count(name: str, value: object, least: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise InputError(name, got=shown(value), expected=f"an integer from {least} to 2**31 - 1", hint=hint)
