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


_buffers: dict[int, torch.Tensor] = {}  # by device


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the tensor descriptors that a kernel writes for itself.

    Kernels of the default stream share a buffer, since they run one after another. On other streams each launch has
    its own: a CUDA graph may be replayed beside anything, and frameworks count what lives in their graphs' memory.
    """
    if stream:
        return torch.empty(size, dtype=torch.int8, device="cuda")
    device = torch.cuda.current_device()
    buffer = _buffers.get(device)
    if buffer is None or buffer.numel() < size:
        buffer = _buffers[device] = torch.empty(max(size, 2**20), dtype=torch.int8, device="cuda")
    return buffer


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
    if call.signature is None:
        return None
    pointers = call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()
    for bound in (call.mask, call.score):
        if bound is not None:
            for tensor in bound.tensors:
                pointers |= tensor.data_ptr()
            if not _small(bound):
                return None
    if pointers % 16:
        return None
    sink = None if call.sink is None else call.sink.dtype
    packed = None if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0]
    precision = torch.get_float32_matmul_precision() if call.q.dtype == torch.float32 else None
    return (call.signature, sink, packed, call.dropout > 0.0, call.scale > 0.0, call.grad_captured, precision)


def _small(bound: Bound) -> bool:
    """Whether every integer, encoded, fits the 32 bits it travels in."""
    for number in bound.numbers:
        if not isinstance(number, float) and not -_LIMIT <= number < _LIMIT:
            return False
    return all(stride < _LIMIT for tensor in bound.tensors for stride in tensor.stride())


_LIMIT = 2**29
