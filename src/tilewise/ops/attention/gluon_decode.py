"""Few queries over pages on Hopper: the plan of the Gluon kernel."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from tilewise.core.readback import constant
from tilewise.layouts import Pages
from tilewise.ops.attention import triton_decode, triton_paged
from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.gluon_sm90_decode import attention_decode_sm90
from tilewise.ops.attention.gluon_sm90_decode_prefixes import PLACES, attention_prefixes_sm90
from tilewise.ops.attention.gluon_sm90_pages import ENDLESS
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.sharing import may_share, rows_of_shared_tile
from tilewise.ops.attention.triton_paged import pool_of, rows_of_tile
from tilewise.ops.attention.triton_planned import (
    Beside,
    Planned,
    PlannedCalls,
    PrefixTile,
    planned_forward,
    shared_work_of,
    strides_of_pages,
    work_of,
)
from tilewise.ops.attention.triton_plans import functions, multiprocessors
from tilewise.ops.triton_launch import Plan, Plans
from tilewise.quant.codes import BY_DTYPE, KINDS

_PLANS = Plans()
_ROUNDS = 3  # pieces of a large share: most of it first, then half of the rest each
_MERGED = 512  # values of o that are merged at a time


class Build(NamedTuple):
    """How a kernel is built: programs of a multiprocessor, bytes that each has for tiles, and registers of a thread
    when it starts (None: as many as there are) and of one that fetches.
    """

    programs: int
    shared: int
    registers: int | None
    registers_of_fetch: int


# Programs hide each other's waits, where products leave them room.
_ONE = Build(1, 220 * 1024, None, 224)
_TWO_WARPGROUPS = Build(1, 220 * 1024, None, 128)
_TWO = Build(2, 108 * 1024, 128, 104)
_TWO_OF_CODES = Build(2, 108 * 1024, 128, 120)
_THREE_OF_CODES = Build(3, 72 * 1024, 80, 64)


class Fixed(NamedTuple):
    """What is known when the kernel is compiled: numbers, and the formula's device functions, None where not needed."""

    heads: Any
    group: Any
    head_dim: Any
    head_dim_v: Any
    page: Any
    packed: Any
    sinks: Any
    block_r: Any
    block_n: Any
    block_d: Any
    block_dv: Any
    stages: Any
    rounds: Any
    of_prefixes: Any  # whether the units are prefixes, of which parts are left
    warps: Any  # that compute
    prefix: Any  # of the launch before, whose parts are merged
    rows_of_part: Any
    merged: Any  # rows of a part that are merged at a time
    encoding: Any
    registers: Any  # of a thread that fetches
    alike: Any  # whether keys and values lie alike in their pools
    beside: Any  # how many programs a multiprocessor has, where others have a launch at the same time
    rows: Any
    mask_once: Any
    visible: Any
    score_once: Any
    score: Any


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a call: the plan, then all tiles. Keys that do not start at 16 bytes, portable kernels read."""
    if _starts_elsewhere(call):
        return triton_paged.forward(call) if call.pages is not None else _split(call)
    if call.pages is None:
        call = copy.copy(call)
        call.pages = _whole(call.batch, call.k.shape[1], call.q.device)
    return planned_forward(call, _PLANS, _plans, pool_of)


def plan(call: Call) -> PlannedCalls | None:
    """The plan that calls of one kind share; none for keys in rows, whose lengths are all alike."""
    if call.pages is None:
        return None
    return triton_paged.plan(call) if _starts_elsewhere(call) else PlannedCalls(call, _PLANS, _plans, pool_of)


def _starts_elsewhere(call: Call) -> bool:
    return (call.k.data_ptr() | call.v.data_ptr()) % 16 != 0


def _split(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = triton_decode.forward(call)
    return found


@constant
def _whole(batch: int, seqlen_k: int, device: torch.device) -> Pages:
    """Every batch element's keys as a page of its own."""
    table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    return Pages(table, None, torch.full((batch,), seqlen_k, dtype=torch.int32, device=device))


