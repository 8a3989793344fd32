"""Small device tensors: values read on the host once for each version of a tensor, constants made once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


def being_traced() -> bool:
    """Inside torch.compile, torch.export or torch.jit.trace: what is kept are operators, not the Python around them."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def unreadable(tensor: torch.Tensor) -> bool:
    """Whether values cannot be read now: a compiled region, a fake tensor, or a CUDA graph being captured."""
    if being_traced() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def values_checked(device: torch.device) -> bool:
    """Whether calls check the values of tensors there: on a CPU, and on a GPU, which has to be waited for, with
    TILEWISE_DEBUG=1.
    """
    return device.type == "cpu" or os.environ.get("TILEWISE_DEBUG") == "1"


def once_per_version(read: Callable[[torch.Tensor], T]) -> Callable[[torch.Tensor], T | None]:
    """Cache `read(tensor)` until the tensor is changed in place or dies; None where it is unreadable.

    Tensors made under `torch.inference_mode()` count no versions: they are read anew each time.
    """
    known: Any = WeakTensorKeyDictionary()

    def cached(tensor: torch.Tensor) -> T | None:
        if unreadable(tensor):
            return None
        if tensor.is_inference():
            return read(tensor)
        entry: tuple[int, T] | None = known.get(tensor)
        if entry is None or entry[0] != tensor._version:
            entry = known[tensor] = (tensor._version, read(tensor))
        return entry[1]

    return cached


@once_per_version
def host_values(tensor: torch.Tensor) -> tuple[int, ...]:
    """All values of an integer tensor."""
    return tuple(tensor.tolist())


@once_per_version
def host_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest value of an integer tensor; (0, 0) when empty."""
    if not tensor.numel():
        return (0, 0)
    low, high = torch.aminmax(tensor.detach())
    return int(low), int(high)


def constant(make: Callable[..., T]) -> Callable[..., T]:
    """Cache `make(*arguments, device)`, tensors that nobody changes, for each stream. A CUDA graph, with memory of its
    own, makes them anew.
    """

    @functools.lru_cache(maxsize=256)
    def known(arguments: tuple[Any, ...], _stream: int | None) -> T:
        return make(*arguments)

    def cached(*arguments: Any) -> T:
        device: torch.device = arguments[-1]
        if device.type != "cuda":
            return known(arguments, None)
        if torch.cuda.is_current_stream_capturing():
            return make(*arguments)
        return known(arguments, torch.cuda.current_stream(device).cuda_stream)

    return cached
