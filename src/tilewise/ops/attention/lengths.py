"""How long sequences can be: what shapes and declared bounds say, what is read, and that no index leaves a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.core.errors import FormulaError
from tilewise.core.readback import being_captured, host_values
from tilewise.formula.check import provable, prove, reads_values
from tilewise.layout_checks import steps

if TYPE_CHECKING:
    from tilewise.ops.attention.problem import Call


def check_indices(call: Call) -> bool:
    """Raise FormulaError if a captured tensor could be read outside. Whether shapes, types and bounds alone say
    that none can; else lengths of packed sequences and of requests, or values of captured tensors, are read each time.
    """
    if not call.has_pairs:
        return True
    if provable_unread(call):
        return True
    if not call.packed and call.pages is None:
        _prove(call, call.rows_k - call.rows_q, call.rows_k)
        return False
    lengths = lengths_now(call)
    if lengths is None and being_captured(call.q.device):
        raise FormulaError(
            "mask or score",
            got="an index into a captured tensor that depends on sequence lengths, while a CUDA graph is captured",
            expected="an index that stays in range for any lengths at replay",
            hint="declare tilewise.Packed(..., max_seqlen_k=...), or clamp the index",
        )
    if lengths is not None:
        # kernels evaluate formulas at 0 where a sequence has no queries, or no keys (`tiles.visit.proved`)
        both = [(rows_q, rows_k) if rows_q and rows_k else (1, 1) for rows_q, rows_k in lengths]
        _prove(call, min(rows_k - rows_q for rows_q, rows_k in both), max(rows_k for _, rows_k in both))
    return False


def provable_unread(call: Call) -> bool:
    """Whether no index of the call's formulas can leave its tensor, whatever values tensors hold, and whatever lengths
    the declared bounds allow.
    """
    most_q, most_k = longest(call, of_keys=False), longest(call, of_keys=True)
    dense = not call.packed and call.pages is None
    first = most_k - most_q if dense else 0 if call.bounds.same else -most_q
    sizes = (call.batch, call.num_heads_q, first, most_k)
    return all(provable(bound, sizes) for bound in (call.mask, call.score) if bound is not None)


def reads(call: Call) -> list[str]:
    """What the checks of a call read on the host, each time, with what spares it."""
    if provable_unread(call):
        return []
    if any(reads_values(bound.text) for bound in (call.mask, call.score) if bound is not None):
        return ["values of a captured tensor that decide over an index; .clamp(min, max) the index"]
    return ["lengths, since a formula's index hangs on them; declare max_seqlen_k=, or clamp the index"]


def longest(call: Call, of_keys: bool) -> int:
    """The most queries, or keys, that a sequence can have, by declared bounds and sizes."""
    rows, bound = (call.rows_k, call.bounds.rows_k) if of_keys else (call.rows_q, call.bounds.rows_q)
    return rows if bound is None else min(rows, bound)


def longest_now(call: Call, of_keys: bool) -> int:
    """`longest`, of lengths that are read if they can be and no bound is declared."""
    lengths = None if (call.bounds.rows_k if of_keys else call.bounds.rows_q) is not None else lengths_now(call)
    return longest(call, of_keys) if lengths is None else max((pair[of_keys] for pair in lengths), default=0)


def _prove(call: Call, first: int, rows_k: int) -> None:
    """`prove` its formulas for so many keys, and queries from the position `first` on."""
    for what, bound in (("mask", call.mask), ("score", call.score)):
        if bound is not None:
            prove(bound, what, (call.batch, call.num_heads_q, first, rows_k))


def lengths_now(call: Call) -> list[tuple[int, int]] | None:
    """(queries, keys) of each packed sequence or request; None where they cannot be read now."""
    rows_q = [call.rows_q] * call.batch if call.cu_seqlens_q is None else steps(call.cu_seqlens_q)
    rows_k: Sequence[int] | None = rows_q
    if call.pages is not None:
        rows_k = host_values(call.pages.seqlens)
    elif call.cu_seqlens_k is not None and call.cu_seqlens_k is not call.cu_seqlens_q:
        rows_k = steps(call.cu_seqlens_k)
    return None if rows_q is None or rows_k is None else list(zip(rows_q, rows_k, strict=True))
