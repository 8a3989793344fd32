"""What tells launch plans of attention apart."""

from __future__ import annotations

from collections.abc import Hashable

from tilewise.formula.structure import Bound
from tilewise.ops.attention.facts import facts, of_environment
from tilewise.ops.attention.problem import Call


def call_key(call: Call) -> Hashable:
    """`facts` of a call with aligned pointers. A plan that depends on a formula's numbers has them in its key, too.
    None where pointers or numbers would need a variant of their own.
    """
    if call.signature is None:
        return None
    pointers = call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()
    for bound in (call.mask, call.score):
        if bound is not None:
            for tensor in bound.tensors:
                pointers |= tensor.data_ptr()
            if not _small(bound):
                return None
    if call.pages is not None:
        for tensor in (*call.pages, call.cu_seqlens_q):
            pointers |= 0 if tensor is None else tensor.data_ptr()
    for scale in call.scales or ():
        pointers |= scale.data_ptr()
    if pointers % 16:
        return None
    return facts(call), of_environment(call)


def _small(bound: Bound) -> bool:
    """Whether every integer, encoded, fits the 32 bits it travels in."""
    for number in bound.numbers:
        if not isinstance(number, float) and not -_LIMIT <= number < _LIMIT:
            return False
    return all(stride < _LIMIT for tensor in bound.tensors for stride in tensor.stride())


_LIMIT = 2**29
