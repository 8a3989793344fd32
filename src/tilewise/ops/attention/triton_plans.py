"""What a call's sizes and its formula decide about a kernel: tiles, grid, compile-time arguments, and how rows come."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.core.dispatch import capability, interpreting
from tilewise.formula.emit import Captured, encoded, number_arguments, tensor_arguments
from tilewise.formula.structure import Bound
from tilewise.ops.attention.configs import Config, config, padded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_bwd import attention_bwd_keys, attention_bwd_queries
from tilewise.ops.attention.triton_fwd import attention_fwd
from tilewise.ops.attention.variant import (
    MaskFunctions,
    ScoreFunctions,
    formula_kind,
    mask_functions,
    score_functions,
)
from tilewise.ops.triton_launch import Plan, describable
from tilewise.schedule.rule import tile_rule
from tilewise.tiles.load import DEVICE, HOST, POINTER

_INT32 = 2**31 - 1  # coordinates of the tensor memory accelerator


class Listing(NamedTuple):
    """What a kernel's lists of tiles are like, where its formula needs any (`triton_lists.tile_lists`)."""

    by_length: bool = False  # the longest have the first turns
    part: int | None = None  # tiles are classified for so many positions of a row at a time
    moved: bool = False  # tiles of keys begin where it is best for a row


def forward_plan(call: Call) -> Plan:
    """The plan of `attention_fwd`."""
    mask, score = functions(call)
    side = score and score.queries
    strides = (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(call.new_output()))
    return _plan(
        attention_fwd,
        "forward",
        call,
        strides,
        mask,
        (side and side.once, side and side.apply),
        (call.skip is not None,),
    )


def backward_plans(call: Call, o: torch.Tensor, do: torch.Tensor) -> tuple[Plan, Plan]:
    """The plans of `attention_bwd_queries` and of `attention_bwd_keys`."""
    mask, score = functions(call)
    inputs = (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(do))
    side = score and score.queries
    strides = (*inputs, *strides_of(o), *_contiguous(call.q))
    scoring = (side and side.once, side and side.apply, side and side.slope, side and side.accumulate)
    queries = _plan(attention_bwd_queries, "queries", call, strides, mask, scoring, (), do)
    side = score and score.keys
    strides = (*inputs, *_contiguous(call.k), *_contiguous(call.v))
    keys = _plan(
        attention_bwd_keys,
        "keys",
        call,
        strides,
        mask,
        (side and side.once, side and side.apply, side and side.slope),
        (),
        do,
    )
    return queries, keys


def _plan(
    kernel: Any, name: str, call: Call, strides: tuple[int, ...], mask: MaskFunctions | None, scoring: tuple[Any, ...],
    own: tuple[bool, ...] = (), *fetched: torch.Tensor,
) -> Plan:  # fmt: skip
    """`scoring` is the score's functions, `own` what only this kernel is told; `fetched`, what it walks besides q, k
    and v.
    """
    of_keys = name == "keys"
    cfg = config_of(name, call)
    tma = _tma(call, cfg, *fetched)
    blocks = (cfg.block_m, cfg.block_n, padded(call.head_dim), padded(call.head_dim_v))
    slots = slots_of(call, cfg, of_keys)
    pairs = (call.num_heads_kv if of_keys else call.num_heads_q) * batches_of(call)
    return Plan(
        kernel,
        grid=slots * pairs,
        strides=strides,
        sizes=(*lengths_of(call), slots, together(call, mask, slots, pairs)),
        constants=(*_sizes(call), *blocks, *visibility(mask, of_keys), *scoring, *_modes(call), *own, tma.value),
        warps=cfg.warps,
        stages=cfg.stages,
        extra=(cfg, mask, Listing()),
        boxes=_boxes(name, tma, *blocks),
        scratch=tma is DEVICE,
    )


def _boxes(name: str, tma: Any, m: int, n: int, d: int, d_v: int) -> dict[int, tuple[int, ...]]:
    """The tiles of a kernel's pointers that go as descriptors, by place."""
    if tma is HOST:
        return {
            "forward": {1: (n, d), 2: (n, d_v), 4: (m, d_v)},  # k, v, o
            "queries": {1: (n, d), 2: (n, d_v), 9: (m, d)},  # k, v, dq
            "keys": {0: (m, d), 3: (m, d_v), 4: (m,), 5: (m,), 6: (n, d), 7: (n, d_v)},  # q, do, lse2, delta, dk, dv
        }[name]
    return {4: (m,), 5: (m,)} if tma is DEVICE and name == "keys" else {}  # lse2, delta


# arguments -----------------------------------------------------------------------------------------------------------


def config_of(kernel: str, call: Call) -> Config:
    kind = formula_kind(call.mask and call.mask.text, call.score and call.score.text)
    if call.dropout > 0.0:
        kind = "dropout"  # its random bits take shared memory
    return config(kernel, capability(call.q.device), call.head_dim, call.head_dim_v, call.q.element_size(), kind)


def _sizes(call: Call) -> tuple[int, ...]:
    return (call.num_heads_q, call.group, call.head_dim, call.head_dim_v)


