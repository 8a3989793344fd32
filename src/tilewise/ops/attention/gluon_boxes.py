"""How tensors are described to the tensor memory accelerator: rows of a head, pages of a pool, matrices."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.ops.attention.configs import padded
from tilewise.tiles.hopper import LAST_ROW

_DTYPES = {
    torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
}  # fmt: skip
_MANY = 0x7FFF0000  # sequences that a packed tensor may have, as it is described


def eights_of_page(pool: torch.Tensor) -> int:
    """How many times eight tokens of a pool (pages, tokens, heads, dim) lie from one page to the next."""
    return pool.stride(0) // (8 * pool.stride(1)) if pool.shape[0] > 1 else pool.shape[1] // 8


def box_of_pages(pool: torch.Tensor, block_n: int) -> tuple[int, ...]:
    """A tile's share of a page, as (heads, eights of tokens, 64 columns, tokens of an eight, columns): all of it where
    columns are whole 64s, since a box ends where the tensor does in its last dimension only.
    """
    dim = pool.shape[3]
    if dim > 64 and dim % 64 != 0:
        return (1, 1, 1, 8, 64)
    return (1, min(pool.shape[1], block_n) // 8, padded(dim) // 64, 8, 64)


def _describe_pool(x: torch.Tensor, box: tuple[int, ...]) -> Any:
    """A descriptor whose boxes are `box_of_pages`; pages follow one another as eights of tokens do."""
    pages, page, heads, dim = x.shape
    _of_page, of_token, of_head, _ = x.stride()
    apart = dim % 64 == 0
    sizes = [heads, (pages - 1) * eights_of_page(x) + page // 8, dim // 64 if apart else 1, 8, 64 if apart else dim]
    strides = [of_head if heads > 1 else of_token, 8 * of_token, 64, of_token, 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    return TensorDescriptor(x, sizes, strides, list(box), layout)


def describe(x: torch.Tensor, box: tuple[int, ...]) -> Any:
    """A descriptor of a (batch, seqlen, heads, dim) or packed (rows, heads, dim) tensor whose tiles are (rows, columns)
    of one head (see `tiles.hopper.sequence`), of a pool of pages, or of a matrix.
    """
    if len(box) == 5:
        return _describe_pool(x, box)
    if x.ndim == 2:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.float32)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout)
    row = -(-x.shape[-1] // 16) * 16  # any multiple of 16 bytes does where there is but one
    sizes, strides = list(x.shape), [n if size > 1 else row for size, n in zip(x.shape, x.stride(), strict=True)]
    rows, heads, dim = sizes[-3:]
    if x.ndim == 3:
        sizes = [_MANY, _MANY, heads, int(LAST_ROW), dim]
        strides = [2**34 - strides[0], strides[0], strides[1], strides[0], 1]
    else:
        sizes = [sizes[0], 1, heads, rows, dim]
        strides = [strides[0], row, strides[2], strides[1], 1]
    tile = [1, 1, 1, *box]
    return TensorDescriptor(x, sizes, strides, tile, gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[x.dtype]))
