"""Calls over pages as planned once and run often: the plan of who does what, memory that kernels leave one another, and
the launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.sharing import bytes_of, requests_of_tile
from tilewise.ops.attention.triton_keys import call_key
from tilewise.ops.attention.triton_plans import bound_arguments, formula_arguments, functions, strides_of
from tilewise.ops.attention.triton_prefixes import common_prefixes, plan_shared_work
from tilewise.ops.attention.triton_work import UNIT, plan_work
from tilewise.ops.triton_launch import Plan, Plans, on_device

_AT_ONCE = 1024  # slots that the plan looks at at a time
_COMPARED = 4096  # pages of two requests that are compared at a time


def planned_forward(
    call: Call, plans: Plans, make: Callable[[Call], Planned], pool: Callable[[Call], tuple[Any, ...]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a paged call by the plans of its kind, which `make` makes; `pool` gives k and v as their kernel takes
    them, and its pointers behind those that all have.
    """
    planned = _known(call, plans, make)
    with on_device(call.q):
        memory = planned.work.memory(call)
        planned.work.launch(call, memory)
        o, lse = call.new_output(), call.new_lse()
        launch(call, planned, memory, pool(call), o, lse)
        return o, lse


class PlannedCalls:
    """Calls that differ in q, k, v and the sink: planned once, in memory that each run leaves as it found it. Runs
    follow one another in one stream.
    """

    def __init__(
        self, call: Call, plans: Plans, make: Callable[[Call], Planned], pool: Callable[[Call], tuple[Any, ...]]
    ) -> None:
        self._plans, self._make, self._pool = plans, make, pool
        self._work = _known(call, plans, make).work
        self._memory = self._work.memory(call)
        self.update(call)

    def update(self, call: Call) -> None:
        """Plan for the lengths that the call's layout holds now."""
        with on_device(call.q):
            self._work.launch(call, self._memory)

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse): one kernel, and where prefixes may be shared one before it."""
        planned = _known(call, self._plans, self._make)
        with on_device(call.q):
            o, lse = call.new_output(), call.new_lse()
            launch(call, planned, self._memory, self._pool(call), o, lse)
            return o, lse


def _known(call: Call, plans: Plans, make: Callable[[Call], Planned]) -> Planned:
    key = call_key(call)
    planned: Planned = plans.get(key) or plans.put(key, make(call))
    return planned


def launch(
    call: Call, planned: Planned, memory: Memory, pool: tuple[Any, ...], o: torch.Tensor, lse: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch what follows the plan. `shares` are of a launch beside it (`triton_work.write_shares`)."""
    assert call.pages is not None
    k, v, *more = pool
    inputs, results = (call.q, k, v, call.sink, o, lse), (memory.o_part, memory.lse_part)
    lines, behind = (memory.units, memory.before), (memory.arrived, call.pages.table, call.pages.first, *more)
    formula = formula_arguments(call)
    if planned.prefixes is not None:
        assert memory.prefixes is not None
        planned.prefixes.launch((*inputs, *results, *memory.prefixes, *behind, None), formula, (call.scale,))
    others = memory.prefixes if shares is None else shares
    planned.tiles.launch((*inputs, *results, *lines, *behind, others), formula, (call.scale,))


class Memory(NamedTuple):
    """What kernels leave for one another."""

    o_part: torch.Tensor  # partial results: of prefixes, then two of each piece, or, of chunks, all of two rows
    lse_part: torch.Tensor
    units: torch.Tensor
    before: torch.Tensor  # tiles, or chunks, before each unit; behind all, if prefixes are shared, programs of the line
    arrived: torch.Tensor  # counters of parts, and of pieces that are dealt out; 0 between runs
    prefixes: tuple[torch.Tensor, torch.Tensor] | None  # units of prefixes, and tiles before each
    common: torch.Tensor | None  # tiles that each request has in common with the one before


class PrefixTile(NamedTuple):
    """How the launch over prefixes goes about them."""

    programs: int
    rows: int
    keys: int


class Beside(NamedTuple):
    """A launch at the same time, for requests with more rows than few."""

    few: int
    programs: int
    multiprocessors: int


