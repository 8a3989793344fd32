"""Attention on Hopper: the plans of the Gluon kernels. What their backward does not take, the portable one does."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilewise.formula.limits import stays_near_zero
from tilewise.ops.attention import gluon_sm90_prepare, triton_attention
from tilewise.ops.attention import gluon_sm90_sums as dq_sums
from tilewise.ops.attention.configs import Config, Row, first_fit, padded
from tilewise.ops.attention.gluon_boxes import box_of_pages, describe, eights_of_page
from tilewise.ops.attention.gluon_fixed import constants
from tilewise.ops.attention.gluon_sm90_bwd import attention_bwd_sm90
from tilewise.ops.attention.gluon_sm90_bwd_queries import OWN, attention_bwd_queries_sm90
from tilewise.ops.attention.gluon_sm90_bwd_wide import attention_bwd_wide_sm90
from tilewise.ops.attention.gluon_sm90_fwd import attention_fwd_sm90
from tilewise.ops.attention.gradient import Gradients, captured_buffers, delta_of, rounded, sink_gradient
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.triton_plans import (
    Listing,
    accumulators,
    batches_of,
    formula_arguments,
    functions,
    lengths_of,
    memory_rate,
    multiprocessors,
    slots_of,
    strides_of,
    together,
)
from tilewise.ops.attention.variant import CAUSAL, MaskFunctions, ScoreFunctions, ScoreSide, formula_kind, is_band
from tilewise.ops.triton_launch import Plan, Plans, describable, on_device
from tilewise.schedule.rule import tile_rule
from tilewise.schedule.whole import is_whole_in_tiles
from tilewise.tiles.arithmetic import LOG2E

# One compute warpgroup for each 64 queries. Chosen by timing on an H200 (benchmarks/NOTES.md).
_FORWARD = (
    Row(64, Config(128, 128, 4, 2, True), ("lists", "short")),
    Row(64, Config(192, 128, 4, 2, True)),
    Row(128, Config(128, 128, 4, 2, True)),
    Row(256, Config(128, 64, 4, 2, True)),
)
_BACKWARD = (
    Row(64, Config(128, 128, 4, 2, True)),
    Row(128, Config(64, 128, 4, 2, True)),
    Row(256, Config(64, 64, 4, 2, True)),
)
_QUERIES = (  # of the kernel for dQ alone
    Row(128, Config(OWN.value, 128, 4, 2, True)),
    Row(256, Config(OWN.value, 64, 4, 2, True)),
)
_PLANS = Plans()
_REGISTERS = {2: 240, 3: 160}  # by number of compute warpgroups
_GATHER = (216, 80)  # of two compute warpgroups, and of the one that gathers
SHARED = 226 * 1024  # bytes for tiles; the rest is for barriers and what reductions need
_SHORT = 1536  # queries of a sequence up to which rows of unequal length take smaller tiles, as all over pages do
_SHORT_EVEN = 512  # and up to which those of equal length do, if they fill them better
# queries and keys of a sequence, up to which two products more cost less than sums of dQ, and where a mask is causal
_FEW_ROWS = 512
_FEW_CAUSAL = 1024
_FAST = 4e12  # bytes a second, of memory that makes sums of dQ worth it in more calls
_FEW_KEYS = 2048  # of a paged request, up to which rows are gathered
_FEW_TILES = 24  # of a sequence, up to which those of unequal length may be divided beforehand,
_FEWEST_TILES = 8  # and up to which they are, whether or not they come out even
_HELD = 24 * 2**20  # bytes of sums of dQ that L2 holds beside what else is used
_IN_ORDER = (2, 64)  # pairs that take turns where sums are added to in order, at least and at most
_PAIRS = 4  # of batch and head that take turns where there are more: L2 holds their queries and sums of dQ
_NARROW = 16  # of such pairs where queries see few of the keys: more short items are left for the end
_MEETS = 8  # tiles between meetings of programs
_FEWEST_MET = 32  # tiles of an item from which programs meet
_APART = 2**23  # elements of such pairs, beyond which fewer take turns where any tile may be visited


def common(
    call: Call, mask: MaskFunctions | None, score: ScoreFunctions | None, side: ScoreSide | None, cfg: Config,
    of_keys: bool,
) -> dict[str, Any]:  # fmt: skip
    """What all kernels are told; `side` is the score's functions for them."""
    whole = cuts_no_tile(call)
    seen = None if whole or mask is None else mask.keys if of_keys else mask.queries
    linear = linear_of(call, score)
    scored = side if linear is None else None
    return {
        "heads": call.num_heads_q,
        "group": call.group,
        "lists": _is_listed(mask),
        "tiles": seen and seen.tiles,
        "rows": seen and seen.rows,
        "mask_once": seen and seen.once,
        "mask_columns": seen and seen.columns,
        "visible": seen and seen.visible,
        "score_once": scored and scored.once,
        "score_columns": scored and scored.columns,
        "score": scored and scored.apply,
        "linear": linear,
        "scale_first": _scale_first(call, score),
        "whole": whole,
        "guard": mask is not None or call.packed or call.pages is not None or call.rows_k % cfg.block_n != 0,
        "packed": call.packed,
        "paged": call.pages is not None,
        "of_keys": of_keys,
    }


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the Gluon forward."""
    return triton_attention.forward(call, _MAKE_PLAN[is_limited(call), cuts_no_tile(call)], reached, _more)


def _more(call: Call, plan: Plan, lists: triton_attention.Lists) -> tuple[Any, ...]:
    """What the kernel is given beside: how many items have been dealt out, where they are, and the pages."""
    return (counter_of(call, plan, lists), *pages_of(call))


def counter_of(call: Call, plan: Plan, lists: triton_attention.Lists) -> torch.Tensor | None:
    """How many items have been dealt out, or how many programs have come to meetings, none yet: what stands behind
    lists, else a number of its own, or one that programs which deal out leave at 0.
    """
    fixed = plan.constants[0]
    if not fixed.dealt.value and fixed.meets is None:
        return None
    listed: torch.Tensor | None = lists[0]
    if listed is not None:
        return listed[-1]
    device = call.q.device
    if fixed.meets is None and triton_attention.in_turn(device):
        return _none_dealt(device)
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _none_dealt(device: torch.device) -> torch.Tensor:
    """For kernels that run in turn, and leave it at 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def pages_of(call: Call) -> tuple[Any, ...]:
    """How the kernel is told of pages: block tables, where each request's begins or how far apart they are, and the
    strides of pools whose rows it gathers.
    """
    if call.pages is None:
        return (None, None, 0, None)
    strides = (*call.k.stride()[:3], *call.v.stride()[:3]) if not in_boxes(call) else None
    return (call.pages.table, call.pages.first, call.pages.row_stride, strides)


