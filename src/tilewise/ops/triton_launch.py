"""Launching with little host time: what a call's shapes decide is worked out once and kept, and later calls only
pass pointers and numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.ops.triton_compile import compiled_for

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


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors'."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def describable(x: torch.Tensor) -> bool:
    """Whether one descriptor reaches a (batch, seqlen, heads, dim) tensor whose rows are fetchable."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x.ndim == 4 and all(size > 0 and (size == 1 or stride > 0) for size, stride in sizes)


def describe(x: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor whose tiles are (rows, columns) of one sequence and head, or (numbers,) of a vector."""
    if len(box) == 1:
        return TensorDescriptor(x, [x.numel()], [1], list(box))
    row = -(-x.shape[-1] // 8) * 8  # any multiple of 16 bytes does where there is but one
    strides = [stride if size > 1 else row for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, box[0], 1, box[1]])


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
    boxes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of the pointers that go as descriptors
    describe: Callable[[torch.Tensor, tuple[int, ...]], Any] = describe
    early: bool = False  # whether it may start while the kernel before it still runs, whose end it waits for itself
    scratch: bool = False  # whether the kernel writes tensor descriptors for itself
    options: dict[str, Any] = field(default_factory=dict)  # what else the compiler is told
    compiled: Any = field(default=None, init=False)
    encoders: dict[int, Encoder] = field(default_factory=dict, init=False)

    def launch(self, pointers: tuple[Any, ...], formula: tuple[Any, ...], scalars: tuple[float, ...] = ()) -> None:
        if self.scratch:
            triton.set_allocator(_scratch)
        if self.encoders:
            pointers = self._encoded(pointers)
        elif self.boxes:
            pointers = tuple(self.describe(x, self.boxes[n]) if n in self.boxes else x for n, x in enumerate(pointers))
        arguments = (*pointers, *self.strides, *formula, *self.sizes, *scalars, *self.constants)
        if self.compiled is not None:
            self.compiled(*arguments)
            return
        options = {"num_warps": self.warps, "num_stages": self.stages} | self.options
        options |= {"launch_pdl": True} if self.early else {}
        compiled, options = compiled_for(self.kernel, self.grid, arguments, options)
        if compiled is None:  # the interpreter's
            self.kernel[(self.grid,)](*arguments, **options)
            return
        start(compiled, self.grid, arguments, options)
        if remember:
            self.compiled, self.encoders = _shortcut(compiled, self.grid, pointers, sorted(self.boxes))

    def _encoded(self, pointers: tuple[Any, ...]) -> tuple[Any, ...]:
        arguments: list[Any] = []
        start = 0
        for n, encoder in self.encoders.items():
            arguments += pointers[start:n]
            arguments += encoder(pointers[n])
            start = n + 1
        return (*arguments, *pointers[start:])


def start(compiled: Any, grid: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch what was compiled with these options."""
    compiled[(grid, 1, 1)](*arguments)


Encoder = Callable[[torch.Tensor], tuple[Any, ...]]


def _shortcut(
    compiled: Any, grid: int, pointers: tuple[Any, ...], described: list[int]
) -> tuple[Callable[..., None], dict[int, Encoder]]:
    """What launches a compiled kernel, and what brings tensors into the form in which it takes descriptors.

    Between `compiled[grid]` and the driver, Triton 3.6 looks at every argument for descriptors, encodes each from its
    Python object, and sees to scratch memory and hooks: most of it needless once shapes are known (benchmarks/NOTES.md
    has the cost). Other versions are left as they are.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, CudaLauncher

    run = compiled.run
    if not triton.__version__.startswith("3.6.") or not isinstance(run, CudaLauncher):
        return compiled[(grid, 1, 1)], {}
    inner = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
    launch, metas = inner.get("launcher", run.launch), inner.get("tensordesc_meta", ())
    driver = triton.runtime.driver.active
    encoders = {}
    for n, meta in zip(described, metas, strict=True):
        tile = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
        encoders[n] = _encoder(driver.utils.fill_tma_descriptor, tile, pointers[n])
    plain = copy.copy(compiled)
    plain._run = copy.copy(run)
    plain._run.launch = launch
    watched = plain[(grid, 1, 1)]
    if run.global_scratch_size or run.profile_scratch_size:
        return watched, encoders
    runtime = triton.knobs.runtime
    get_device, get_stream = driver.get_current_device, driver.get_current_stream
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)

    def direct(*arguments: Any) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            watched(*arguments)  # by a profiler
        else:
            launch(grid, 1, 1, get_stream(get_device()), *fixed, None, None, None, *arguments)

    return direct, encoders


def _encoder(fill: Callable[..., Any], tile: tuple[Any, ...], like: TensorDescriptor) -> Encoder:
    """Encodes tensors of the shape and strides of one that was described before."""
    shape, strides = like.shape, like.strides
    sizes = (*shape, *strides)

    def encode(x: torch.Tensor) -> tuple[Any, ...]:
        return (fill(x.data_ptr(), *tile, shape, strides, 0), *sizes)

    return encode


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


def tensors_key(*tensors: torch.Tensor) -> Hashable:
    """Everything of tensors that may change which kernel runs or how; None where a pointer would need a variant of its
    own.
    """
    pointers = 0
    parts: list[object] = []
    for x in tensors:
        pointers |= x.data_ptr()
        parts += (x.dtype, x.device, x.shape, x.stride())
    return None if pointers % 16 else tuple(parts)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (rows, width) with unit stride in its last dimension, copied where it does not lie so."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
