"""The forward and backward of the Triton kernels: a plan is found or made, tiles are listed, kernels are launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton

from tilewise.formula.emit import tensor_arguments
from tilewise.ops.attention.gradient import Gradients, captured_buffers, delta_of, rounded, sink_gradient
from tilewise.ops.attention.lengths import longest, longest_now
from tilewise.ops.attention.problem import Call, rows_within_reach, signature_of
from tilewise.ops.attention.triton_keys import call_key
from tilewise.ops.attention.triton_lists import block_extrema, sort_lists, tile_lists
from tilewise.ops.attention.triton_plans import (
    accumulators,
    backward_plans,
    bound_arguments,
    formula_arguments,
    forward_plan,
    lengths_of,
    row_values_size,
    scalars_of,
    slots_of,
)
from tilewise.ops.attention.variant import keys_are_divided
from tilewise.ops.triton_launch import Plan, Plans, on_device
from tilewise.schedule.rule import TileRule, build_tables, tile_rule
from tilewise.tiles.early import early_for

NO_LISTS = (None, 0, 0, 0)
LOG2E = math.log2(math.e)
_PLANS = Plans()
_LISTS = Plans(limit=16)
_READ_FIRST = 2**26  # numbers of lists that take so much memory that undeclared lengths are read, which waits
_KEPT_SIZE = 2**22  # numbers of lists that are kept, at most
_SORTED = 512  # rows of lists that programs take by length; with more of them the last ones matter less
Reached = Callable[..., bool]  # whether a kernel's loads reach these tensors
Lists = tuple[Any, ...]  # the lists themselves, and their strides by batch, head and row
More = Callable[[Call, Plan, Lists], tuple[Any, ...]]  # what a kernel is given beside what all are


def fetchable(*tensors: torch.Tensor) -> bool:
    """Whether 16-byte copies and tensor descriptors can fetch rows, which float32 kernels need neither of; and whether
    rows lie no further apart than a tile's offsets reach.

    Mixing such 16-bit rows with others in one kernel gave wrong results on sm_90 (Triton 3.6; head_dim 40 with
    head_dim_v 5), so calls with others run on padded copies.
    """
    return all(
        x.element_size() != 2 or not (x.data_ptr() % 16 or any(n % 8 for n in (*x.stride()[:-1], x.shape[-1])))
        for x in tensors
    ) and rows_within_reach(*tensors)


def _nothing(call: Call, plan: Plan, lists: Lists) -> tuple[Any, ...]:
    return ()


def forward(
    call: Call,
    make_plan: Callable[[Call], Plan] = forward_plan,
    reached: Reached = fetchable,
    more: More = _nothing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Triton forward, or by another kernel that takes the same pointers, and `more` behind them.

    Where q, k and v are not `reached` by its loads, it runs on padded copies.
    """
    key = call_key(call)
    plan = _PLANS.get((make_plan, key))
    if plan is None:
        if not reached(call.q, call.k, call.v):
            o, lse = forward(_padded(call, reached), make_plan, reached, more)
            return o[..., : call.head_dim_v], lse
        plan = _PLANS.put(key and (make_plan, key), make_plan(call))
    o, lse = call.new_output(), call.new_lse()
    with on_device(call.q):
        lists = lists_of(call, plan, False, key, {})
        launch_forward(call, plan, lists, o, lse, more(call, plan, lists))
    return o, lse


def launch_forward(
    call: Call, plan: Plan, lists: Lists, o: torch.Tensor, lse: torch.Tensor, more: tuple[Any, ...]
) -> None:
    """Launch a forward of a plan whose `lists` of tiles are known; `more` stand behind all other pointers."""
    keys = call.cu_seqlens_k if call.pages is None else call.pages.seqlens
    pointers = (call.q, call.k, call.v, call.sink, o, lse, call.cu_seqlens_q, keys, call.seed, call.skip)
    plan.launch((*pointers, *lists, *more), formula_arguments(call), scalars_of(call))


