"""Gated linear units on a GPU: numbers are counted in units of 16 bytes, and a program takes so many of them in a line,
over the ends of rows, so that no width leaves lanes idle.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.glu.problem import Call, Tensors
from tilewise.ops.triton_launch import Plan, Plans, as_rows, on_device, tensors_key
from tilewise.tiles.arithmetic import LOG2E

_BYTES = 4096  # of each tensor that a program reads
_WARPS = 4
_NARROW = 2**30  # units that 32 bits count
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def logistic(x):
    """(1 / (1 + exp(-x)), its derivative), both to the last places however near 0 they are."""
    e = tl.math.exp2(-tl.abs(x) * LOG2E)
    near = 1.0 / (1.0 + e)
    far = e * near
    return tl.where(x < 0.0, far, near), near * far


@triton.jit
def normal(x, ROUNDED: tl.constexpr):
    """(distribution function, density) of the standard normal distribution, the first to 4e-7 where results are rounded
    to 16 bits.
    """
    bell = tl.math.exp2(x * x * (-0.5 * LOG2E))
    if ROUNDED:  # by the same exponential, as erf takes more time than memory does; Abramowitz and Stegun, 7.1.26
        t = 1.0 / (1.0 + 0.2316418886 * tl.abs(x))
        tail = 0.5307027145 * t - 0.7265760135
        tail = tail * t + 0.7107068705
        tail = tail * t - 0.142248368
        tail = (tail * t + 0.127414796) * t * bell
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    else:
        below = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    return below, 0.3989422804014327 * bell


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr):
    """(the activation of x, its derivative); that of relu is chosen, not multiplied by, as PyTorch does."""
    if ACTIVATION == "relu":
        value = tl.where(x < 0.0, 0.0, x)
        slope = 0.0
    elif ACTIVATION == "silu":
        part, density = logistic(x)
        value = x * part
        slope = part + x * density
    elif ACTIVATION == "gelu":
        part, density = normal(x, ROUNDED)
        value = x * part
        slope = part + x * density
    else:  # (1 + tanh(y)) / 2 is the logistic function of 2 y
        square = x * x
        part, density = logistic(x * (1.5957691216057308 + 0.07135481627260025 * square))
        value = x * part
        slope = part + x * density * (1.5957691216057308 + 0.21406444881780075 * square)
    return value, slope


@triton.jit
def own_units(units, width, FLAT: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr):
    """This program's units: (row, place in its row, place among all, whether they exist)  # [UNITS, 1]"""
    start = tl.program_id(0)
    if FLAT or WIDE:  # else 32 bits do, by which division is quicker
        start = start.to(tl.int64)
    place = start * UNITS + tl.arange(0, UNITS)[:, None]
    row = tl.zeros_like(place) if FLAT else place // width
    return row.to(tl.int64), place - row * width, place.to(tl.int64), place < units


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_gate", "stride_up", "up_at", "units", "width"])
def glu_fwd(
    GATE, UP, O, stride_gate, stride_up, up_at, units, width,
    ACTIVATION: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    row, column, place, inside = own_units(units, width, FLAT, WIDE, UNITS)
    offs_v = tl.arange(0, VECTOR)[None, :]
    gate = tl.load(GATE + (row * stride_gate + column) * VECTOR + offs_v, mask=inside).to(tl.float32)
    up = tl.load(UP + (row * stride_up + up_at + column) * VECTOR + offs_v, mask=inside).to(tl.float32)
    value, _ = activated(gate, ACTIVATION, GATE.dtype.element_ty != tl.float32)  # [UNITS, VECTOR]
    tl.store(O + place * VECTOR + offs_v, (value * up).to(O.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_gate", "stride_up", "stride_do", "stride_d", "up_at", "units", "width"])
def glu_bwd(
    GATE, UP, DO, DGATE, DUP, stride_gate, stride_up, stride_do, stride_d, up_at, units, width,
    ACTIVATION: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    row, column, _, inside = own_units(units, width, FLAT, WIDE, UNITS)
    offs_v = tl.arange(0, VECTOR)[None, :]
    gate = tl.load(GATE + (row * stride_gate + column) * VECTOR + offs_v, mask=inside).to(tl.float32)
    up = tl.load(UP + (row * stride_up + up_at + column) * VECTOR + offs_v, mask=inside).to(tl.float32)
    do = tl.load(DO + (row * stride_do + column) * VECTOR + offs_v, mask=inside).to(tl.float32)
    value, slope = activated(gate, ACTIVATION, GATE.dtype.element_ty != tl.float32)  # [UNITS, VECTOR]
    if DGATE is not None:
        dgate = do * up
        dgate = tl.where(gate <= 0.0, 0.0, dgate) if ACTIVATION == "relu" else dgate * slope
        dgate_ptrs = DGATE + (row * stride_d + column) * VECTOR + offs_v
        tl.store(dgate_ptrs, dgate.to(DGATE.dtype.element_ty), mask=inside)
    if DUP is not None:
        dup_ptrs = DUP + (row * stride_d + up_at + column) * VECTOR + offs_v
        tl.store(dup_ptrs, (do * value).to(DUP.dtype.element_ty), mask=inside)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    inputs = _read(call)
    o = results["o"]
    key = tensors_key(*inputs, o)
    key = None if key is None else (key, call.activation, call.up is None)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(glu_fwd, call, inputs))
    with on_device(o):
        plan.launch((*inputs, o), ())


def backward(call: Call, kept: Tensors, incoming, gradients: Tensors) -> None:
    """Fills the gradients that are wanted."""
    inputs = (*_read(call), as_rows(incoming[0]))
    dgate = gradients.get("gate")
    dup = dgate if call.up is None else gradients.get("up")
    written = [as_rows(x) for x in (dgate, dup) if x is not None]
    key = tensors_key(*inputs, *written)
    key = None if key is None else (key, call.activation, call.up is None, dgate is None, dup is None)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(glu_bwd, call, (*inputs, written[0])))
    with on_device(inputs[0]):
        plan.launch((*inputs, dgate, dup), ())


def _plan(kernel, call: Call, tensors) -> Plan:
    """For tensors of rows that a kernel takes strides of."""
    rows, width = len(tensors[0]), call.halves[0].shape[-1]
    strides = [x.stride(0) for x in tensors]
    flat = rows == 1 or all(stride == width for stride in strides)
    if flat:
        rows, width, strides = 1, rows * width, [0] * len(tensors)
    size = tensors[0].element_size()
    vector = math.gcd(16 // size, width, *strides)
    units = width // vector
    count = _BYTES // (size * vector)
    up_at = units if call.up is None else 0
    constants = (call.activation, flat, rows * units > _NARROW, vector, count)
    strides = (*(stride // vector for stride in strides), up_at)
    return Plan(kernel, -(-rows * units // count), strides, (rows * units, units), constants, _WARPS, 1)


def _read(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """What gate and up are read from: one tensor that holds both stands for either, since halves may be misaligned."""
    gate = as_rows(call.gate)
    return gate, gate if call.up is None else as_rows(call.up)
