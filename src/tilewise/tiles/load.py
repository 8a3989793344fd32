"""Rows of q, k, v, o and their gradients, from memory to a tile and back.

A tensor is reached in one of three ways (TMA): POINTER arithmetic; a descriptor for the tensor memory accelerator that
the kernel makes for itself (DEVICE); or one that came as an argument (HOST), of the whole (batch, seqlen, heads, dim)
tensor, so that rows beyond a sequence's end are zero and not another's.
"""

import triton
import triton.language as tl

POINTER: tl.constexpr = tl.constexpr(0)
DEVICE: tl.constexpr = tl.constexpr(1)
HOST: tl.constexpr = tl.constexpr(2)


@triton.jit
def rows_of(
    X, b, row0, h, size, stride_b, stride_s, stride_h, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Where `load_rows` and `store_rows` find the rows of one sequence and head: `size` rows from `row0` on."""
    if TMA == HOST:
        rows = (X, b, h)
    else:
        base = X + b.to(tl.int64) * stride_b + row0.to(tl.int64) * stride_s + h.to(tl.int64) * stride_h
        if TMA == DEVICE:
            rows = tl.make_tensor_descriptor(base, [size, DIM], [stride_s.to(tl.int64), 1], [ROWS, COLS])
        else:
            rows = base
    return rows


@triton.jit
def load_rows(
    rows, start, stride, in_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of a matrix with unit column stride, as [ROWS, COLS]; zero beyond DIM, and where not
    in_rows if MASKED.

    The distance of the tile is taken in 64 bits, offsets inside it in 32.
    """
    if TMA == HOST:
        tile = rows[0].load([rows[1], start, rows[2], 0]).reshape(ROWS, COLS)
    elif TMA == DEVICE:
        tile = rows.load([start, 0])
    else:
        offs_r = tl.arange(0, ROWS)
        offs_c = tl.arange(0, COLS)
        pointers = rows + start.to(tl.int64) * stride + offs_r[:, None] * stride + offs_c[None, :]
        if MASKED:
            if COLS == DIM:
                tile = tl.load(pointers, mask=in_rows[:, None], other=0.0)
            else:
                tile = tl.load(pointers, mask=in_rows[:, None] & (offs_c[None, :] < DIM), other=0.0)
        else:
            tile = tl.load(pointers) if COLS == DIM else tl.load(pointers, mask=offs_c[None, :] < DIM, other=0.0)
    return tile


@triton.jit
def row_values(b, h, row0, rows, batch, HEADS: tl.constexpr, PACKED: tl.constexpr):
    """Where the numbers of one sequence and head begin in a tensor that holds a number for each row of q.

    The tensor memory accelerator fetches from multiples of 16 bytes only. So a sequence begins at a multiple of 4
    numbers; with 3 more for each sequence before it, rounding down never reaches back into one.
    """
    if PACKED:
        at = h.to(tl.int64) * ((rows + 3 * batch + 3) // 4 * 4) + (row0 + 3 * b) // 4 * 4
    else:
        at = (b * HEADS + h).to(tl.int64) * ((rows + 3) // 4 * 4)
    return at


@triton.jit
def load_values(values, at, in_rows, other, MASKED: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """BLOCK numbers from `at` on, of a pointer or of a descriptor that came as an argument; `other` where not in_rows
    if MASKED.
    """
    if TMA == POINTER:
        pointers = values + at + tl.arange(0, BLOCK)
        tile = tl.load(pointers, mask=in_rows, other=other) if MASKED else tl.load(pointers)
    else:
        tile = values.load([at.to(tl.int32)])
        if MASKED:
            tile = tl.where(in_rows, tile, other)
    return tile


@triton.jit
def store_rows(
    rows, start, stride, tile, in_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """The inverse of `load_rows`, rounding to the tensor's type."""
    if TMA == HOST:
        rows[0].store([rows[1], start, rows[2], 0], tile.to(rows[0].dtype).reshape(1, ROWS, 1, COLS))
    else:
        offs_r = tl.arange(0, ROWS)
        offs_c = tl.arange(0, COLS)
        pointers = rows + start.to(tl.int64) * stride + offs_r[:, None] * stride + offs_c[None, :]
        if COLS == DIM:
            tl.store(pointers, tile.to(rows.dtype.element_ty), mask=in_rows[:, None])
        else:
            tl.store(pointers, tile.to(rows.dtype.element_ty), mask=in_rows[:, None] & (offs_c[None, :] < DIM))
