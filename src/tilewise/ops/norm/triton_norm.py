"""Norms on a GPU: rows that fit stay in registers between their reading and their writing; wider ones are read again.

The backward has a fixed grid: each program takes every so many-th tile of rows and keeps its sums of weight gradients
in registers, a second kernel adds these up. Where a row does not fit, its sums have a kernel of their own and programs
own columns. Widths and strides are passed in units of VECTOR numbers, so that the compiler knows what 16 bytes divide.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.core.dispatch import capability
from tilewise.ops.norm.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, as_rows, on_device, tensors_key
from tilewise.tiles.codes import codes_of, scales_of

_FORWARD, _BACKWARD = 16384, 8192  # columns of a row that stay in registers
_COLUMNS = 1024  # of a program of the backward where they do not
_ELEMENTS = 2048  # of a program's tile where rows are short
_BYTES = 128  # read by each thread of the forward: few warps that wait for each other
_EACH = 16  # elements of a thread elsewhere
_CHUNK = 8192  # elements of a program's step through a wide row
_RESIDENT = 16  # warps of the backward on a multiprocessor, with `_REGISTERS` for each thread
_REGISTERS = 128
_STAGES = 3  # of the backward at most: a tile of rows in registers, others on their way
_PARTS = 512  # parts of weight gradients that are read at once
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def numbers(units, VECTOR: tl.constexpr):
    """A stride in numbers, which 32 bits may not hold where its units fit."""
    return tl.cast(units, tl.int64) * VECTOR


@triton.jit
def load_rows(X, row, offs, inside, stride):
    return tl.load(X + row * stride + offs, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_sum(X, RESIDUAL, row, offs, inside, stride_x, stride_r):
    """What is normed: x, or its sum with the residual, rounded as it is stored."""
    x = load_rows(X, row, offs, inside, stride_x)
    if RESIDUAL is not None:
        x = (x + load_rows(RESIDUAL, row, offs, inside, stride_r)).to(X.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def load_weights(WEIGHT, BIAS, offs, in_width, offset):
    """(weight + offset, bias); programs share these, so they stay in the nearest cache."""
    w, b = 1.0, 0.0
    if WEIGHT is not None:
        w = tl.load(WEIGHT + offs, mask=in_width, other=0.0, eviction_policy="evict_last").to(tl.float32) + offset
    if BIAS is not None:
        b = tl.load(BIAS + offs, mask=in_width, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return w, b


@triton.jit
def load_stats(STATS, row, rows, in_rows, CENTRED: tl.constexpr):
    """(mean, inverse deviation)"""
    mean = 0.0
    if CENTRED:
        mean = tl.load(STATS + row, mask=in_rows, other=0.0)
    return mean, tl.load(STATS + CENTRED * rows + row, mask=in_rows, other=0.0)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def store_stats(STATS, mean, rstd, row, rows, in_rows, CENTRED: tl.constexpr):
    if STATS is not None:
        if CENTRED:
            tl.store(STATS + row, mean, mask=in_rows)
        tl.store(STATS + CENTRED * rows + row, rstd, mask=in_rows)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def norm_rows_fwd(
    X, RESIDUAL, WEIGHT, BIAS, O, SCALE, S, STATS, stride_x, stride_r, rows, width, eps, offset,
    CENTRED: tl.constexpr, ENCODING: tl.constexpr, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # who am I
    width, stride_x, stride_r = width * VECTOR, numbers(stride_x, VECTOR), numbers(stride_r, VECTOR)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < rows
    offs = tl.arange(0, BLOCK_W)[None, :]
    inside = in_rows[:, None] & (offs < width)
    places = row[:, None] * width + offs

    # statistics, of what is in registers
    x = load_sum(X, RESIDUAL, row[:, None], offs, inside, stride_x, stride_r)  # [BLOCK_R, BLOCK_W]
    if S is not None:
        tl.store(S + places, x.to(S.dtype.element_ty), mask=inside)
    mean = tl.zeros([BLOCK_R], tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / width
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / width + eps)
    store_stats(STATS, mean, rstd, row, rows, in_rows, CENTRED)

    # epilogue
    w, b = load_weights(WEIGHT, BIAS, offs, offs < width, offset)
    o = x * rstd[:, None] * w + b
    if ENCODING is None:
        tl.store(O + places, o.to(O.dtype.element_ty), mask=inside)
    else:
        scale = scales_of(o, o, ENCODING)
        tl.store(O + places, codes_of(o, scale, ENCODING).to(tl.uint8), mask=inside)
        tl.store(SCALE + row, scale, mask=in_rows)


@triton.jit(do_not_specialize=["rows"])
def norm_chunks_fwd(
    X, RESIDUAL, WEIGHT, BIAS, O, SCALE, S, STATS, stride_x, stride_r, rows, width, eps, offset,
    CENTRED: tl.constexpr, ENCODING: tl.constexpr, VECTOR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # who am I
    width, stride_x, stride_r = width * VECTOR, numbers(stride_x, VECTOR), numbers(stride_r, VECTOR)
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, CHUNK)[None, :]

    # statistics: each lane has its own, and where the mean is taken out they are joined as Welford's are
    mean_i = tl.zeros([1, CHUNK], tl.float32)
    square_i = tl.zeros([1, CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        offs = start + offs_c
        x = load_sum(X, RESIDUAL, row, offs, offs < width, stride_x, stride_r)  # [1, CHUNK]
        if CENTRED:
            delta = tl.where(offs < width, x - mean_i, 0.0)
            mean_i += delta * (1.0 / (start // CHUNK + 1))
            square_i += delta * (x - mean_i)
        else:
            square_i += x * x
    mean = tl.zeros([1], tl.float32)
    if CENTRED:
        count_i = (width - offs_c + CHUNK - 1) // CHUNK
        mean = tl.sum(mean_i * count_i, 1) / width
        apart = mean_i - mean[:, None]
        square_i += count_i * apart * apart
    rstd = 1.0 / tl.sqrt_rn(tl.sum(square_i, 1) / width + eps)
    store_stats(STATS, mean, rstd, row + tl.arange(0, 1), rows, tl.full([1], True, tl.int1), CENTRED)

    scale = tl.zeros([1], tl.float32)
    if ENCODING is not None:
        for start in range(0, width, CHUNK):
            offs = start + offs_c
            x = load_sum(X, RESIDUAL, row, offs, offs < width, stride_x, stride_r)
            w, b = load_weights(WEIGHT, BIAS, offs, offs < width, offset)
            o = tl.where(offs < width, (x - mean[:, None]) * rstd[:, None] * w + b, 0.0)
            part = scales_of(o, o, ENCODING)
            scale = tl.where((part > scale) | (part != part), part, scale)  # what is NaN stays
        tl.store(SCALE + row + tl.arange(0, 1), scale)

    # main loop: the row again
    for start in range(0, width, CHUNK):
        offs = start + offs_c
        places = row * width + offs
        x = load_sum(X, RESIDUAL, row, offs, offs < width, stride_x, stride_r)
        w, b = load_weights(WEIGHT, BIAS, offs, offs < width, offset)
        o = (x - mean[:, None]) * rstd[:, None] * w + b
        if ENCODING is None:
            tl.store(O + places, o.to(O.dtype.element_ty), mask=offs < width)
        else:
            tl.store(O + places, codes_of(o, scale, ENCODING).to(tl.uint8), mask=offs < width)
        if S is not None:
            tl.store(S + places, x.to(S.dtype.element_ty), mask=offs < width)


@triton.jit(do_not_specialize=["rows"])
def norm_sums_bwd(
    X, WEIGHT, DO, STATS, SUMS, stride_x, stride_do, rows, width, offset,
    CENTRED: tl.constexpr, VECTOR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The means of a wide row that its dx needs: of g * x_hat, and of g  # (1 + CENTRED, rows)"""
    # who am I
    width, stride_x, stride_do = width * VECTOR, numbers(stride_x, VECTOR), numbers(stride_do, VECTOR)
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, CHUNK)

    mean, rstd = load_stats(STATS, row, rows, True, CENTRED)
    along = tl.zeros([CHUNK], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        offs = start + offs_c
        x_hat = (load_rows(X, row, offs, offs < width, stride_x) - mean) * rstd
        w, _ = load_weights(WEIGHT, None, offs, offs < width, offset)
        g = load_rows(DO, row, offs, offs < width, stride_do) * w
        along += g * x_hat
        total += g
    tl.store(SUMS + row, tl.sum(along, 0) / width)
    if CENTRED:
        tl.store(SUMS + rows + row, tl.sum(total, 0) / width)


@triton.jit(do_not_specialize=["rows"])
def norm_rows_bwd(
    X, WEIGHT, DO, DS, STATS, SUMS, DX, PARTS_W, PARTS_B, stride_x, stride_do, stride_ds, rows, width, offset,
    CENTRED: tl.constexpr, VECTOR: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Rows of dx, whole ones, or with SUMS some columns of them, and this program's part of dweight and dbias."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # which wait for this kernel's end
    # who am I
    width, stride_x = width * VECTOR, numbers(stride_x, VECTOR)
    stride_do, stride_ds = numbers(stride_do, VECTOR), numbers(stride_ds, VECTOR)
    part = tl.program_id(0) % PROGRAMS
    offs = (tl.program_id(0) // PROGRAMS * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    in_width = offs < width

    # prologue
    w, _ = load_weights(WEIGHT, None, offs, in_width, offset)
    dw = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    db = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)

    # main loop: every so many-th tile of rows
    for start in tl.range(part * BLOCK_R, rows, PROGRAMS * BLOCK_R, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        inside = (row < rows) & in_width
        x = load_rows(X, row, offs, inside, stride_x)  # [BLOCK_R, BLOCK_W]
        do = load_rows(DO, row, offs, inside, stride_do)
        mean, rstd = load_stats(STATS, row, rows, row < rows, CENTRED)
        x_hat = (x - mean) * rstd
        if DX is not None:
            g = do * w
            total = 0.0
            if SUMS is not None:
                along = tl.load(SUMS + row, mask=row < rows, other=0.0)
                if CENTRED:
                    total = tl.load(SUMS + rows + row, mask=row < rows, other=0.0)
            elif CENTRED:  # threads meet once for both sums
                along, total = tl.reduce((g * x_hat, g), 1, add_both)
                along, total = along[:, None] / width, total[:, None] / width
            else:
                along = tl.sum(g * x_hat, 1)[:, None] / width
            dx = (g - x_hat * along - total) * rstd
            if DS is not None:
                dx += load_rows(DS, row, offs, inside, stride_ds)
            tl.store(DX + row * width + offs, dx.to(DX.dtype.element_ty), mask=inside)
        if PARTS_W is not None:
            dw += do * x_hat
        if PARTS_B is not None:
            db += do

    # epilogue
    places = part * width + offs
    if PARTS_W is not None:
        tl.store(PARTS_W + places, tl.sum(dw, 0)[None, :], mask=in_width)
    if PARTS_B is not None:
        tl.store(PARTS_B + places, tl.sum(db, 0)[None, :], mask=in_width)


@triton.jit
def sum_parts(PARTS, D, parts, width, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr):
    if PARTS is not None:
        offs = (tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
        acc = tl.zeros([BLOCK_P, BLOCK_W], tl.float32)
        for start in range(0, parts, BLOCK_P):
            part = (start + tl.arange(0, BLOCK_P))[:, None]
            acc += tl.load(PARTS + part * width + offs, mask=(part < parts) & (offs < width), other=0.0)
        tl.store(D + offs, tl.sum(acc, 0)[None, :].to(D.dtype.element_ty), mask=offs < width)


@triton.jit
def norm_weights_bwd(
    PARTS_W, PARTS_B, DW, DB, parts, width, EARLY: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for the parts
    sum_parts(PARTS_W, DW, parts, width, BLOCK_P, BLOCK_W)
    sum_parts(PARTS_B, DB, parts, width, BLOCK_P, BLOCK_W)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills o or codes and scale, x where there is a residual, and stats where there is an o."""
    x, residual = as_rows(call.x), None if call.residual is None else as_rows(call.residual)
    weight, bias = _vector(call.weight), _vector(call.bias)
    o = results["o"] if call.quantize is None else results["codes"].view(torch.uint8)
    pointers = (x, residual, weight, bias, o, results.get("scale"), results.get("x"), results.get("stats"))
    key = _key(call, pointers)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _forward_plan(call, x, residual))
    with on_device(o):
        plan.launch(pointers, (), (call.eps, call.offset))


def backward(call: Call, kept: dict[str, torch.Tensor], incoming, gradients: dict[str, torch.Tensor]) -> None:
    """Fills those of dx, dweight and dbias that are there."""
    x, do, stats = as_rows(call.x), as_rows(incoming[0]), kept["stats"]
    ds = as_rows(incoming[1]) if len(incoming) > 1 else None
    weight = _vector(call.weight)
    dx, dw, db = (gradients.get(name) for name in ("x", "weight", "bias"))
    read = (x, weight, do, ds, stats)
    key = _key(call, (*read, dx, dw, db))
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS.put(key, _Backward(call, x, do, ds, weighted=dw is not None or db is not None))
    sums, parts_w, parts_b = (
        torch.empty(shape, dtype=torch.float32, device=x.device) if wanted else None
        for shape, wanted in (
            (stats.shape, plans.sums is not None and dx is not None),
            (plans.parts, dw is not None),
            (plans.parts, db is not None),
        )
    )
    with on_device(x):
        if sums is not None:
            plans.sums.launch((x, weight, do, stats, sums), (), (call.offset,))
        plans.rows.launch((*read, sums, dx, parts_w, parts_b), (), (call.offset,))
        if plans.weights is not None:
            plans.weights.launch((parts_w, parts_b, dw, db), ())


def _forward_plan(call: Call, x: torch.Tensor, residual: torch.Tensor | None) -> Plan:
    """The kernel of whole rows where they fit, else that of chunks."""
    rows, width = x.shape
    vector, (units, *strides) = _units(x, residual)
    how = (call.centred, call.quantize, vector)
    if width > _FORWARD:
        return Plan(norm_chunks_fwd, rows, strides, (rows, units), (*how, _CHUNK), _CHUNK // (32 * _EACH), 1)
    read = x.element_size() if residual is None else 2 * x.element_size()
    block_r, block_w, warps = _tile(width, _BYTES // read)
    return Plan(norm_rows_fwd, -(-rows // block_r), strides, (rows, units), (*how, block_r, block_w), warps, 1)


class _Backward:
    """Plans of a backward: `sums` of rows that do not fit, `rows`, and where weights take gradients, whose parts have
    shape `parts`, `weights`.
    """

    def __init__(self, call: Call, x: torch.Tensor, do: torch.Tensor, ds: torch.Tensor | None, weighted: bool) -> None:
        rows, width = x.shape
        vector, (units, *strides) = _units(x, do, ds)
        fits = width <= _BACKWARD
        block_r, block_w, warps = _tile(width if fits else _COLUMNS, _EACH)
        columns = -(-width // block_w)
        resident = _RESIDENT // warps  # programs of a multiprocessor
        programs = min(-(-rows // block_r), max(1, resident * _multiprocessors(x.device) // columns))
        tile = (2 if ds is None else 3) * block_r * block_w * x.element_size()
        stages = 1 + min(_STAGES - 1, _shared_memory(x.device) // resident // (tile + 1024))
        early = weighted and capability(x.device) >= 90
        self.parts = (programs, width)
        self.sums, self.weights = None, None
        if not fits:
            how = (call.centred, vector, _CHUNK)
            self.sums = Plan(norm_sums_bwd, rows, strides[:2], (rows, units), how, _CHUNK // (32 * _EACH), 1)
        constants = (call.centred, vector, programs, stages, early, block_r, block_w)
        self.rows = Plan(
            norm_rows_bwd,
            programs * columns,
            strides,
            (rows, units),
            constants,
            warps,
            1,
            options={"maxnreg": _REGISTERS},
        )
        if weighted:
            block_p = min(_PARTS, triton.next_power_of_2(programs))
            self.weights = Plan(
                norm_weights_bwd, -(-width // 16), (), self.parts, (early, block_p, 16), 8, 1, early=early
            )


def _units(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[int, list[int]]:
    """(numbers that travel together at most, the width and all strides from row to row in units of so many)"""
    sizes = [x.shape[1], x.stride(0), *(0 if other is None else other.stride(0) for other in others)]
    vector = math.gcd(8, *sizes)
    return vector, [size // vector for size in sizes]


def _tile(width: int, each: int) -> tuple[int, int, int]:
    """(rows of a tile, columns, warps); the number of rows must not decide in which order a row is summed"""
    block_w = triton.next_power_of_2(width)
    block_r = max(1, _ELEMENTS // block_w)
    return block_r, block_w, max(1, block_r * block_w // (32 * each))


def _key(call: Call, pointers):
    """Everything that may change which kernel runs or how; None where a pointer would need a variant of its own."""
    key = tensors_key(*(x for x in pointers if x is not None))
    there = tuple(x is not None for x in pointers)
    return None if key is None else (key, there, call.centred, call.quantize)


def _vector(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.shared_memory_per_multiprocessor if properties else 164 * 1024
