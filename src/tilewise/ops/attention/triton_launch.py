"""Launching with little host time: what a call's shapes decide is worked out once and kept, and later calls only
pass pointers and numbers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from tilewise.formula.structure import Bound
from tilewise.ops.attention.problem import Call

remember = True  # whether compiled kernels are called directly on later launches; off while compiling without a GPU


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


@dataclass
class Plan:
    """One kernel for one kind of call: its grid, its constant arguments, and once launched the compiled kernel.

    Arguments are passed in the order of the kernel's parameters: pointers, `strides`, the formula's tuples, `sizes`,
    scalars, `constants`.
    """

    kernel: Any
    grid: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]
    warps: int
    stages: int
    extra: Any = None
    scratch: bool = False  # whether the kernel writes tensor descriptors
    compiled: Any = field(default=None, init=False)

    def launch(self, pointers: tuple[Any, ...], formula: tuple[Any, ...], scalars: tuple[float, ...] = ()) -> None:
        if self.scratch:
            triton.set_allocator(_scratch)
        arguments = (*pointers, *self.strides, *formula, *self.sizes, *scalars, *self.constants)
        if self.compiled is not None:
            self.compiled(*arguments)
            return
        compiled = self.kernel[(self.grid,)](*arguments, num_warps=self.warps, num_stages=self.stages)
        if remember and hasattr(compiled, "launch_metadata"):  # the interpreter returns nothing
            self.compiled = compiled[(self.grid, 1, 1)]


class Plans:
    """Plans by key; the oldest go when there are too many."""

    def __init__(self, limit: int = 4096) -> None:
        self._known: dict[Hashable, Any] = {}
        self._limit = limit

    def get(self, key: Hashable) -> Any:
        return self._known.get(key) if remember and key is not None else None

    def put(self, key: Hashable, plan: Any) -> Any:
        if remember and key is not None:
            if len(self._known) >= self._limit:
                self._known.pop(next(iter(self._known)))
            self._known[key] = plan
        return plan


def call_key(call: Call) -> Hashable:
    """Everything of a call that may change which kernel runs or how; None where pointers or numbers would need a
    variant of their own.
    """
    pointers = call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()
    for bound in (call.mask, call.score):
        if bound is not None:
            for tensor in bound.tensors:
                pointers |= tensor.data_ptr()
            if not _small(bound):
                return None
    if pointers % 16 or call.signature is None:
        return None
    sink = None if call.sink is None else call.sink.dtype
    packed = None if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0]
    precision = torch.get_float32_matmul_precision() if call.q.dtype == torch.float32 else None
    return (call.signature, sink, packed, call.dropout > 0.0, call.scale > 0.0, call.grad_captured, precision)


def _small(bound: Bound) -> bool:
    """Whether every integer, encoded, fits the 32 bits it travels in."""
    limit = 2**29
    strides = (s for t in bound.tensors for s in t.stride())
    return all(isinstance(n, float) or -limit <= n < limit for n in (*bound.numbers, *strides))
