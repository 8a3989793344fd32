"""What tells calls of attention apart for those who choose an implementation or make a launch plan: all of a call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from operator import attrgetter

import torch

from tilewise.ops.attention.problem import Call

_IN_SIGNATURE = ("q", "k", "v", "mask", "score", "pages", "scales")  # their sizes, strides, types and texts
_SIGNS = ("scale", "dropout")  # whose values kernels are given at each launch
_TENSORS = ("sink", "cu_seqlens_q", "cu_seqlens_k", "seed", "skip")
_OTHERS = tuple(
    field.name for field in fields(Call) if field.name not in (*_IN_SIGNATURE, *_SIGNS, *_TENSORS, "codes")
)  # a field that is added is one of them
_others = attrgetter(*_OTHERS)
_tensors = attrgetter(*_TENSORS)


def facts(call: Call) -> Hashable:
    """A key of everything that may change who runs a call and how, but for pointers and a formula's numbers, which
    whoever looks at them adds. For calls with a signature.
    """
    sink, cu_seqlens_q, cu_seqlens_k, seed, skip = _tensors(call)
    return (
        _others(call), call.scale > 0.0, call.dropout > 0.0, sink is None or sink.dtype,
        cu_seqlens_q is None or cu_seqlens_q.shape, cu_seqlens_k is None or cu_seqlens_k.shape, seed is None,
        skip is None, call.codes is None or call.codes.scheme,
    )  # fmt: skip


def of_environment(call: Call) -> Hashable:
    """What launch plans look at beside a call."""
    return torch.get_float32_matmul_precision() if call.q.dtype == torch.float32 else None