def reached(*tensors: torch.Tensor) -> bool:
    return triton_attention.fetchable(*tensors) and all(map(_describable, tensors))


def _describable(x: torch.Tensor) -> bool:
    """Whether one descriptor reaches a (batch, seqlen, heads, dim) or (rows, heads, dim) tensor of fetchable rows."""
    return describable(x if x.ndim == 4 else x[None])


def forward_plan(call: Call, limited: bool, few: int | None = None) -> Plan:
    """The plan of `attention_fwd_sm90`, for exponentials that need no maximum (`is_limited`) or for any, and for all
    requests or those with more rows of queries than `few`.
    """
    mask, score = functions(call, "gluon")
    cfg = config_of("hopper forward", call)
    d, d_v = padded(call.head_dim), padded(call.head_dim_v)
    consumers = cfg.block_m // 64
    slots = slots_of(call, cfg, False)
    pairs = call.num_heads_q * batches_of(call)
    deals = dealt(call, mask, slots)
    meeting = meets(call, -(-call.rows_k // cfg.block_n))
    if not equal(call):
        turns = turns_of(call, slots, pairs, _rounds(call, slots))
    else:
        turns = min(pairs, _NARROW) if deals else together(call, mask, slots, pairs)
    boxes: dict[int, tuple[int, ...]] = {
        0: (64, d),
        1: (cfg.block_n, d),
        2: (cfg.block_n, d_v),
        4: (64, d_v),
    }  # q, k, v, o
    boxed = call.pages is not None and in_boxes(call)
    gathered = call.pages is not None and not boxed
    if boxed:
        boxes |= {1: box_of_pages(call.k, cfg.block_n), 2: box_of_pages(call.v, cfg.block_n)}
    if gathered:
        del boxes[1], boxes[2]
    skips = call.skip is not None
    moved = _is_listed(mask) and triton_attention.may_move(call)
    used, output = 2 * (cfg.block_m * d + cfg.stages * cfg.block_n * (d + d_v)), 2 * 64 * d_v  # bytes
    outputs = consumers if used + consumers * output <= SHARED else 1
    used += outputs * output
    return Plan(
        attention_fwd_sm90,
        grid=min(slots * pairs, multiprocessors(call.q.device)),
        strides=(),
        sizes=(*lengths_of(call), slots, turns, slots * pairs),
        constants=(
            constants(
                **common(call, mask, score, score.forward if score else None, cfg, False),
                in_base_2=score is not None and (score.in_base_2 or linear_of(call, score) is not None),
                block_n=cfg.block_n,
                consumers=consumers,
                stages=cfg.stages,
                sinks=call.sink is not None,
                limited=limited,
                dropout=call.dropout > 0.0,
                skips=skips,
                moved=moved,
                in_boxes=boxed,
                gathered=gathered,
                head_dim=call.head_dim if gathered else None,
                head_dim_v=call.head_dim_v if gathered else None,
                page=None if call.pages is None else call.k.shape[1],
                eights_k=eights_of_page(call.k) if boxed else None,
                eights_v=eights_of_page(call.v) if boxed else None,
                few=few,
                dealt=deals,
                meets=meeting,
                outputs=outputs,
                ahead=2 if used + 2 * cfg.block_m * d <= SHARED and not skips else 1,
                registers=_GATHER[0] if gathered else _REGISTERS[consumers],
                registers_of_fetch=_GATHER[1] if gathered else None,
            ),
        ),
        warps=cfg.warps,
        stages=cfg.stages,
        extra=(cfg, functions(call)[0], Listing(by_length=True, moved=moved)),
        boxes=boxes,
        describe=describe,
        early=deals or meeting is not None,
    )  # fmt: skip


# Plans are kept by their maker: numbers of a formula, which no key of a call has, decide which it is.
_MAKE_PLAN = {
    (limited, whole): functools.partial(forward_plan, limited=limited)
    for limited in (False, True)
    for whole in (False, True)
}


def config_of(kernel: str, call: Call) -> Config:
    """Tile sizes of "hopper forward", "hopper backward" or, for dQ alone, "hopper queries"."""
    if kernel != "hopper forward":
        rows = _BACKWARD if kernel == "hopper backward" else _QUERIES
        return first_fit(rows, call.head_dim, call.head_dim_v, "plain")
    kind = formula_kind(call.mask and call.mask.text, None)
    if call.pages is not None or (kind == "plain" and _is_short(call)):
        kind = "short"
    return first_fit(_FORWARD, call.head_dim, call.head_dim_v, kind)


def _is_short(call: Call) -> bool:
    rows = call.rows_q
    return (rows <= _SHORT_EVEN and -rows % 128 < -rows % 192) if equal(call) else rows <= _SHORT


def equal(call: Call) -> bool:
    """Whether all tiles of one side visit as many tiles of the other."""
    return not call.packed and call.pages is None and (call.mask is None or is_band(call.mask.text))


def dealt(call: Call, mask: MaskFunctions | None, slots: int) -> bool:
    """Whether programs take items as they come to them. Without a mask items are divided beforehand, and so are those
    of sequences so short that two turns, one forth and one back, hold all lengths: if they hold whole sequences, or
    the counter, which begins at 0, would take longer than what is uneven.
    """
    if call.mask is None and not call.packed and call.pages is None:
        return False
    even = slots <= _FEWEST_TILES or 2 * multiprocessors(call.q.device) % slots == 0
    return slots > _FEW_TILES or not even or call.packed or _is_listed(mask)


def meets(call: Call, tiles: int, fewest: int = _FEWEST_MET) -> int | None:
    """After how many of the `tiles` that an item visits programs wait for each other, where all items visit the same;
    None where they do not, or fewer than `fewest`.
    """
    alike = call.mask is None and not call.packed and call.pages is None and call.skip is None
    return _MEETS if alike and tiles >= fewest else None


def _rounds(call: Call, slots: int) -> int:
    """How many turns of the grid the pairs that take turns fill, two in general. Where memory bounds short sequences,
    and one holds whole ones, it is one: each turn reads its share from memory then, and not the first all keys of two.
    """
    return 1 if call.head_dim > 64 and multiprocessors(call.q.device) % slots == 0 else 2


def turns_of(call: Call, slots: int, pairs: int, rounds: int = 2) -> int:
    """How many pairs of batch and head take turns where items are of unequal length, the long ones first: as many as
    leave enough short ones for the end, or as so many turns of the grid hold, every other one going backwards. Items of
    a list visit tiles that others do not: then L2 holds all that the pairs have, or one takes its turn alone.
    """
    if equal(call):
        return 1
    mask = functions(call, "gluon")[0]
    if slots <= _FEW_TILES:
        most = -(-rounds * multiprocessors(call.q.device) // slots)
    elif _is_listed(mask):
        most = min(_PAIRS, _APART // (max(call.rows_q, call.rows_k) * (call.head_dim + call.head_dim_v)))
    else:
        most = _PAIRS
    return max(1, min(pairs, most))


def backward(call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients: the programs for dK and dV add to sums of dQ, which they begin and end, too. Or dQ has a kernel like
    theirs (`_sums`): where head dimensions are above 128, gradients must repeat bit by bit under most masks, queries
    and keys are few, or sequences are so short that tiles are mostly empty.
    """
    if call.dropout > 0.0 or (any(call.grad_captured) and not _sums(call)):
        return triton_attention.backward(call, o, lse, do, dlse)
    key = triton_attention.backward_key(call, o, do, dlse)
    key = None if key is None else (key, call.deterministic, cuts_no_tile(call))
    plans = _PLANS.get(key)
    if plans is None:
        if not reached(call.q, call.k, call.v, o, do):
            return triton_attention.on_padded(backward, reached, call, o, lse, do, dlse)
        plans = _PLANS.put(key, backward_plans(call, o, do))
    keys, prepare, queries = plans
    heads, slots_q = call.num_heads_q * batches_of(call), keys.sizes[3]
    numbers = lse.new_empty((2, heads * slots_q, keys.extra[0].block_m))
    shift, centre = numbers
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    captured = captured_buffers(call)
    dlse = None if dlse is None else dlse.contiguous()
    formula, scalars = formula_arguments(call), (call.scale,)
    inputs = (call.q, call.k, call.v, do, shift, centre)
    cu_seqlens = (call.cu_seqlens_q, call.cu_seqlens_k)
    with on_device(call.q):
        tables: dict[Any, Any] = {}
        of_heads = 0 if queries is not None else 2 * heads
        counts = torch.zeros(dq_sums.TAKEN.value + of_heads, dtype=torch.int32, device=call.q.device)
        if prepare is not None:
            unit = LOG2E if prepare.extra else 1.0 / call.scale
            prepare.launch((o, do, lse, dlse, shift, centre, call.cu_seqlens_q), (), (unit,))
        added: tuple[Any, ...] = (None,) * 8  # what sums of dQ need
        if queries is None:
            places = keys.sizes[-1]
            sums = lse.new_empty((places * slots_q * 2 * dq_sums.ROWS.value, dq_sums.COLUMNS.value))
            added = (sums, sums, dq, _order(call, keys), o, lse, dlse, numbers)
        else:  # before the other, for which it leaves what queries begin with
            given = (o, lse, dlse) if prepare is None else (None,) * 3
            lists = triton_attention.lists_of(call, queries, False, key, tables)
            queries.launch((*inputs, dq, counts, *given, *cu_seqlens, *lists), formula, scalars)
        lists = triton_attention.lists_of(call, keys, True, key, tables)
        if keys.kernel is attention_bwd_sm90:
            pointers = (*inputs, dk, dv, counts, *added, *cu_seqlens, *lists)
            keys.launch(pointers, (*formula, accumulators(captured)), scalars)
        else:
            keys.launch((*inputs, dk, dv, counts, *cu_seqlens, *lists), formula, scalars)
    grads = Gradients(dq, dk, dv, None, rounded(call, captured))
    if call.grad_sink:
        grads.dsink = sink_gradient(call, lse, delta_of(o, do, dlse, call.packed))
    return grads


def backward_plans(call: Call, o: torch.Tensor, do: torch.Tensor) -> tuple[Plan, Plan | None, Plan | None]:
    """The plans of the kernel for dK and dV; where dQ is not from sums of one for dQ, and where sequences are packed,
    some of which may have no keys, of `prepare`, which the one for dQ sees to else.
    """
    _mask, score = functions(call, "gluon")
    cfg, of_queries = config_of("hopper backward", call), config_of("hopper queries", call)
    d, block = _columns(call), cfg.block_m
    slots_q = slots_of(call, cfg, False)
    rows, numbers = (64, d), (1, block)
    # q, k, v, do, shift, centre, dk, dv
    boxes = {0: (block, d), 1: rows, 2: rows, 3: (block, d), 4: numbers, 5: numbers, 6: rows, 7: rows}
    kernel = attention_bwd_sm90 if d <= 128 else attention_bwd_wide_sm90
    if _sums(call):
        # shares of the sums, dq, o
        boxes |= {10: (dq_sums.ROWS.value, dq_sums.COLUMNS.value), 11: (64, 64), 13: (block, d)}
        return _gradient_plan(kernel, call, cfg, block, slots_q, boxes), None, None
    keys = _gradient_plan(kernel, call, cfg, block, slots_q, boxes)
    tiles = (of_queries.block_n, d)
    boxes = {0: rows, 1: tiles, 2: tiles, 3: rows, 6: rows}  # q, k, v, do, dq
    queries = _gradient_plan(attention_bwd_queries_sm90, call, of_queries, block, slots_q, boxes, strides_of(o))
    if not call.packed:
        return keys, None, queries
    prepare = Plan(
        gluon_sm90_prepare.prepare,
        call.num_heads_q * slots_q,
        (*strides_of(o), *strides_of(do)),
        (call.batch, call.rows_q, slots_q),
        (call.num_heads_q, call.head_dim_v, d, block),
        4,
        1,
        extra=_scale_first(call, score),
    )
    return keys, prepare, queries


def _gradient_plan(
    kernel: Any, call: Call, cfg: Config, block: int, slots_q: int, boxes: dict[int, tuple[int, int]],
    strides: tuple[int, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of a kernel whose programs own keys or queries; `block` and `slots_q` are of what queries begin with."""
    mask, score = functions(call, "gluon")
    of_keys = kernel is not attention_bwd_queries_sm90
    slots = slots_of(call, cfg, of_keys)
    pairs = (call.num_heads_kv if of_keys else call.num_heads_q) * batches_of(call)
    side = (score.keys if of_keys else score.queries) if score else None
    tiles = -(-call.rows_q // block) if of_keys else -(-call.rows_k // cfg.block_n)
    apart = _ordered(call) or _columns(call) == 64  # who waits for another's additions, and whose would collide
    parts = _is_listed(mask) and kernel is attention_bwd_sm90 and block == 64
    places = (_places(call),) if kernel is attention_bwd_sm90 else ()
    return Plan(
        kernel,
        grid=min(slots * pairs, multiprocessors(call.q.device)),
        strides=strides,
        sizes=(*lengths_of(call)[:3], slots_q, slots, _turns_of_gradients(call, slots, pairs), slots * pairs, *places),
        constants=(
            constants(
                **common(call, mask, score, side, cfg, of_keys),
                block_m=block,
                block_n=cfg.block_n,
                parts=parts,
                slope=side and side.slope if linear_of(call, score) is None else None,
                accumulate=side and side.accumulate,
                sums=_sums(call),
                begins=not of_keys and not call.packed,
                head_dim_v=None if of_keys else call.head_dim_v,
                ordered=of_keys and _ordered(call),
                meets=None if apart else meets(call, tiles),
                registers=_REGISTERS[2],
            ),
        ),
        warps=cfg.warps,
        stages=cfg.stages,
        extra=(cfg, functions(call)[0], Listing(by_length=True, part=64 if parts else None)),
        boxes={**boxes},
        describe=describe,
        early=kernel is attention_bwd_sm90,
    )


def _sums(call: Call) -> bool:
    """Whether programs that own keys add to dQ in memory: not where bits must repeat and there is no order, where it
    would be slower, or where there would be four times as many rows of sums, which are kept in whole tiles, as of
    queries or keys.
    """
    cfg = config_of("hopper backward", call)
    rows = max(call.rows_q, call.rows_k)
    empty = slots_of(call, cfg, False) * cfg.block_m > 4 * rows
    slow = call.deterministic or memory_rate(call.q.device) < _FAST
    most = _FEW_CAUSAL if _is_causal(call) and call.score is None and slow else _FEW_ROWS
    few = _columns(call) == 128 and rows <= most and not (call.packed or any(call.grad_captured))
    return not ((call.deterministic and not _in_order(call)) or _columns(call) > 128 or few or empty)


def _in_order(call: Call) -> bool:
    """Whether keys that see a tile of queries are neighbours, and visit its like in order."""
    return (call.mask is None or _is_causal(call)) and not any(call.grad_captured)


def _is_causal(call: Call) -> bool:
    return call.mask is not None and call.mask.text == CAUSAL


def _ordered(call: Call) -> bool:
    """Whether programs add to dQ in an order that is always the same."""
    return call.deterministic and _sums(call)


def _turns_of_gradients(call: Call, slots: int, pairs: int) -> int:
    """`turns_of`; where additions are ordered, half of the pairs whose sums L2 holds: then whoever has the next keys of
    one has begun long enough before (benchmarks/NOTES.md).
    """
    least, most = _IN_ORDER
    return min(pairs, most, max(least, _held(call) // 2)) if _ordered(call) else turns_of(call, slots, pairs)


def _order(call: Call, keys: Plan) -> torch.Tensor | None:
    """How far each run is, where additions are ordered."""
    return torch.zeros(keys.sizes[-2], dtype=torch.int32, device=call.q.device) if _ordered(call) else None


def _places(call: Call) -> int:
    """How many heads' sums of dQ have memory: those that programs are at, and half as many again, which are converted
    or wait for it, up to twice as many where L2 holds them; whole turns of them (`gluon_sm90_sums.wait_for_place`).
    """
    if not _sums(call):
        return 0
    slots = slots_of(call, config_of("hopper backward", call), True)
    pairs = call.num_heads_kv * batches_of(call)
    turns = _turns_of_gradients(call, slots, pairs)
    at_once = turns - (-multiprocessors(call.q.device) // slots)
    wanted = max(at_once + at_once // 2 + 1, min(3 * at_once, _held(call)))
    return call.group * min(pairs, -(-wanted // turns) * turns)


def _held(call: Call) -> int:
    """How many pairs of batch and head have sums of dQ that L2 holds."""
    cfg = config_of("hopper backward", call)
    return _HELD // (4 * slots_of(call, cfg, False) * cfg.block_m * _columns(call) * call.group)


def _columns(call: Call) -> int:
    """Columns that the backward gives Q, K, V and all their gradients."""
    return max(64, padded(call.head_dim), padded(call.head_dim_v))


def linear_of(call: Call, score: ScoreFunctions | None) -> Any:
    """The function of a linear score, which is folded into the scaling; None for other scores, and where scores
    themselves are compared.
    """
    folded = score is not None and call.scale > 0.0 and not any(call.grad_captured) and call.skip is None
    return score.linear if score is not None and folded else None


def _is_listed(mask: MaskFunctions | None) -> bool:
    """Whether tiles come from lists."""
    return mask is not None and mask.classify is not None


def cuts_no_tile(call: Call) -> bool:
    """Whether tiles come from lists, and are seen whole but for the ends of sequences."""
    if call.mask is None or call.packed or call.pages is not None or tile_rule(call.mask.text).spans is not None:
        return False
    return is_whole_in_tiles(call.mask.text, call.mask.numbers, call.rows_k - call.rows_q)


def is_limited(call: Call) -> bool:
    """Whether a formula keeps scores so near 0 that their exponentials, which bfloat16 holds too, need no maximum."""
    return call.q.dtype == torch.bfloat16 and call.skip is None and stays_near_zero(call.score)


def _scale_first(call: Call, score: ScoreFunctions | None) -> bool:
    """Whether scores are scaled before anything else is done with them."""
    return (score is not None and linear_of(call, score) is None) or call.scale <= 0.0


def in_boxes(call: Call) -> bool:
    """Whether keys come in boxes of the tensor memory accelerator, which are pages, or tiles of them; else row by row.
    Rows of any pages can be gathered, and the first of a request are then there sooner.
    """
    size = call.k.shape[1]
    whole = size in (16, 32, 64) or size % 128 == 0
    even = all(pool.stride(1) > 0 and pool.stride(0) % (8 * pool.stride(1)) == 0 for pool in (call.k, call.v))
    return whole and even and min(call.head_dim, call.head_dim_v) > 32 and call.rows_k > _FEW_KEYS