def _plans(call: Call) -> Planned:
    block_d, block_dv = padded(call.head_dim), padded(call.head_dim_v)
    encoding = None if call.scales is None else BY_DTYPE[call.k.dtype]
    if encoding == "int4":  # two dimensions of a byte, two bytes of a thread
        block_dv = max(block_dv, 128)
    if encoding is not None:
        block_r = rows_of_tile(call, least=4, most=8 if encoding == "fp8" else 16)
        narrow = encoding == "int4" and block_d + block_dv <= 256 and block_r <= 8
        build = _THREE_OF_CODES if narrow else _TWO_OF_CODES
    else:
        block_r = rows_of_tile(call)
        build = _TWO if block_r == 16 and block_d + block_dv <= 256 else _ONE
    if encoding is not None:
        block_n = 128 if block_d + block_dv <= 256 * KINDS[encoding].in_byte else 64
    else:
        block_n = 128 if build is _ONE and block_d + block_dv <= 256 and block_r <= 32 else 64
    programs = build.programs * multiprocessors(call.q.device)
    rows = block_r if call.packed else min(block_r, triton.next_power_of_2(call.rows_q * call.group))
    tile = Tile(block_r, block_n, block_d, block_dv, rows, encoding)
    if not may_share(call):
        work = work_of(call, block_r, block_n, block_dv, _ROUNDS * programs, rows, early=True)
        return Planned(work, _plan(call, build, tile, work.slots))
    shared_rows = rows_of_shared_tile(call, "hopper_decode")
    shared_keys = 128 if block_d + block_dv <= 256 else 64
    many = _TWO_WARPGROUPS if shared_rows > 64 else _ONE
    prefix = PrefixTile(many.programs * multiprocessors(call.q.device), shared_rows, shared_keys)
    own = call.batch * call.rows_q * call.num_heads_q + _ROUNDS * programs * rows
    counters = max(_ROUNDS * programs, call.batch * call.num_heads_kv)
    work = shared_work_of(call, block_n, block_dv, counters, own, prefix, programs, early=True)
    of_prefixes = Tile(shared_rows, shared_keys, block_d, block_dv, shared_rows, None)
    return Planned(
        work,
        _plan(call, build, tile, work.slots, prefix=prefix),
        _plan(call, many, of_prefixes, work.slots, of_prefixes=True),
    )


def plans_beside(call: Call, beside: Beside) -> Planned:
    """The plans for those requests of a packed call that have few rows, while another launch has the others."""
    block_d, block_dv = padded(call.head_dim), padded(call.head_dim_v)
    build = _TWO if block_d + block_dv <= 256 else _ONE
    tile = Tile(16, 64, block_d, block_dv, 16, None)
    pieces = _ROUNDS * build.programs * beside.multiprocessors
    work = work_of(call, tile.block_r, tile.block_n, block_dv, pieces, tile.rows, beside=beside)
    return Planned(work, _plan(call, build, tile, work.slots, beside=True))


class Tile(NamedTuple):
    """Sizes of a tile, how many of its rows there may be, and how keys are encoded."""

    block_r: int
    block_n: int
    block_d: int
    block_dv: int
    rows: int
    encoding: str | None


def _plan(
    call: Call, build: Build, tile: Tile, slots: int, *, prefix: PrefixTile | None = None, of_prefixes: bool = False,
    beside: bool = False,
) -> Plan:  # fmt: skip
    """The kernel over one line of work; `prefix` is how the launch before it did prefixes, or this is that one, or it
    runs beside another.
    """
    mask, score = functions(call)
    side = None if mask is None or of_prefixes else mask.queries  # no key of a prefix is hidden
    block_r, block_n, block_d, block_dv, rows, encoding = tile
    of_key, most = 2 * (block_d + block_dv), 4
    if encoding is not None:
        of_key, most = (block_d + block_dv) // KINDS[encoding].in_byte + 8, 8
    of_row = PLACES.value * 2 * block_d + (0 if of_prefixes else 2 * block_n)  # queries, and weights
    stages = min(most, (build.shared - block_r * of_row) // (block_n * of_key))
    assert call.pages is not None
    warps = 4 * -(-block_r // 64)
    one_each = call.pages.first is None and call.pages.longest == 1
    fixed = (
        call.num_heads_q, call.group, call.head_dim, call.head_dim_v,
        ENDLESS.value if one_each else call.k.shape[1], call.packed, call.sink is not None, block_r, block_n, block_d,
        block_dv, stages, _ROUNDS, of_prefixes, warps, prefix, rows, min(rows, _MERGED // block_dv),
        encoding, build.registers_of_fetch, block_d == block_dv and call.k.stride() == call.v.stride(),
        build.programs if beside else None, side and side.rows, side and side.once, side and side.visible,
        score and score.queries.once,
        score and score.queries.apply,
    )  # fmt: skip
    constants = Fixed(*(gl.constexpr(x) if isinstance(x, int | str | PrefixTile) else x for x in fixed))
    return Plan(
        attention_prefixes_sm90 if of_prefixes else attention_decode_sm90,
        build.programs * multiprocessors(call.q.device),
        strides_of_pages(call),
        (call.rows_q, slots),
        (constants,),
        warps,
        1,
        early=True,
        options={} if build.registers is None else {"maxnreg": build.registers},
    )
