"""Gluon's names that changed between Triton 3.6 and the newest version, under the newer names."""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def _reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


def _find_async_add() -> Any:
    return getattr(tma, "async_atomic_add", None) or _reduce_add


async_add = _find_async_add()  # (descriptor, coordinates, tile in shared memory): adds to global memory


@gluon.constexpr_function
def _ring_of(count: int, like: Any) -> list[int]:
    return [count, *like.shape[1:]]


@gluon.jit
def reinterpret(memory, count: gl.constexpr, like):
    """Shared memory as `count` tiles like those of the ring `like`."""
    if _RENAMED:
        return memory.reinterpret(like.dtype, _ring_of(count, like), like.layout)
    else:
        return memory._reinterpret(like.dtype, _ring_of(count, like), like.layout)
