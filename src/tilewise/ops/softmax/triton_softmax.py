"""Softmax on a GPU: rows that fit stay in registers between their reading and their writing.

A wider row is read twice: each lane has a maximum and a sum of its own (Milakov and Gimelshein 2018), so that lanes
meet once, behind the first reading. The second one finds much of the row in a cache.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.softmax.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, as_rows, on_device, tensors_key
from tilewise.tiles.arithmetic import LN2, LOG2E, known_multiple, softmax_step

_FORWARD, _BACKWARD = 32768, 16384  # columns of a row that stay in registers
_ELEMENTS = 2048  # of a program's tile where rows are short
_EACH = 16  # elements of a thread, until there are no more threads
_CHUNK = 16384  # elements of a step through a wide row: few programs at a time, so that a cache holds their rows
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def masked_scores(X, MASK, row, offs, inside, inv_t, stride_x, strides_mask, sizes_mask):
    """x / temperature of these rows and columns, -inf where there is none or the mask hides it"""
    s = tl.load(X + row * stride_x + offs, mask=inside, other=float("-inf")).to(tl.float32) * inv_t
    if MASK is not None:
        outer, k = row // sizes_mask[1], row % sizes_mask[1]
        i, j = outer // sizes_mask[0], outer % sizes_mask[0]
        base = i * strides_mask[0] + j * strides_mask[1] + k * strides_mask[2]
        keep = tl.load(MASK + base + offs.to(tl.int64) * strides_mask[3], mask=inside, other=0)
        s = tl.where(keep != 0, s, float("-inf"))
    return s


@triton.jit
def finite_shift(top):
    """What is taken out of the exponents: the largest score, or 0 where there is none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def passed_on(o, do, LOG: tl.constexpr):
    """(do, what adds up to the row's sum): no gradient passes through a logarithm of -inf."""
    if LOG:
        do = tl.where(o == float("-inf"), 0.0, do)
        part = do
    else:
        part = o * do
    return do, part


