"""Means of tiles on a GPU: a program has a tile of one head, and reads it once, or twice where it spreads.

A thread adds up what it has of a step's rows: threads put their sums together once, at the end.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.tile_means.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.schedule.selection import SHORTEST
from tilewise.tiles.visit import locate

NORMAL = tl.constexpr(SHORTEST**2)
_EACH = 64  # elements of a thread in a step through a tile
_WARPS = 1
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def place_of(pid, CU, batch, seqlen, tiles, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a program: (batch element, head, first row of its tile in x, how many rows it has, where its results stand)"""
    h = pid % HEADS
    slot = pid // HEADS
    if CU is None:
        b = (slot // tiles).to(tl.int64)
        tile = slot % tiles
        first = tile.to(tl.int64) * BLOCK
        count = seqlen - first
        cell = (b * HEADS + h) * tiles + tile
    else:
        sequence, tile = locate(slot, CU, batch, BLOCK)
        b = (slot * 0).to(tl.int64)
        start = tl.load(CU + sequence).to(tl.int64)
        first = start + tile * BLOCK
        count = tl.load(CU + sequence + 1) - first
        cell = b + h * tiles + slot
    return b, h, first, tl.minimum(count, BLOCK).to(tl.int32), cell


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["batch", "seqlen", "tiles"])
def tile_means_fwd(
    X, CU, MEAN, SIMILARITY, VARIANCE, stride_b, stride_t, stride_h, batch, seqlen, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # who am I
    b, h, first, count, cell = place_of(tl.program_id(0), CU, batch, seqlen, tiles, HEADS, BLOCK)
    d = tl.arange(0, BLOCK_D)
    offs = tl.arange(0, STEP)
    x_rows = X + b * stride_b + h.to(tl.int64) * stride_h + first * stride_t + d[None, :]

    total = tl.zeros([AT_ONCE, BLOCK_D], tl.float32)
    of_units = tl.zeros([AT_ONCE, BLOCK_D], tl.float32)
    for start in tl.range(0, BLOCK, STEP, loop_unroll_factor=4):
        row = start + offs
        inside = (row < count)[:, None] & (d < DIM)[None, :]
        x = tl.load(x_rows + (row.to(tl.int64) * stride_t)[:, None], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(x.reshape(STEP // AT_ONCE, AT_ONCE, BLOCK_D), 0)
        if SIMILARITY is not None:
            size = tl.sum(x * x, 1)
            units = x * tl.where(size < NORMAL, 0.0, tl.math.rsqrt(size))[:, None]
            of_units += tl.sum(units.reshape(STEP // AT_ONCE, AT_ONCE, BLOCK_D), 0)

    # epilogue: a slot that no tile has gives 0
    inv = 1.0 / tl.maximum(count, 1).to(tl.float32)
    mean = tl.sum(total, 0) * inv
    tl.store(MEAN + cell * DIM + d, mean, mask=d < DIM)
    if SIMILARITY is not None:
        alike = tl.sum(of_units, 0) * inv
        tl.store(SIMILARITY + cell, tl.sum(alike * alike, 0))
    if VARIANCE is not None:
        squares = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, BLOCK, STEP):
            row = start + offs
            inside = (row < count)[:, None] & (d < DIM)[None, :]
            x = tl.load(x_rows + (row.to(tl.int64) * stride_t)[:, None], mask=inside, other=0.0).to(tl.float32)
            away = tl.where(inside, x - mean[None, :], 0.0)
            squares += tl.sum(away * away, 0)
        tl.store(VARIANCE + cell * DIM + d, squares * inv, mask=d < DIM)


@triton.jit(do_not_specialize=["batch", "seqlen", "tiles"])
def tile_means_bwd(
    X, CU, MEAN, DMEAN, DVARIANCE, DX, stride_b, stride_t, stride_h, out_b, out_t, out_h, batch, seqlen, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # who am I
    b, h, first, count, cell = place_of(tl.program_id(0), CU, batch, seqlen, tiles, HEADS, BLOCK)
    d = tl.arange(0, BLOCK_D)
    offs = tl.arange(0, STEP)
    x_rows = X + b * stride_b + h.to(tl.int64) * stride_h + first * stride_t + d[None, :]
    dx_rows = DX + b * out_b + h.to(tl.int64) * out_h + first * out_t + d[None, :]
    at = cell * DIM + d

    inv = 1.0 / tl.maximum(count, 1).to(tl.float32)
    slope = tl.load(DMEAN + at, mask=d < DIM, other=0.0) * inv
    for start in range(0, BLOCK, STEP):
        row = start + offs
        inside = (row < count)[:, None] & (d < DIM)[None, :]
        dx = tl.broadcast_to(slope[None, :], STEP, BLOCK_D)
        if DVARIANCE is not None:
            x = tl.load(x_rows + (row.to(tl.int64) * stride_t)[:, None], mask=inside, other=0.0).to(tl.float32)
            mean = tl.load(MEAN + at, mask=d < DIM, other=0.0)
            by = tl.load(DVARIANCE + at, mask=d < DIM, other=0.0) * (2.0 * inv)
            dx += (x - mean[None, :]) * by[None, :]
        tl.store(dx_rows + (row.to(tl.int64) * out_t)[:, None], dx.to(DX.dtype.element_ty), mask=inside)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills mean, and similarity and variance where they are wanted."""
    x, cu = call.x, call.cu_seqlens
    key = _key(call, x, *results.values())
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(tile_means_fwd, call, x, _strides(x)))
    with on_device(x):
        plan.launch((x, cu, results["mean"], results.get("similarity"), results.get("variance")), ())


def backward(call: Call, kept: dict[str, torch.Tensor], incoming, gradients: dict[str, torch.Tensor]) -> None:
    """Fills dx."""
    x, cu, dx = kept["x"], call.cu_seqlens, gradients["x"]
    dmean, dvariance = incoming[0].contiguous(), incoming[-1].contiguous() if call.variance else None
    key = _key(call, x, dx, dmean)
    key = key and ("backward", key)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(tile_means_bwd, call, x, (*_strides(x), *_strides(dx))))
    with on_device(x):
        plan.launch((x, cu, kept["mean"], dmean, dvariance, dx), ())


def _key(call: Call, *tensors: torch.Tensor):
    key = tensors_key(*tensors, *([] if call.cu_seqlens is None else [call.cu_seqlens]))
    return None if key is None else (key, call.block, call.cu_seqlens is None, call.similarity, call.variance)


def _plan(kernel, call: Call, x: torch.Tensor, strides: tuple[int, ...]) -> Plan:
    *_, heads, dim = x.shape
    packed = call.cu_seqlens is not None
    batch = call.cu_seqlens.shape[0] - 1 if packed else x.shape[0]
    tiles = x.shape[0] // call.block + batch if packed else -(-x.shape[1] // call.block)
    block_d = max(16, triton.next_power_of_2(dim))
    step = min(triton.next_power_of_2(call.block), max(1, _WARPS * 32 * _EACH // block_d))
    warps = max(1, step * block_d // (32 * _EACH))
    lines = max(1, 32 * warps * 16 // (x.element_size() * block_d))  # rows that threads of 16 bytes reach
    at_once = (min(step, lines),) if kernel is tile_means_fwd else ()
    grid = tiles * heads * (1 if packed else batch)
    constants = (heads, dim, call.block, step, *at_once, block_d)
    return Plan(kernel, grid, strides, (batch, x.shape[-3], tiles), constants, warps, 1)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides; a packed tensor has no batch."""
    return (0, *x.stride()[:2]) if x.ndim == 3 else x.stride()[:3]