@dataclass(frozen=True)
class Work:
    """The plan of who does which tile, and how large what it writes is."""

    plan: Plan
    slots: int  # for units
    counters: int  # of parts
    parts: int  # rows of partial results, and their columns
    columns: int
    most: int = 1  # chunks of a row
    common: Plan | None = None  # what is run before, where prefixes may be shared

    def memory(self, call: Call) -> Memory:
        device = call.q.device
        prefixes = common = None
        if self.common is not None:
            prefixes = _line(self.slots, device)
            common = torch.empty(call.batch, dtype=torch.int32, device=device)
        return Memory(
            torch.empty((self.parts, self.columns), dtype=torch.float32, device=device),
            torch.empty(self.parts, dtype=torch.float32, device=device),
            *_line(self.slots, device),
            torch.empty(self.counters + 1, dtype=torch.int32, device=device),
            prefixes,
            common,
        )

    def launch(self, call: Call, memory: Memory, shares: torch.Tensor | None = None) -> None:
        """Plan for the lengths, and where prefixes are shared the pages, that a call's layout holds, and set its
        counters to 0; `shares` are of a launch beside (`triton_work.write_shares`).
        """
        pages = call.pages
        assert pages is not None
        lines = (memory.units, memory.before, memory.arrived)
        if self.common is not None:
            assert memory.prefixes is not None
            self.common.launch((pages.table, pages.first, pages.seqlens, memory.common), ())
            self.plan.launch((pages.seqlens, memory.common, *lines, *memory.prefixes), ())
            return
        self.plan.launch((call.cu_seqlens_q, pages.seqlens, *lines, shares), bound_arguments(call.mask))


def _warps_for(slots: int) -> int:
    """Of the one program that plans so many slots at a time: few have less to tell each other."""
    return max(2, min(8, slots // 64))


def _line(slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for units, and for what is before each."""
    return tuple(torch.empty(n, dtype=torch.int32, device=device) for n in ((slots + 2) * UNIT.value, slots + 2))  # type: ignore[return-value]


class Planned(NamedTuple):
    """Who does what, and the kernels that do it."""

    work: Work
    tiles: Plan
    prefixes: Plan | None = None  # the launch before


def work_of(
    call: Call,
    block_r: int,
    block_n: int,
    block_dv: int,
    pieces: int,
    rows: int,
    *,
    early: bool = False,
    chunk: int = 1,
    beside: Beside | None = None,
) -> Work:
    """The plan for tiles of so many rows and keys, and chunks of so many tiles; `rows` of each tile may be there. Only
    requests with few rows, where others have a launch `beside`.
    """
    mask, _score = functions(call)
    side = mask and mask.queries
    of_request = call.rows_q * call.group
    slots = of_request // block_r + call.batch if call.packed else -(-of_request // block_r) * call.batch
    steps = max(slots + 2, call.batch).bit_length() + 1
    at_once = min(_AT_ONCE, triton.next_power_of_2(slots))
    plan = Plan(
        plan_work, 1, (), (call.batch, call.rows_q, slots, pieces, 0 if beside is None else beside.programs),
        (call.packed, call.num_heads_q, call.group, mask is not None and mask.by_head, side and side.tiles, block_r,
         block_n, at_once, triton.next_power_of_2(pieces + 1), steps, early, chunk,
         None if beside is None else beside.few, None if beside is None else beside.multiprocessors),
        _warps_for(at_once), 1,
    )  # fmt: skip
    most = -(-call.rows_k // (chunk * block_n)) if chunk > 1 else 1
    return Work(plan, slots, pieces, 2 * pieces * most * rows, block_dv, most)


def shared_work_of(
    call: Call, block_n: int, block_dv: int, counters: int, parts: int, prefix: PrefixTile, programs: int, *,
    early: bool = False,
) -> Work:  # fmt: skip
    """`work_of` requests that may share prefixes: how many rows their own partial results have, and how many
    `programs` do them, where `early` while prefixes are done.
    """
    assert call.pages is not None
    requests = triton.next_power_of_2(call.batch)
    at_once = min(_COMPARED, max(16, triton.next_power_of_2(call.pages.longest)))
    common = Plan(
        common_prefixes, call.batch, (call.pages.row_stride,), (call.rows_q,),
        (call.k.shape[1], block_n, prefix.keys, at_once, early), 8, 1,
    )  # fmt: skip
    plan = Plan(
        plan_shared_work, 1, (), (call.batch, call.rows_q, counters, *bytes_of(call)),
        (requests_of_tile(call, prefix.rows), block_n, prefix.keys, requests,
         triton.next_power_of_2(counters + 1), call.num_heads_kv, prefix.programs, programs, early),
        _warps_for(requests), 1, early=early,
    )  # fmt: skip
    parts += call.batch * call.rows_q * call.num_heads_q + prefix.programs * prefix.rows
    return Work(plan, call.batch, counters, parts, block_dv, common=common)


def strides_of_pages(call: Call) -> tuple[int, ...]:
    """Of q, k, v, o and the block table, as the kernels take them."""
    assert call.pages is not None
    strides_o = strides_of(call.new_output())
    return (*strides_of(call.q), *call.k.stride()[:3], *call.v.stride()[:3], *strides_o, call.pages.row_stride)
