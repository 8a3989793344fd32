"""Host side of the portable Triton kernels: formulas become device functions, sizes become a grid, and kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from tilewise.core.readback import host_values
from tilewise.formula.emit import Captured, number_arguments, tensor_arguments
from tilewise.formula.structure import Bound
from tilewise.ops.attention.configs import Config, config, padded
from tilewise.ops.attention.gradient import Gradients, captured_buffers, sink_gradient
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.table import capability, interpreting
from tilewise.ops.attention.triton_bwd import attention_bwd_keys, attention_bwd_queries, attention_delta
from tilewise.ops.attention.triton_fwd import attention_fwd
from tilewise.ops.attention.triton_lists import tile_lists
from tilewise.ops.attention.variant import MaskFunctions, ScoreFunctions, mask_functions, score_functions
from tilewise.schedule.rule import build_tables, tile_rule

_NO_LISTS = (None, None, None, None, (0, 0, 0))


def _captured(tensors: Any) -> tuple[Captured, ...]:
    return tuple(Captured.of(t) for t in tensors)


@dataclass(frozen=True)
class _Formula:
    """A call's formula as kernel arguments."""

    mask: MaskFunctions | None
    score: ScoreFunctions | None
    mask_args: tuple[Any, ...]
    mask_nums: tuple[Any, ...]
    score_args: tuple[Any, ...]
    score_nums: tuple[Any, ...]

    @staticmethod
    def of(call: Call) -> _Formula:
        mask = score = None
        if call.mask is not None:
            tables = [Captured(len(t.dims), True) for t in tile_rule(call.mask.text).tables]
            mask = mask_functions(call.mask.text, _captured(call.mask.tensors), tuple(tables))
        if call.score is not None:
            fast = call.q.dtype != torch.float32 and not interpreting()
            score = score_functions(call.score.text, _captured(call.score.tensors), call.grad_captured, fast)
        return _Formula(mask, score, *_arguments(call.mask), *_arguments(call.score))


