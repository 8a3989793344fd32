"""Linear layers on a GPU: a program multiplies a tile of rows and a tile of weights, over all of in_features in order.

All that decides how a row is summed, the tile and thus the instruction, is a function of the weight's shape and dtype:
every number of rows runs the same compiled kernel. Rows and weights whose addresses would need another one are copied.
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.linear.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key

_BYTES = 16  # that addresses are multiples of
_ROWS = 64  # of a tile, however few there are: those of one matrix instruction of Hopper
_PROGRAMS = 128  # for one tile of rows: tiles of weights are as wide as leaves about one for each multiprocessor
_GROUP = 8  # tiles of rows that read a tile of weights one after another, so that it is still in L2
_PLANS = Plans()


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile of rows, tile of weights) of a program: GROUP tiles of rows visit each tile of weights in turn, then the
    next GROUP do.
    """
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    place = program % (GROUP * tiles_n)
    return first + place % height, place // height


@triton.jit(do_not_specialize=["stride_x", "stride_w", "rows"])
def linear_fwd(
    X, WEIGHT, BIAS, O, stride_x, stride_w, rows, out_features, in_features,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # who am I
    in_features = in_features * VECTOR
    m, n = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N), GROUP)
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_rows, in_columns = offs_m < rows, offs_n < out_features

    # prologue
    x_rows = X + (offs_m * (tl.cast(stride_x, tl.int64) * VECTOR))[:, None]
    w_rows = WEIGHT + (offs_n * (tl.cast(stride_w, tl.int64) * VECTOR))[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    # main loop
    for start in range(0, in_features, BLOCK_K):
        k = (start + offs_k)[None, :]
        x = tl.load(x_rows + k, mask=in_rows[:, None] & (k < in_features), other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(w_rows + k, mask=in_columns[:, None] & (k < in_features), other=0.0)  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")

    # epilogue
    if BIAS is not None:
        acc += tl.load(BIAS + offs_n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    o = O + (offs_m * out_features)[:, None] + offs_n[None, :]
    tl.store(o, acc.to(O.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills o."""
    in_features = call.weight.shape[1]
    vector = math.gcd(_BYTES // call.x.element_size(), in_features)
    x, weight = (_reachable(part, vector) for part in (call.x.reshape(-1, in_features), call.weight))
    bias = None if call.bias is None else _reachable(call.bias, 1)
    pointers = (x, weight, bias, results["o"])
    key = tensors_key(*(part for part in pointers if part is not None))
    key = None if key is None else (key, bias is None)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(x, weight, vector))
    with on_device(x):
        plan.launch(pointers, ())


def _plan(x: torch.Tensor, weight: torch.Tensor, vector: int) -> Plan:
    (rows, in_features), out_features = x.shape, weight.shape[0]
    block_n, block_k, stages = _tile(out_features, x.element_size(), vector)
    grid = triton.cdiv(rows, _ROWS) * triton.cdiv(out_features, block_n)
    strides = (x.stride(0) // vector, weight.stride(0) // vector)
    sizes = (rows, out_features, in_features // vector)
    return Plan(linear_fwd, grid, strides, sizes, (vector, _ROWS, block_n, block_k, _GROUP), 4, stages)


def _tile(out_features: int, element_size: int, vector: int) -> tuple[int, int, int]:
    """(out_features of a tile, in_features of a step, stages); the number of rows must not decide any of them."""
    widths = (64,) if element_size == 4 else (128, 64)  # float32 has no tensor cores: operands are in registers
    block_n = next((n for n in widths if out_features >= n * _PROGRAMS), 32)
    if element_size == 4 or vector * element_size < _BYTES:
        return block_n, 32, 3
    return block_n, 128 if block_n == 32 else 64, 4  # a narrow tile has as many bytes on their way by longer steps


def _reachable(x: torch.Tensor, vector: int) -> torch.Tensor:
    """x where it begins at a multiple of 16 bytes and its rows lie by multiples of `vector` numbers, else a copy."""
    inside = x.stride(-1) == 1 and all(stride % vector == 0 for stride in x.stride()[:-1])
    return x if inside and x.data_ptr() % _BYTES == 0 else x.clone(memory_format=torch.contiguous_format)
