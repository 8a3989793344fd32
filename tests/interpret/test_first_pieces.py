"""What a program begins with, found from lengths alone before there is a plan: as the plan has it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilewise.ops.attention.triton_work import (
    LOOK,
    UNIT,
    first_of_lengths,
    piece_of_turn,
    piece_span,
    plan_work,
    rounds_of,
    tile_at,
    unit_of,
)

ROUNDS = tl.constexpr(3)
HEADS_KV, BLOCK_N, QUERIES = 2, 16, 2


@triton.jit
def both_ways(
    SEQLENS, BEFORE, UNITS, OUT, slots, seqlen_q, REQUESTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    p = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles, rounds, piece, unit, coming = first_of_lengths(
        SEQLENS, tl.arange(0, REQUESTS), slots, seqlen_q, p, programs, HEADS, BLOCK, ROUNDS
    )
    to = OUT + p * 64
    planned = tl.load(BEFORE + slots) * HEADS
    planned_rounds = rounds_of(programs, planned, ROUNDS)
    number = piece_of_turn(p, programs, planned_rounds)
    lo, count = piece_span(number, programs, planned_rounds, planned)
    u, hk, t = slots, 0 * lo, 0 * lo
    if count > 0:
        u, hk, t = tile_at(lo, BEFORE, UNITS, slots, tl.arange(0, LOOK), HEADS)
    tl.store(to, tiles)
    tl.store(to + 32, planned)
    tl.store(to + 1, rounds)
    tl.store(to + 33, planned_rounds)
    want = (count, lo, u, hk, t, number)
    for n in tl.static_range(6):
        tl.store(to + 2 + n, piece[n])
        tl.store(to + 34 + n, want[n])
    if count > 0:
        mine = unit_of(UNITS, u)
        for n in tl.static_range(7):
            tl.store(to + 8 + n, unit[n])
            tl.store(to + 40 + n, mine[n])
        if u + 1 < slots:
            after = unit_of(UNITS, u + 1)
            for n in tl.static_range(7):
                tl.store(to + 15 + n, coming[n])
                tl.store(to + 47 + n, after[n])


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=9), programs=st.integers(1, 9))
@example(lengths=[3000] * 9, programs=2)  # shares of several pieces
@example(lengths=[0, 0, 1], programs=9)  # more programs than tiles
@example(lengths=[16] * 8, programs=3)
def test_lengths_say_what_the_plan_says(lengths: list[int], programs: int) -> None:
    batch = len(lengths)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    units = torch.full(((batch + 2) * UNIT.value,), -1, dtype=torch.int32)
    before, arrived = torch.full((batch + 1,), -1, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    plan_work[(1,)](
        None, seqlens, units, before, arrived, None, (), (), batch, QUERIES, batch, 31, 0,
        PACKED=False, HEADS=HEADS_KV, GROUP=1, BY_HEAD=False, TILES=None, BLOCK_R=16, BLOCK_N=BLOCK_N, AT_ONCE=16,
        PIECES=32, STEPS=5, EARLY=False,
    )  # fmt: skip
    out = torch.full((programs, 2, 32), -7, dtype=torch.int32)
    both_ways[(programs,)](seqlens, before, units, out, batch, QUERIES, 16, HEADS_KV, BLOCK_N)
    assert torch.equal(out[:, 0], out[:, 1])
    assert int(out[:, 0, 2].sum()) > 0
