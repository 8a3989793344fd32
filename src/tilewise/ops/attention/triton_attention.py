"""Host side of the Triton kernels: formulas become device functions, sizes become a grid, kernels are launched."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from tilewise.core.readback import host_values
from tilewise.formula.emit import Captured, encoded, number_arguments, tensor_arguments
from tilewise.formula.structure import Bound
from tilewise.ops.attention.configs import Config, config, padded
from tilewise.ops.attention.gradient import Gradients, captured_buffers, delta_of, sink_gradient
from tilewise.ops.attention.problem import Call, signature_of
from tilewise.ops.attention.table import capability, interpreting
from tilewise.ops.attention.triton_bwd import attention_bwd_keys, attention_bwd_queries
from tilewise.ops.attention.triton_fwd import attention_fwd
from tilewise.ops.attention.triton_launch import Plan, Plans, call_key, describable
from tilewise.ops.attention.triton_lists import block_extrema, tile_lists
from tilewise.ops.attention.variant import (
    MaskFunctions,
    ScoreFunctions,
    formula_kind,
    mask_functions,
    score_functions,
)
from tilewise.schedule.rule import TileRule, build_tables, tile_rule
from tilewise.tiles.load import DEVICE, HOST, POINTER

_INT32 = 2**31 - 1  # coordinates of the tensor memory accelerator
_NO_LISTS = (None, 0, 0, 0)
_PLANS = Plans()


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Triton forward."""
    key = call_key(call)
    plan = _PLANS.get(("forward", key))
    if plan is None:
        if not _fetchable(call.q, call.k, call.v):
            o, lse = forward(_padded(call))
            return o[..., : call.head_dim_v], lse
        plan = _PLANS.put(key and ("forward", key), _forward_plan(call))
    o, lse = call.new_output(), call.new_lse()
    with on_device(call.q):
        lists = _lists(call, plan, False, key, {})
        pointers = (call.q, call.k, call.v, call.sink, o, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.seed)
        plan.launch((*pointers, *lists), formula_arguments(call), _scalars(call))
    return o, lse


