"""Small device tensors: values read on the host, anew each time, and constants made once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def being_traced() -> bool:
    """Inside torch.compile, torch.export or torch.jit.trace: what is kept are operators, not the Python around them."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def has_memory(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this type are memory, not stand-ins for others (fake ones) nor wrappers of them."""
    plain = kind is torch.Tensor or kind is torch.nn.Parameter  # at the cost that every call can bear
    return plain or kind.__torch_dispatch__ in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


def unreadable(tensor: torch.Tensor) -> bool:
    """Whether values cannot be read now: inside a compiled region, of a fake tensor or one without memory, or while a
    CUDA graph is captured.
    """
    if being_traced() or not has_memory(type(tensor)) or tensor.is_meta:
        return True
    return being_captured(tensor.device)


def being_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured there, whose replays find other values."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def values_checked(device: torch.device) -> bool:
    """Whether calls check the values of tensors there: on a CPU, and on a GPU, which has to be waited for, with
    TILEWISE_DEBUG=1.
    """
    return device.type == "cpu" or os.environ.get("TILEWISE_DEBUG") == "1"


def host_values(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """All values of an integer tensor, as its memory holds them now; None where it is unreadable. Waits for a GPU.

    Nothing that was read is kept: a CUDA graph, a kernel or NumPy may write the memory, and PyTorch would count no
    version.
    """
    return None if unreadable(tensor) else tuple(tensor.tolist())


def host_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Smallest and largest value of an integer tensor now, (0, 0) when empty; None where it is unreadable. Waits for a
    GPU.
    """
    if unreadable(tensor):
        return None
    if not tensor.numel():
        return (0, 0)
    low, high = torch.stack(torch.aminmax(tensor.detach())).tolist()
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
