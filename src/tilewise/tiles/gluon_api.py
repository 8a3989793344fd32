"""Gluon's names that changed between Triton 3.6 and the newest version, under the newer names."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def _ring_of(count: int, tile: Any) -> list[int]:
    return [count, *tile]


@gluon.jit
def rows_of_eight(memory, count: gl.constexpr):
    """Shared memory of 16-bit tiles with a swizzle of 128 bytes as `count` pieces of 8 rows and 64 columns."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if _RENAMED:
        return memory.reinterpret(memory.dtype, [count, 8, 64], LAYOUT)
    else:
        return memory._reinterpret(memory.dtype, [count, 8, 64], LAYOUT)


@gluon.constexpr_function
def _by_eights(rows: int, columns: int) -> Any:
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    bases += [[0, 64 << n] for n in range((columns // 64).bit_length() - 1)]
    bases += [[8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.jit
def by_eights(memory, rows: gl.constexpr, columns: gl.constexpr):
    """Shared memory of a 16-bit tile [rows, columns] whose rows lie eight after eight, and of each eight 64 columns
    after 64, with a swizzle of 128 bytes: as a box of (eights, columns / 64, 8, 64) leaves them.
    """
    LAYOUT: gl.constexpr = _by_eights(rows, columns)
    if _RENAMED:
        return memory.reinterpret(memory.dtype, [rows, columns], LAYOUT)
    else:
        return memory._reinterpret(memory.dtype, [rows, columns], LAYOUT)


@gluon.jit
def as_pairs(memory):
    """Shared memory of bytes [rows, columns] of a tensor core's layout as 16-bit words of two columns."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(memory.layout.swizzle_byte_width, 16, 2)
    if _RENAMED:
        return memory.reinterpret(gl.int16, [memory.shape[0], memory.shape[1] // 2], LAYOUT)
    else:
        return memory._reinterpret(gl.int16, [memory.shape[0], memory.shape[1] // 2], LAYOUT)


@gluon.jit
def reinterpret(memory, count: gl.constexpr, like):
    """Shared memory as a ring of `count` tiles like those of a descriptor."""
    if _RENAMED:
        return memory.reinterpret(like.dtype, _ring_of(count, like.block_shape), like.layout)
    else:
        return memory._reinterpret(like.dtype, _ring_of(count, like.block_shape), like.layout)