def _arguments(bound: Bound | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if bound is None:
        return (), ()
    tensors = tuple(t.detach() for t in bound.tensors)
    return tensor_arguments(tensors), number_arguments(bound.numbers, bound.structure.number_kinds)


def _lists(call: Call, formula: _Formula, cfg: Config, for_keys: bool) -> tuple[Any, ...]:
    """(partial_count, partial, full_count, full, strides), or nothing where loop bounds do."""
    if call.mask is None or formula.mask is None or formula.mask.classify is None:
        return _NO_LISTS
    tables = build_tables(tile_rule(call.mask.text).tables, call.mask.tensors, cfg.block_m, cfg.block_n)
    tables = tuple(t.contiguous() for t in tables)
    slots = _slots(call, cfg.block_n if for_keys else cfg.block_m, for_keys)
    heads = call.num_heads_q if formula.mask.by_head else 1
    batches = 1 if call.packed or not formula.mask.by_batch else call.batch
    rows = batches * heads * slots
    capacity = triton.cdiv(_longest(call, not for_keys), cfg.block_m if for_keys else cfg.block_n)
    counts = torch.empty((2, rows), dtype=torch.int32, device=call.q.device)
    lists = torch.empty((2, rows, capacity), dtype=torch.int32, device=call.q.device)
    tile_lists[(rows,)](
        counts[0], lists[0], counts[1], lists[1], call.cu_seqlens_q, call.cu_seqlens_k,
        formula.mask_args + tensor_arguments(tables), formula.mask_nums, call.batch, call.rows_q, call.rows_k, slots, capacity,
        HEADS=heads, BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, CHUNK=128, CLASSIFY=formula.mask.classify, PACKED=call.packed,
        FOR_KEYS=for_keys, num_warps=1,
    )  # fmt: skip
    strides = (heads * slots if batches > 1 else 0, slots if heads > 1 else 0, capacity)
    return counts[0], lists[0], counts[1], lists[1], strides


def _slots(call: Call, block: int, for_keys: bool) -> int:
    """Tiles of one head: of one batch element, or of all packed sequences (see `tiles.visit.locate`)."""
    rows = call.rows_k if for_keys else call.rows_q
    return triton.cdiv(rows, block) + (call.batch if call.packed else 0)


def _longest(call: Call, of_keys: bool) -> int:
    rows = call.rows_k if of_keys else call.rows_q
    cu_seqlens = call.cu_seqlens_k if of_keys else call.cu_seqlens_q
    values = None if cu_seqlens is None else host_values(cu_seqlens)
    return rows if values is None else max((b - a for a, b in zip(values, values[1:], strict=False)), default=0)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides; a packed tensor has no batch."""
    return (0, x.stride(0), x.stride(1)) if x.ndim == 3 else (x.stride(0), x.stride(1), x.stride(2))


def _common(call: Call, cfg: Config) -> dict[str, Any]:
    keep = 1.0 / (1.0 - call.dropout)
    precision = "ieee"
    if call.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return {
        "batch": call.batch,
        "seqlen_q": call.rows_q,
        "seqlen_k": call.rows_k,
        "rows_q": call.rows_q,
        "scale": call.scale,
        "dropout": call.dropout,
        "keep_scale": keep,
        "HEADS": call.num_heads_q,
        "GROUP": call.group,
        "HEAD_DIM": call.head_dim,
        "HEAD_DIM_V": call.head_dim_v,
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "BLOCK_D": padded(call.head_dim),
        "BLOCK_DV": padded(call.head_dim_v),
        "SCALE_FIRST": call.score is not None or call.scale <= 0.0,
        "PACKED": call.packed,
        "DROPOUT": call.dropout > 0.0,
        "PRECISION": precision,
        "num_warps": cfg.warps,
        "num_stages": cfg.stages,
    }


def _config(kernel: str, call: Call) -> Config:
    return config(kernel, capability(call.q.device), call.head_dim, call.head_dim_v, call.q.element_size())


def _functions(formula: _Formula, keys: bool, lists: tuple[Any, ...]) -> dict[str, Any]:
    """Compile-time arguments: the formula's device functions for programs that own queries, or keys."""
    mask = (formula.mask.keys if keys else formula.mask.queries) if formula.mask else None
    score = (formula.score.keys if keys else formula.score.queries) if formula.score else None
    return {
        "LISTS": lists[0] is not None,
        "TILES": mask.tiles if mask else None,
        "ROWS": mask.rows if mask else None,
        "MASK_ONCE": mask.once if mask else None,
        "VISIBLE": mask.visible if mask else None,
        "SCORE_ONCE": score.once if score else None,
        "SCORE": score.apply if score else None,
    }


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Triton forward."""
    cfg = _config("forward", call)
    formula = _Formula.of(call)
    lists = _lists(call, formula, cfg, False)
    o, lse = call.new_output(), call.new_lse()
    slots = _slots(call, cfg.block_m, False)
    grid = (slots * call.num_heads_q * (1 if call.packed else call.batch),)
    attention_fwd[grid](
        call.q, call.k, call.v, call.sink, o, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.seed, *lists,
        *_strides(call.q), *_strides(call.k), *_strides(call.v), *_strides(o),
        formula.mask_args, formula.mask_nums, formula.score_args, formula.score_nums,
        slots=slots, **_functions(formula, False, lists), **_common(call, cfg),
    )  # fmt: skip
    return o, lse


def backward(
    call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Gradients by the Triton backward: delta, then dK and dV, then dQ with the captured tensors' gradients."""
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    rows = call.rows_q * call.num_heads_q * (1 if call.packed else call.batch)
    block_dv = padded(call.head_dim_v)
    attention_delta[(triton.cdiv(rows, 32),)](
        o, do, lse, None if dlse is None else dlse.contiguous(), delta, lse2, *_strides(o), *_strides(do), call.rows_q, rows,
        HEADS=call.num_heads_q, HEAD_DIM_V=call.head_dim_v, BLOCK_R=32, BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    formula = _Formula.of(call)
    shared = (call.q, call.k, call.v, do, lse2, delta)
    strides = (*_strides(call.q), *_strides(call.k), *_strides(call.v), *_strides(do))
    arguments = (formula.mask_args, formula.mask_nums, formula.score_args, formula.score_nums)
    places = (call.cu_seqlens_q, call.cu_seqlens_k, call.seed)
    dq, dk, dv = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)

    cfg = _config("keys", call)
    lists = _lists(call, formula, cfg, True)
    slots = _slots(call, cfg.block_n, True)
    batches = 1 if call.packed else call.batch
    attention_bwd_keys[(slots * call.num_heads_kv * batches,)](
        *shared, dk, dv, *places, *lists, *strides, *_strides(dk), *_strides(dv), *arguments,
        slots=slots, SLOPE=formula.score.keys.slope if formula.score else None, **_functions(formula, True, lists),
        **_common(call, cfg),
    )  # fmt: skip

    cfg = _config("queries", call)
    lists = _lists(call, formula, cfg, False)
    slots = _slots(call, cfg.block_m, False)
    captured = captured_buffers(call)
    grads: tuple[Any, ...] = ()
    for buffer in captured:
        grads += () if buffer is None else (buffer, *buffer.stride())
    attention_bwd_queries[(slots * call.num_heads_q * batches,)](
        *shared, dq, *places, *lists, *strides, *_strides(dq), *arguments, grads,
        slots=slots, SLOPE=formula.score.queries.slope if formula.score else None,
        ACCUMULATE=formula.score.queries.accumulate if formula.score else None, **_functions(formula, False, lists),
        **_common(call, cfg),
    )  # fmt: skip

    if call.score is not None:
        captured = [None if g is None else g.to(t.dtype) for g, t in zip(captured, call.score.tensors, strict=True)]
    return Gradients(dq, dk, dv, sink_gradient(call, lse, delta), captured)
