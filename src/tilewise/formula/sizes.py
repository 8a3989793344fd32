"""Sizes of a call that a formula was made for: those of the tensors and grids that library functions are given.

Indices that stay inside a tensor are not enough: a mask of three batch elements means nothing for two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tilewise.core.errors import InputError


class Size(NamedTuple):
    """One number that a call must have.

    Args:
        name: what the caller gave, for messages.
        axis: "batch", "num_heads_q", "seqlen_q" or "seqlen_k"; or "shift", seqlen_k - seqlen_q of each sequence.
        extent: the number, of blocks where `block` is more than 1.
        block: positions of the key axis that one entry stands for.
        each: of "seqlen_k", whether each sequence must have it, as a grid; tables may be longer than packed sequences
            and requests over pages are.
    """

    name: str
    axis: str
    extent: int
    block: int = 1
    each: bool = False


class Sizes(NamedTuple):
    """Those of a call: lengths of every sequence where `dense`, else totals of queries, and the most keys there are."""

    batch: int
    num_heads_q: int
    seqlen_q: int
    seqlen_k: int
    dense: bool = True


def check_sizes(wanted: Iterable[Size], call: Sizes) -> None:
    """Raise InputError for the first size that a call of these sizes does not have.

    Lengths of packed sequences and of requests are no sizes: `check_lengths` looks at them, and an index beyond a table
    is refused when it is proved.

    Args:
        wanted: what a formula was made for, `Formula.sizes`.
        call: what there is.

    Raises:
        InputError: names what the formula holds, its size and the call's.

    Example:
        check_sizes(tilewise.neighborhood((2, 4), 1).sizes, Sizes(1, 4, 8, 8))
    """
    for size in wanted:
        # with != throughout: under torch.compile a symbolic size equals none of a tuple's
        if size.axis == "batch" or size.axis == "num_heads_q" or call.dense:
            if size.axis == "shift":
                continue
            found = getattr(call, size.axis)
            if size.extent != (found if size.block == 1 else -(-found // size.block)):
                raise _mismatch(size, found)
        elif size.each and call.seqlen_k != 0 and call.seqlen_k < size.extent:
            raise _mismatch(size, f"{call.seqlen_k} or less")


def made_for(wanted: Iterable[Size], axis: str, least: int) -> int:
    """How many "batch" elements or "num_heads_q" a call needs that wants `least` of them and meets these sizes."""
    return max([least, *(size.extent for size in wanted if size.axis == axis)])


def of_lengths(wanted: Iterable[Size]) -> bool:
    """Whether any of these is of each sequence of a packed or paged call."""
    return any(size.each or size.axis == "shift" for size in wanted)


def check_lengths(wanted: Iterable[Size], lengths: Iterable[tuple[int, int]]) -> None:
    """Raise InputError for a sequence of these (queries, keys) that has not the length that a formula was made for."""
    pairs = [(rows_q, rows_k) for rows_q, rows_k in lengths if rows_q and rows_k]
    for size in wanted:
        for rows_q, rows_k in pairs:
            if size.each and rows_k != size.extent:
                raise _mismatch(size, rows_k)
            if size.axis == "shift" and rows_k - rows_q != size.extent:
                raise _mismatch(size, rows_k - rows_q)


def _mismatch(size: Size, found: Any) -> InputError:
    axis = "seqlen_k - seqlen_q" if size.axis == "shift" else size.axis
    blocks = f" in blocks of {size.block}" if size.block > 1 else ""
    return InputError(
        size.name,
        got=f"one for {axis} {size.extent}{blocks}",
        expected=f"{axis} {found}, as the call has it",
        hint=_HINTS[size.axis],
    )


_HINTS = {
    "batch": "make it for this batch; a dimension of 1, where one is allowed, is shared by all",
    "num_heads_q": "one entry for each query head, not for each key/value head",
    "seqlen_q": "make it for these queries: x[..., :seqlen_q, :seqlen_k]",
    "seqlen_k": "make it for these keys: ids[..., :seqlen_k]; sliding_tile(text=...) has tokens beside the grid",
    "shift": "rows of such a table are queries: all sequences have as many keys more than queries as the table",
}