def backward(call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients by the Triton backward: dQ with delta and the captured tensors' gradients, then dK and dV."""
    key = call_key(call)
    if key is not None:
        fetched = (o.data_ptr() | do.data_ptr()) % 16 == 0
        key = ("backward", key, do.stride(), o.stride(), dlse is None) if fetched else None
    plans = _PLANS.get(key)
    if plans is None:
        if not _fetchable(call.q, call.k, call.v):
            grads = backward(_padded(call), _padded_rows(o), lse, _padded_rows(do), dlse)
            d, d_v = call.head_dim, call.head_dim_v
            grads.dq, grads.dk, grads.dv = grads.dq[..., :d], grads.dk[..., :d], grads.dv[..., :d_v]
            return grads
        if not _fetchable(o, do):
            return backward(call, _padded_rows(o), lse, _padded_rows(do), dlse)
        plans = _PLANS.put(key, _backward_plans(call, o, do))
    queries, keys = plans
    delta, lse2 = lse.new_empty((2, _row_values_size(call)))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    captured = captured_buffers(call)
    grads = tuple(
        value for buffer in captured if buffer is not None for value in (buffer, *map(encoded, buffer.stride()))
    )
    arguments, scalars = formula_arguments(call), _scalars(call)
    q, k, v, cu_q, cu_k, seed = call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.seed
    dlse = None if dlse is None else dlse.contiguous()
    with on_device(q):
        tables: dict[Any, Any] = {}
        lists = _lists(call, queries, False, key, tables)
        pointers = (q, k, v, o, do, lse, dlse, lse2, delta, dq, cu_q, cu_k, seed, *lists)
        queries.launch(pointers, (*arguments, grads), scalars)
        lists = _lists(call, keys, True, key, tables)
        keys.launch((q, k, v, do, lse2, delta, dk, dv, cu_q, cu_k, seed, *lists), arguments, scalars)
    if call.score is not None:
        captured = [None if g is None else g.to(t.dtype) for g, t in zip(captured, call.score.tensors, strict=True)]
    return Gradients(dq, dk, dv, _sink_gradient(call, o, lse, do, dlse, delta), captured)


def _sink_gradient(
    call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor
) -> torch.Tensor | None:
    """The kernel's delta begins each sequence at a place of its own; of packed ones it is computed anew."""
    if not call.grad_sink:
        return None
    if call.packed:
        return sink_gradient(call, lse, delta_of(o, do, dlse, True))
    return sink_gradient(call, lse, delta.view(*lse.shape[:2], -1)[..., : lse.shape[-1]])


def _fetchable(*tensors: torch.Tensor) -> bool:
    """Whether 16-byte copies and tensor descriptors can fetch rows; float32 kernels need neither.

    Mixing such 16-bit rows with others in one kernel gave wrong results on sm_90 (Triton 3.6; head_dim 40 with
    head_dim_v 5), so calls with others run on padded copies.
    """
    return all(
        x.element_size() != 2 or not (x.data_ptr() % 16 or any(n % 8 for n in (*x.stride()[:-1], x.shape[-1])))
        for x in tensors
    )


def _padded(call: Call) -> Call:
    """The same call on fetchable copies of q, k and v."""
    q, k, v = (_padded_rows(x) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, signature=signature_of(q, k, v, call.mask, call.score, call.packed))


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose rows are padded with zeros to a multiple of 16 bytes."""
    padded_x = x.new_zeros((*x.shape[:-1], -(-x.shape[-1] // 8) * 8))
    padded_x[..., : x.shape[-1]] = x
    return padded_x


# plans -------------------------------------------------------------------------------------------------------------


def _forward_plan(call: Call) -> Plan:
    cfg = _config("forward", call)
    tma = _tma(call, cfg)
    mask, score = functions(call)
    slots = _slots(call, cfg.block_m, False)
    strides = (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(call.new_output()))
    scoring = (score and score.queries.once, score and score.queries.apply)
    m, n, d, d_v = _blocks(call, cfg)
    constants = (
        *_sizes(call), m, n, d, d_v, *_visibility(mask, "queries"), *scoring, *_modes(call), tma.value
    )  # fmt: skip
    pairs = call.num_heads_q * _batches(call)
    grid, lengths = slots * pairs, (*_lengths(call), slots, _together(call, mask, slots, pairs))
    boxes = {1: (n, d), 2: (n, d_v), 4: (m, d_v)} if tma is HOST else {}  # k, v, o
    extra = (cfg, mask)
    return Plan(
        attention_fwd, grid, strides, lengths, constants, cfg.warps, cfg.stages, extra, boxes, tma is DEVICE
    )  # fmt: skip


def _backward_plans(call: Call, o: torch.Tensor, do: torch.Tensor) -> tuple[Plan, Plan]:
    """The plans of `attention_bwd_queries` and of `attention_bwd_keys`."""
    mask, score = functions(call)
    inputs = (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(do))
    plans = []
    for kernel, name, owner, heads, outputs in (
        (attention_bwd_queries, "queries", "queries", call.num_heads_q, (*strides_of(o), *_contiguous(call.q))),
        (attention_bwd_keys, "keys", "keys", call.num_heads_kv, (*_contiguous(call.k), *_contiguous(call.v))),
    ):
        cfg = _config(name, call)
        tma = _tma(call, cfg, do)
        slots = _slots(call, cfg.block_n if name == "keys" else cfg.block_m, name == "keys")
        side = score and getattr(score, owner)
        scoring = (side and side.once, side and side.apply, side and side.slope)
        m, n, d, d_v = _blocks(call, cfg)
        constants = (
            *_sizes(call), m, n, d, d_v, *_visibility(mask, owner), *scoring,
            *((side and side.accumulate,) if name == "queries" else ()), *_modes(call), tma.value,
        )  # fmt: skip
        boxes: dict[int, tuple[int, ...]] = {}
        if tma is HOST and name == "queries":
            boxes = {1: (n, d), 2: (n, d_v), 9: (m, d)}  # k, v, dq
        elif tma is HOST:
            boxes = {0: (m, d), 3: (m, d_v), 4: (m,), 5: (m,), 6: (n, d), 7: (n, d_v)}  # q, do, lse2, delta, dk, dv
        elif tma is DEVICE and name == "keys":
            boxes = {4: (m,), 5: (m,)}  # lse2, delta
        pairs = heads * _batches(call)
        grid, lengths = slots * pairs, (*_lengths(call), slots, _together(call, mask, slots, pairs))
        extra, strides = (cfg, mask), (*inputs, *outputs)
        plans.append(
            Plan(kernel, grid, strides, lengths, constants, cfg.warps, cfg.stages, extra, boxes, tma is DEVICE)
        )
    return plans[0], plans[1]


def _config(kernel: str, call: Call) -> Config:
    kind = formula_kind(call.mask and call.mask.text, call.score and call.score.text)
    if call.dropout > 0.0:
        kind = "dropout"  # its random bits take shared memory
    return config(kernel, capability(call.q.device), call.head_dim, call.head_dim_v, call.q.element_size(), kind)


def _sizes(call: Call) -> tuple[int, ...]:
    return (call.num_heads_q, call.group, call.head_dim, call.head_dim_v)


def _blocks(call: Call, cfg: Config) -> tuple[int, ...]:
    """BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV"""
    return (cfg.block_m, cfg.block_n, padded(call.head_dim), padded(call.head_dim_v))


def _lengths(call: Call) -> tuple[int, ...]:
    """batch, seqlen_q, seqlen_k, rows_q"""
    return (call.batch, call.rows_q, call.rows_k, call.rows_q)


def _batches(call: Call) -> int:
    return 1 if call.packed else call.batch


def _visibility(mask: MaskFunctions | None, owner: str) -> tuple[Any, ...]:
    """LISTS, TILES, ROWS, MASK_ONCE, VISIBLE"""
    if mask is None:
        return (False, None, None, None, None)
    side = getattr(mask, owner)
    return (mask.classify is not None, side.tiles, side.rows, side.once, side.visible)


def _modes(call: Call) -> tuple[Any, ...]:
    """SCALE_FIRST, PACKED, DROPOUT, PRECISION"""
    scale_first = call.score is not None or call.scale <= 0.0
    return (scale_first, call.packed, call.dropout > 0.0, matmul_precision(call))


def _tma(call: Call, cfg: Config, *others: torch.Tensor) -> Any:
    """How the kernels' tiles come (`tiles.load`): one descriptor would show packed sequences their neighbours' rows."""
    if not cfg.tma or _row_values_size(call) > _INT32:
        return POINTER
    return HOST if all(map(describable, (call.q, call.k, call.v, *others))) else DEVICE


def _row_values_size(call: Call) -> int:
    """Numbers in a tensor that `tiles.load.row_values` divides."""
    rows = call.rows_q + (3 * call.batch if call.packed else 0)
    return _batches(call) * call.num_heads_q * (-(-rows // 4) * 4)


def _scalars(call: Call) -> tuple[float, float, float]:
    """scale, dropout, keep_scale"""
    return (call.scale, call.dropout, 1.0 / (1.0 - call.dropout))


# what other kernels' hosts use too -----------------------------------------------------------------------------------


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors'."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


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


def functions(call: Call) -> tuple[MaskFunctions | None, ScoreFunctions | None]:
    """The device functions of a call's formula."""
    mask = score = None
    if call.mask is not None:
        tables = tuple(Captured(len(t.dims), True) for t in tile_rule(call.mask.text).tables)
        mask = mask_functions(call.mask.text, _captured(call.mask.tensors), tables)
    if call.score is not None:
        fast = call.q.dtype != torch.float32 and not interpreting()
        score = score_functions(call.score.text, _captured(call.score.tensors), call.grad_captured, fast)
    return mask, score


def formula_arguments(call: Call) -> tuple[Any, ...]:
    """mask_args, mask_nums, score_args, score_nums"""
    return (*_arguments(call.mask), *_arguments(call.score))


def _captured(tensors: Sequence[torch.Tensor]) -> tuple[Captured, ...]:
    return tuple(Captured.of(t) for t in tensors)


def _arguments(bound: Bound | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if bound is None:
        return (), ()
    numbers = number_arguments(bound.numbers, bound.structure.number_kinds) if bound.numbers else ()
    return tensor_arguments(bound.tensors), numbers


# tile lists ----------------------------------------------------------------------------------------------------------


def _lists(call: Call, plan: Plan, for_keys: bool, key: Any, tables: dict[Any, Any]) -> tuple[Any, ...]:
    """The tile lists and their strides by batch, head and row, or nothing where loop bounds do.

    A row is laid out as `tiles.visit.visit` says. `tables` keeps block extrema that several lists of one call share.
    """
    cfg, mask = plan.extra
    if call.mask is None or mask.classify is None:
        return _NO_LISTS
    slots = _slots(call, cfg.block_n if for_keys else cfg.block_m, for_keys)
    heads = call.num_heads_q if mask.by_head else 1
    batches = 1 if call.packed or not mask.by_batch else call.batch
    rows = batches * heads * slots
    width = 2 + -(-max(1, _longest(call, not for_keys)) // (cfg.block_m if for_keys else cfg.block_n))
    listed = torch.empty((rows, width), dtype=torch.int32, device=call.q.device)
    list_key = key and ("lists", key, for_keys, cfg)
    lister = _PLANS.get(list_key)
    if lister is None:
        constants = (heads, cfg.block_m, cfg.block_n, 128, mask.classify, call.packed, for_keys)
        lister = _PLANS.put(list_key, Plan(tile_lists, rows, (), (*_lengths(call)[:3], slots), constants, 1, 1))
    args, nums = _arguments(call.mask)
    blocks = (cfg.block_m, cfg.block_n)
    if blocks not in tables:
        tables[blocks] = tensor_arguments(_tables(tile_rule(call.mask.text), call.mask.tensors, cfg))
    lister.launch((listed, call.cu_seqlens_q, call.cu_seqlens_k), (args + tables[blocks], nums, width))
    return listed, (heads * slots if batches > 1 else 0), (slots if heads > 1 else 0), width


def _tables(rule: TileRule, tensors: Sequence[torch.Tensor], cfg: Config) -> tuple[torch.Tensor, ...]:
    """The rule's block extrema: by one kernel where only the last dimension is blocked, else by PyTorch."""
    done: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    result = []
    for table in rule.tables:
        tensor = tensors[table.slot]
        block = {"i": cfg.block_m, "j": cfg.block_n}.get(table.dims[-1] if table.dims else "")
        simple = set(table.dims[:-1]) <= {"keep"} and tensor.is_contiguous()
        if block is None or not simple or tensor.dtype not in (torch.int32, torch.int64):
            return tuple(t.contiguous() for t in build_tables(rule.tables, tensors, cfg.block_m, cfg.block_n))
        extrema = done.get((table.slot, block))
        if extrema is None:
            size = tensor.shape[-1]
            blocks = -(-size // block)
            extrema = done[table.slot, block] = tensor.new_empty((2, *tensor.shape[:-1], blocks)).unbind()
            extrema_key = (
                "extrema",
                tensor.dtype,
                tensor.shape,
                block,
                tensor.data_ptr() % 16,
                extrema[1].data_ptr() % 16,
            )
            plan = _PLANS.get(extrema_key)
            if plan is None:
                grid = extrema[0].numel()
                plan = _PLANS.put(extrema_key, Plan(block_extrema, grid, (), (size, blocks), (block,), 1, 1))
            plan.launch((tensor, *extrema), ())
        result.append(extrema[0 if table.kind == "min" else 1])
    return tuple(result)


def _slots(call: Call, block: int, for_keys: bool) -> int:
    """Tiles of one head: of one batch element, or of all packed sequences (see `tiles.visit.locate`)."""
    rows = call.rows_k if for_keys else call.rows_q
    return -(-rows // block) + (call.batch if call.packed else 0)


def _together(call: Call, mask: MaskFunctions | None, slots: int, pairs: int) -> int:
    """How many pairs of batch and head take turns (`tiles.visit.take_turns`): one where all programs are equally long,
    or rows so few that pairs would only lose each other's cache; else as many as fill the GPU once, up to 8.
    """
    if mask is None or slots < 32:
        return 1
    turns = 8 if mask.classify is not None else round(2 * _multiprocessors(call.q.device) / slots)
    return max(1, min(pairs, turns, 8))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _longest(call: Call, of_keys: bool) -> int:
    """The longest sequence; the total where lengths cannot be read on the host."""
    rows = call.rows_k if of_keys else call.rows_q
    cu_seqlens = call.cu_seqlens_k if of_keys else call.cu_seqlens_q
    values = None if cu_seqlens is None else host_values(cu_seqlens)
    return rows if values is None else max((b - a for a, b in itertools.pairwise(values)), default=0)