def backward(call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients by the Triton backward: dQ with delta and the captured tensors' gradients, then dK and dV."""
    key = backward_key(call, o, do, dlse)
    plans = _PLANS.get(key)
    if plans is None:
        if not fetchable(call.q, call.k, call.v, o, do):
            return on_padded(backward, fetchable, call, o, lse, do, dlse)
        plans = _PLANS.put(key, backward_plans(call, o, do))
    queries, keys = plans
    delta, lse2 = lse.new_empty((2, row_values_size(call)))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    captured = captured_buffers(call)
    arguments, scalars = formula_arguments(call), scalars_of(call)
    q, k, v, cu_q, cu_k, seed = call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.seed
    dlse = None if dlse is None else dlse.contiguous()
    with on_device(q):
        tables: dict[Any, Any] = {}
        lists = lists_of(call, queries, False, key, tables)
        pointers = (q, k, v, o, do, lse, dlse, lse2, delta, dq, cu_q, cu_k, seed, *lists)
        queries.launch(pointers, (*arguments, accumulators(captured)), scalars)
        lists = lists_of(call, keys, True, key, tables)
        keys.launch((q, k, v, do, lse2, delta, dk, dv, cu_q, cu_k, seed, *lists), arguments, scalars)
    return Gradients(dq, dk, dv, _sink_gradient(call, o, lse, do, dlse, delta), rounded(call, captured))


def _sink_gradient(
    call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor
) -> torch.Tensor | None:
    """The kernel's delta begins each sequence at a place of its own; of packed ones it is computed anew."""
    if not call.grad_sink:
        return None
    if call.packed:
        return sink_gradient(call, lse, delta_of(o, do, dlse, True))
    return sink_gradient(call, lse, delta.view(*lse.shape[:2], -1)[..., : lse.shape[-1]])


def _padded(call: Call, reached: Reached) -> Call:
    """The same call, with copies where q, k or v is not `reached`."""
    q, k, v = (_padded_rows(x, reached) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, signature=signature_of(q, k, v, call.mask, call.score, call.packed))


def on_padded(
    run: Callable[..., Gradients], reached: Reached, call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:  # fmt: skip
    """A backward with copies of what is not `reached`."""
    grads = run(_padded(call, reached), _padded_rows(o, reached), lse, _padded_rows(do, reached), dlse)
    d, d_v = call.head_dim, call.head_dim_v
    grads.dq, grads.dk, grads.dv = grads.dq[..., :d], grads.dk[..., :d], grads.dv[..., :d_v]
    return grads


def backward_key(call: Call, o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Hashable:
    """`call_key` of a backward."""
    key = call_key(call)
    if key is None or (o.data_ptr() | do.data_ptr()) % 16:
        return None
    return ("backward", key, do.stride(), o.stride(), dlse is None)


def _padded_rows(x: torch.Tensor, reached: Reached) -> torch.Tensor:
    """x, or if it is not `reached` a contiguous copy whose rows are padded with zeros to a multiple of 16 bytes."""
    if reached(x):
        return x
    padded_x = x.new_zeros((*x.shape[:-1], -(-x.shape[-1] // 8) * 8))
    padded_x[..., : x.shape[-1]] = x
    return padded_x


# tile lists ----------------------------------------------------------------------------------------------------------


def lists_of(call: Call, plan: Plan, for_keys: bool, key: Any, tables: dict[Any, Any]) -> Lists:
    """The tile lists that a plan asks for (`Listing`) and their strides by batch, head and row, or nothing where loop
    bounds do. `tables` keeps block extrema that several lists of one call share. Lists are kept where the mask captures
    no tensor.
    """
    cfg, mask, how = plan.extra
    if call.mask is None or mask.classify is None:
        return NO_LISTS
    list_key = key and ("lists", key, for_keys, cfg, how)
    keeps = list_key and not (call.mask.tensors or call.packed) and in_turn(call.q.device)
    kept_key = (list_key, call.mask.numbers) if keeps else None
    kept: Lists | None = _LISTS.get(kept_key)
    if kept is not None:
        return kept
    early = early_for(call.q.device) if how.by_length else 0
    slots = slots_of(call, cfg, for_keys)
    heads = call.num_heads_q if mask.by_head else 1
    batches = 1 if call.packed or not mask.by_batch else call.batch
    rows = batches * heads * slots
    own, other = (cfg.block_n, cfg.block_m) if for_keys else (cfg.block_m, cfg.block_n)
    parts = own // (how.part or own)
    width = width_of_lists(longest(call, not for_keys), other)
    if rows * width > _READ_FIRST:
        width = width_of_lists(longest_now(call, not for_keys), other)
    listed = torch.empty((rows + 1, width), dtype=torch.int32, device=call.q.device)
    plans = _PLANS.get(list_key)
    if plans is None:
        constants = (
            heads, cfg.block_m, cfg.block_n, 128, parts, mask.classify, call.packed, for_keys, how.moved, early,
        )  # fmt: skip
        lister = Plan(tile_lists, rows, (), (*lengths_of(call)[:3], slots), constants, 1, 1, early=early > 0)
        sorter = None
        if how.by_length and 1 < slots <= _SORTED:
            constants = (triton.next_power_of_2(slots), 32, early)
            sorter = Plan(sort_lists, batches * heads, (), (slots,), constants, 8, 1, early=early > 0)
        plans = _PLANS.put(list_key, (lister, sorter))
    lister, sorter = plans
    args, nums = bound_arguments(call.mask)
    blocks = (cfg.block_m, own // parts) if for_keys else (own // parts, cfg.block_n)
    if blocks not in tables:
        tables[blocks] = tensor_arguments(_tables(tile_rule(call.mask.text), call.mask.tensors, *blocks, early))
    lister.launch((listed, call.cu_seqlens_q, call.cu_seqlens_k), (args + tables[blocks], nums, width))
    if sorter is not None:
        sorter.launch((listed,), (width,))  # which depends on lengths that no key has
    found: Lists = (listed, (heads * slots if batches > 1 else 0), (slots if heads > 1 else 0), width)
    if listed.numel() <= _KEPT_SIZE:
        _LISTS.put(kept_key, found)
    return found


def width_of_lists(longest: int, block: int) -> int:
    """Numbers of a row: three and a tile each, in 16 bytes."""
    return triton.cdiv(3 + triton.cdiv(max(1, longest), block), 4) * 4


def in_turn(device: torch.device) -> bool:
    """Whether kernels that are launched now run one after another, with all that share memory of theirs: those of a
    GPU's default stream. A CUDA graph, which is of another stream when it is captured, may be replayed beside anything.
    """
    return device.type == "cuda" and not torch.cuda.current_stream(device).cuda_stream


def may_move(call: Call) -> bool:
    """Whether tiles of keys may begin anywhere, and not only where pages, counters of dropout or a formula's do."""
    if call.mask is None or call.pages is not None or call.dropout > 0.0:
        return False
    return not keys_are_divided(call.mask.text, call.score and call.score.text)


def _tables(
    rule: TileRule, tensors: Sequence[torch.Tensor], block_i: int, block_j: int, early: int
) -> tuple[torch.Tensor, ...]:
    """The rule's block extrema: tensors as they are where nothing is blocked, by one kernel where only the last
    dimension is, else by PyTorch.
    """
    done: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    result = []
    for table in rule.tables:
        tensor = tensors[table.slot]
        if set(table.dims) <= {"keep"}:
            result.append(tensor.contiguous())
            continue
        block = {"i": block_i, "j": block_j}.get(table.dims[-1] if table.dims else "")
        simple = set(table.dims[:-1]) <= {"keep"} and tensor.is_contiguous()
        if block is None or not simple or tensor.dtype not in (torch.int32, torch.int64):
            return tuple(t.contiguous() for t in build_tables(rule.tables, tensors, block_i, block_j))
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
                early,
            )
            plan = _PLANS.get(extrema_key)
            if plan is None:
                grid = extrema[0].numel()
                plan = _PLANS.put(
                    extrema_key, Plan(block_extrema, grid, (), (size, blocks), (block, early), 1, 1, early=early > 0)
                )
            plan.launch((tensor, *extrema), ())
        result.append(extrema[0 if table.kind == "min" else 1])
    return tuple(result)