def lengths_of(call: Call) -> tuple[int, ...]:
    """batch, seqlen_q, seqlen_k, rows_q"""
    return (call.batch, call.rows_q, call.rows_k, call.rows_q)


def batches_of(call: Call) -> int:
    """Batch elements that own tiles by themselves; packed sequences count as one."""
    return 1 if call.packed else call.batch


def visibility(mask: MaskFunctions | None, of_keys: bool) -> tuple[Any, ...]:
    """LISTS, TILES, ROWS, MASK_ONCE, VISIBLE"""
    if mask is None:
        return (False, None, None, None, None)
    side = mask.keys if of_keys else mask.queries
    return (mask.classify is not None, side.tiles, side.rows, side.once, side.visible)


def _modes(call: Call) -> tuple[Any, ...]:
    """SCALE_FIRST, PACKED, DROPOUT, PRECISION"""
    scale_first = call.score is not None or call.scale <= 0.0
    return (scale_first, call.packed, call.dropout > 0.0, matmul_precision(call))


def _tma(call: Call, cfg: Config, *others: torch.Tensor) -> Any:
    """How the kernels' tiles come (`tiles.load`): one descriptor would show packed sequences their neighbours' rows."""
    if not cfg.tma or row_values_size(call) > _INT32:
        return POINTER
    return HOST if all(map(describable, (call.q, call.k, call.v, *others))) else DEVICE


def row_values_size(call: Call) -> int:
    """Numbers in a tensor that `tiles.load.row_values` divides."""
    rows = call.rows_q + (3 * call.batch if call.packed else 0)
    return batches_of(call) * call.num_heads_q * (-(-rows // 4) * 4)


def scalars_of(call: Call) -> tuple[float, float, float]:
    """scale, dropout, keep_scale"""
    return (call.scale, call.dropout, 1.0 / (1.0 - call.dropout))


def matmul_precision(call: Call) -> str:
    """How float32 products are taken: PyTorch's setting for matrix products."""
    return "tf32" if call.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides; a packed tensor has no batch."""
    strides = x.stride()
    return (0, strides[0], strides[1]) if len(strides) == 3 else strides[:3]


def _contiguous(x: torch.Tensor) -> tuple[int, int, int]:
    """`strides_of` a contiguous tensor of this shape."""
    row = x.shape[-2] * x.shape[-1]
    return (x.shape[-3] * row if x.ndim == 4 else 0, row, x.shape[-1])


def functions(call: Call, dialect: str = "triton") -> tuple[MaskFunctions | None, ScoreFunctions | None]:
    """The device functions of a call's formula."""
    mask = score = None
    if call.mask is not None:
        tables = tuple(Captured(len(t.dims), True) for t in tile_rule(call.mask.text).tables)
        mask = mask_functions(call.mask.text, _captured(call.mask.tensors), tables, dialect)
    if call.score is not None:
        fast = call.q.dtype != torch.float32 and not interpreting()
        seen = call.mask.text if call.mask is not None and dialect == "gluon" else None
        captured = _captured(call.score.tensors)
        score = score_functions(call.score.text, captured, call.grad_captured, fast, dialect, seen)
    return mask, score


def formula_arguments(call: Call) -> tuple[Any, ...]:
    """mask_args, mask_nums, score_args, score_nums"""
    return (*bound_arguments(call.mask), *bound_arguments(call.score))


def _captured(tensors: Sequence[torch.Tensor]) -> tuple[Captured, ...]:
    return tuple(Captured.of(t) for t in tensors)


def accumulators(captured: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """grads: the pointer and the strides of each buffer of `captured_buffers`"""
    return tuple(
        value for buffer in captured if buffer is not None for value in (buffer, *map(encoded, buffer.stride()))
    )


def bound_arguments(bound: Bound | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if bound is None:
        return (), ()
    numbers = number_arguments(bound.numbers, bound.structure.number_kinds) if bound.numbers else ()
    return tensor_arguments(bound.tensors), numbers


# grids ---------------------------------------------------------------------------------------------------------------


def slots_of(call: Call, cfg: Config, of_keys: bool) -> int:
    """Tiles of one head: of one batch element, or of all packed sequences (see `tiles.visit.locate`)."""
    rows, block = (call.rows_k, cfg.block_n) if of_keys else (call.rows_q, cfg.block_m)
    return -(-rows // block) + (call.batch if call.packed else 0)


def together(call: Call, mask: MaskFunctions | None, slots: int, pairs: int) -> int:
    """How many pairs of batch and head take turns (`tiles.visit.take_turns`): one where all programs are equally long,
    or rows so few that pairs would only lose each other's cache; else as many as fill the GPU once, up to 8.
    """
    if mask is None or slots < 32:
        return 1
    turns = 8 if mask.classify is not None else round(2 * multiprocessors(call.q.device) / slots)
    return max(1, min(pairs, turns, 8))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def memory_rate(device: torch.device) -> float:
    """Bytes a second that a GPU's memory moves at most, two for each clock and pin of eight; 0 elsewhere."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    return 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
