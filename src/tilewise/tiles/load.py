"""Loading rows of q, k, v or do into a tile."""

import triton
import triton.language as tl


@triton.jit
def rows_of(base, size, stride, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """What `load_rows` reads from: a tensor descriptor for the tensor memory accelerator, or the pointer itself."""
    if TMA:
        source = tl.make_tensor_descriptor(base, [size, DIM], [stride.to(tl.int64), 1], [ROWS, COLS])
    else:
        source = base
    return source


@triton.jit
def load_rows(
    source, start, stride, in_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of a matrix with unit column stride, as [ROWS, COLS]; zero beyond DIM, and where not
    in_rows if MASKED.

    The distance of the tile is taken in 64 bits, offsets inside it in 32.
    """
    if TMA:
        tile = source.load([start, 0])
    else:
        offs_r = tl.arange(0, ROWS)
        offs_c = tl.arange(0, COLS)
        pointers = source + start.to(tl.int64) * stride + offs_r[:, None] * stride + offs_c[None, :]
        if MASKED:
            if COLS == DIM:
                tile = tl.load(pointers, mask=in_rows[:, None], other=0.0)
            else:
                tile = tl.load(pointers, mask=in_rows[:, None] & (offs_c[None, :] < DIM), other=0.0)
        else:
            if COLS == DIM:
                tile = tl.load(pointers)
            else:
                tile = tl.load(pointers, mask=offs_c[None, :] < DIM, other=0.0)
    return tile


@triton.jit
def store_rows(base, start, stride, tile, in_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The inverse of `load_rows`, rounding to the type of `base`."""
    offs_r = tl.arange(0, ROWS)
    offs_c = tl.arange(0, COLS)
    pointers = base + start.to(tl.int64) * stride + offs_r[:, None] * stride + offs_c[None, :]
    if COLS == DIM:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=in_rows[:, None])
    else:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=in_rows[:, None] & (offs_c[None, :] < DIM))
