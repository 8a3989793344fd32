"""Gated linear units on a GPU: one pass forward, and one backward that computes the activation again."""

import math

import triton
import triton.language as tl

from tilewise.ops.glu.problem import Call, Tensors, halves_of
from tilewise.ops.triton_launch import Plan, Plans, as_rows, on_device, tensors_key
from tilewise.tiles.arithmetic import LOG2E, sigmoid, tanh

_ELEMENTS = 2048  # of a program's tile
_WARPS = 4
_PLANS = Plans()
_ROOT_HALF, _C, _CUBIC = math.sqrt(0.5), math.sqrt(2.0 / math.pi), 0.044715
ROOT_HALF = tl.constexpr(_ROOT_HALF)
DENSITY = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))  # of the normal distribution, at 0
C = tl.constexpr(_C)
CUBIC = tl.constexpr(_CUBIC)


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def activation(x, KIND: tl.constexpr):
    """(value, derivative)"""
    if KIND == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif KIND == "gelu":
        phi = 0.5 + 0.5 * tl.math.erf(x * ROOT_HALF)
        value = x * phi
        slope = phi + x * tl.math.exp2(-0.5 * LOG2E * x * x) * DENSITY
    elif KIND == "gelu_tanh":
        t = tanh(C * x * (1.0 + CUBIC * x * x))
        value = 0.5 * x * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * C * (1.0 + 3.0 * CUBIC * x * x)
    else:
        value = tl.where(x <= 0.0, 0.0, x)  # NaN stays
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    return value, slope


@triton.jit
def own_tile(rows, width, blocks, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """(rows, columns, which are there) of this program's tile  # [BLOCK_R, BLOCK_W]"""
    tile = tl.program_id(0).to(tl.int64)
    row = (tile // blocks * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    first = tile % blocks * BLOCK_W
    offs = tl.arange(0, BLOCK_W)[None, :]
    return row, first + offs, (row < rows) & (offs < width - first)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "blocks"])
def glu_fwd(
    GATE, UP, O, stride_g, stride_u, rows, width, blocks,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row, offs, inside = own_tile(rows, width, blocks, BLOCK_R, BLOCK_W)
    gate = tl.load(GATE + row * stride_g + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + row * stride_u + offs, mask=inside, other=0.0).to(tl.float32)
    o = activation(gate, KIND)[0] * up
    tl.store(O + row * width + offs, o.to(O.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks"])
def glu_bwd(
    GATE, UP, DO, DGATE, DUP, stride_g, stride_u, stride_do, stride_dg, stride_du, rows, width, blocks,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row, offs, inside = own_tile(rows, width, blocks, BLOCK_R, BLOCK_W)
    gate = tl.load(GATE + row * stride_g + offs, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(DO + row * stride_do + offs, mask=inside, other=0.0).to(tl.float32)
    value, slope = activation(gate, KIND)
    if DGATE is not None:
        up = tl.load(UP + row * stride_u + offs, mask=inside, other=0.0).to(tl.float32)
        tl.store(DGATE + row * stride_dg + offs, (do * up * slope).to(DGATE.dtype.element_ty), mask=inside)
    if DUP is not None:
        tl.store(DUP + row * stride_du + offs, (do * value).to(DUP.dtype.element_ty), mask=inside)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    gate, up = (as_rows(x) for x in call.halves)
    o = results["o"]
    _launch(glu_fwd, call.activation, (gate, up), (o,))


def backward(call: Call, kept: Tensors, incoming, gradients: Tensors) -> None:
    """Fills the gradients that are wanted."""
    gate, up = (as_rows(x) for x in call.halves)
    into = (gradients.get("gate"), gradients.get("up")) if call.up is not None else halves_of(gradients["gate"], None)
    into = tuple(None if x is None else as_rows(x) for x in into)
    _launch(glu_bwd, call.activation, (gate, up, as_rows(incoming[0])), into)


def _launch(kernel, activation: str, inputs, outputs) -> None:
    there = [x for x in outputs if x is not None]
    key = tensors_key(*inputs, *there)
    key = None if key is None else (key, kernel is glu_fwd, activation, outputs[0] is None)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(kernel, activation, inputs, outputs))
    with on_device(inputs[0]):
        plan.launch((*inputs, *outputs), ())


def _plan(kernel, activation: str, inputs, outputs) -> Plan:
    rows, width = inputs[0].shape
    strided = (*inputs, *(outputs if kernel is glu_bwd else ()))
    strides = [0 if x is None else x.stride(0) for x in strided]
    if all(stride in (0, width) for stride in strides) and 0 not in strides[: len(inputs)]:
        rows, width = 1, rows * width  # one row, without a tail for each
    block_w = min(_ELEMENTS, triton.next_power_of_2(width))
    block_r = min(_ELEMENTS // block_w, triton.next_power_of_2(rows))
    blocks = -(-width // block_w)
    grid = -(-rows // block_r) * blocks
    return Plan(kernel, grid, tuple(strides), (rows, width, blocks), (activation, block_r, block_w), _WARPS, 1)