@triton.jit
def slope(o, do, total, LOG: tl.constexpr):
    return do - tl.math.exp2(o * LOG2E) * total if LOG else o * (do - total)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def softmax_rows_fwd(
    X, MASK, O, stride_x, strides_mask, sizes_mask, rows, width, inv_t,
    LOG: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # who am I
    width, stride_x = known_multiple(width, ALIGN), known_multiple(stride_x, ALIGN)
    row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    offs = tl.arange(0, BLOCK_W)[None, :]
    inside = (row < rows) & (offs < width)

    s = masked_scores(X, MASK, row, offs, inside, inv_t, stride_x, strides_mask, sizes_mask)  # [BLOCK_R, BLOCK_W]
    s = s - finite_shift(tl.max(s, 1))[:, None]
    w = tl.math.exp2(s * LOG2E)
    total = tl.sum(w, 1)
    total = tl.where(total == 0.0, 1.0, total)
    o = s - (tl.math.log2(total) * LN2)[:, None] if LOG else w * (1.0 / total)[:, None]
    tl.store(O + row * width + offs, o.to(O.dtype.element_ty), mask=inside)


@triton.jit
def softmax_chunks_fwd(
    X, MASK, O, stride_x, strides_mask, sizes_mask, rows, width, inv_t,
    LOG: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # who am I
    width, stride_x = known_multiple(width, ALIGN), known_multiple(stride_x, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    offs_l = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]

    # prologue: maximum and sum
    m_i = tl.full([LANES], float("-inf"), tl.float32)
    l_i = tl.zeros([LANES], tl.float32)
    for start in range(0, width, LANES * VECTOR):
        offs = start + offs_l
        s = masked_scores(X, MASK, row, offs, offs < width, inv_t, stride_x, strides_mask, sizes_mask)
        m_i, l_i, _, _ = softmax_step(s, m_i, l_i)
    shift = finite_shift(tl.max(m_i, 0))
    total = tl.sum(l_i * tl.math.exp2((m_i - shift) * LOG2E), 0)
    total = tl.where(total == 0.0, 1.0, total)
    log_total, inv_total = tl.math.log2(total) * LN2, 1.0 / total

    # main loop: the row again
    for start in range(0, width, LANES * VECTOR):
        offs = start + offs_l
        inside = offs < width
        s = masked_scores(X, MASK, row, offs, inside, inv_t, stride_x, strides_mask, sizes_mask) - shift
        o = s - log_total if LOG else tl.math.exp2(s * LOG2E) * inv_total
        tl.store(O + row * width + offs, o.to(O.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def softmax_rows_bwd(
    O,
    DO,
    DX,
    stride_do,
    rows,
    width,
    inv_t,
    LOG: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # who am I
    width, stride_do = known_multiple(width, ALIGN), known_multiple(stride_do, ALIGN)
    row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    offs = tl.arange(0, BLOCK_W)[None, :]
    inside = (row < rows) & (offs < width)

    o = tl.load(O + row * width + offs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_W]
    do = tl.load(DO + row * stride_do + offs, mask=inside, other=0.0).to(tl.float32)
    do, part = passed_on(o, do, LOG)
    dx = slope(o, do, tl.sum(part, 1)[:, None], LOG) * inv_t
    tl.store(DX + row * width + offs, dx.to(DX.dtype.element_ty), mask=inside)


@triton.jit
def softmax_chunks_bwd(
    O,
    DO,
    DX,
    stride_do,
    rows,
    width,
    inv_t,
    LOG: tl.constexpr,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # who am I
    width, stride_do = known_multiple(width, ALIGN), known_multiple(stride_do, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    offs_l = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]

    # prologue: the sum
    acc = tl.zeros([LANES, VECTOR], tl.float32)
    for start in range(0, width, LANES * VECTOR):
        offs = start + offs_l
        o = tl.load(O + row * width + offs, mask=offs < width, other=0.0).to(tl.float32)
        do = tl.load(DO + row * stride_do + offs, mask=offs < width, other=0.0).to(tl.float32)
        do, part = passed_on(o, do, LOG)
        acc += part
    total = tl.sum(tl.sum(acc, 1), 0)

    # main loop: the row again
    for start in range(0, width, LANES * VECTOR):
        offs = start + offs_l
        inside = offs < width
        o = tl.load(O + row * width + offs, mask=inside, other=0.0).to(tl.float32)
        do = tl.load(DO + row * stride_do + offs, mask=inside, other=0.0).to(tl.float32)
        do, part = passed_on(o, do, LOG)
        dx = slope(o, do, total, LOG) * inv_t
        tl.store(DX + row * width + offs, dx.to(DX.dtype.element_ty), mask=inside)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills o."""
    x, o = as_rows(call.x), results["o"]
    mask = None if call.mask is None else _reachable(call.mask)
    key = tensors_key(x, o) if mask is None else tensors_key(x, o, mask)
    key = None if key is None else (key, call.log)
    plan = _PLANS.get(key)
    if plan is None:
        kernels = (softmax_rows_fwd, softmax_chunks_fwd)
        strides = (x.stride(0), *_mask_strides(mask))
        plan = _PLANS.put(key, _plan(kernels, _FORWARD, x, strides, call.log))
    with on_device(o):
        plan.launch((x, mask, o), (), (1.0 / call.temperature,))


def backward(call: Call, kept: dict[str, torch.Tensor], incoming, gradients: dict[str, torch.Tensor]) -> None:
    """Fills dx."""
    o, do, dx = kept["o"], as_rows(incoming[0]), gradients["x"]
    key = tensors_key(o, do, dx)
    key = None if key is None else (key, call.log)
    plan = _PLANS.get(key)
    if plan is None:
        kernels = (softmax_rows_bwd, softmax_chunks_bwd)
        plan = _PLANS.put(key, _plan(kernels, _BACKWARD, do, (do.stride(0),), call.log))
    with on_device(o):
        plan.launch((o, do, dx), (), (1.0 / call.temperature,))


def _plan(kernels, most: int, x: torch.Tensor, strides, log: bool) -> Plan:
    """The kernel of whole rows where they have at most so many columns, else that of chunks."""
    rows, width = x.shape
    align = math.gcd(16, width, x.stride(0))
    if width > most:
        vector = 16 // x.element_size()
        warps = _CHUNK // (32 * _EACH)
        return Plan(kernels[1], rows, strides, (rows, width), (log, align, _CHUNK // vector, vector), warps, 1)
    block_w = triton.next_power_of_2(width)
    block_r = min(max(1, _ELEMENTS // block_w), triton.next_power_of_2(rows))
    warps = min(32, max(1, block_r * block_w // (32 * _EACH)))
    plan = Plan(kernels[0], -(-rows // block_r), strides, (rows, width), (log, align, block_r, block_w), warps, 1)
    if warps == 16:
        plan.options["maxnreg"] = 40  # three programs to a multiprocessor
    return plan


def _leading(mask: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions before the last, joined where one stride reaches all."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        elif size > 1:
            found.append((size, stride))
    return found


def _reachable(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose rows three strides reach."""
    return mask if len(_leading(mask)) <= 3 else mask.contiguous()


def _mask_strides(mask: torch.Tensor | None):
    """(strides of three leading dimensions and the last), (sizes of the second and third)"""
    if mask is None:
        return (0, 0, 0, 0), (1, 1)
    leading = _leading(mask)
    (_, i), (n, j), (m, k) = [(1, 0)] * (3 - len(leading)) + leading
    return (i, j, k, mask.stride(-1)), (n, m)
