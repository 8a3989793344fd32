"""Building blocks shared by kernels: tile lists, block extrema, packed places, loop bounds, dropout bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.core.philox import keep_mask
from tilewise.formula import as_mask
from tilewise.layouts import LengthBounds
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_attention, triton_plans
from tilewise.ops.attention.configs import Config
from tilewise.ops.attention.problem import Call, make_call, sequences
from tilewise.ops.attention.triton_lists import block_extrema, sort_lists
from tilewise.schedule.rule import Extremum, TileRule, build_tables, tile_rule
from tilewise.schedule.tilemap import EMPTY, FULL, classify
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.matrix import name_of
from tilewise.tiles.dropout import keep_tile
from tilewise.tiles.load import row_values
from tilewise.tiles.visit import locate, take_turns, visit, visits

LISTED = [CASES[name] for name in ("document", "document_window", "tree", "dilated_window", "neighborhood_2d",
          "neighborhood_3d", "neighborhood_steps", "sliding_tile_heads", "sliding_tile_curve", "head_blocks",
          "explicit", "packed_document")]  # fmt: skip
UNEQUAL = [CASES["document"].with_(name="document_cross", batch=2, seqlen_q=33, seqlen_k=65),
           CASES["explicit"].with_(name="explicit_wide", seqlen_q=70, seqlen_k=19)]  # fmt: skip


def call_of(case: Case) -> Call:
    inputs = make_inputs(case, torch.float32)
    return make_call(inputs.q, inputs.k, inputs.v, **inputs.arguments())


def _tile_ranges(call: Call) -> Iterator[tuple[int, int, int, int, int]]:
    """(b, first slot of queries, first slot of keys, seqlen_q, seqlen_k); slots in rows, to be divided by a block."""
    if not call.packed:
        for b in range(call.batch):
            yield b, 0, 0, call.rows_q, call.rows_k
        return
    for b, rows, keys in sequences(call):
        yield b, rows.start, keys.start, rows.stop - rows.start, keys.stop - keys.start


def _rows(
    call: Call, lists: tuple[Any, ...], cfg: Config, for_keys: bool, parts: int = 1
) -> Iterator[tuple[int, list[int], torch.Tensor, torch.Tensor]]:
    """(number of a row, what its list has, classes of the other side's tiles for each of its parts, whether those tiles
    end before the sequence does) for each tile of one side.
    """
    listed, by_batch, by_head, _ = lists
    own, other = (cfg.block_n, cfg.block_m) if for_keys else (cfg.block_m, cfg.block_n)
    blocks = (other, own // parts) if for_keys else (own // parts, other)
    for b, start_q, start_k, seqlen_q, seqlen_k in _tile_ranges(call):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_m": blocks[0], "block_n": blocks[1]}
        classes = classify(call.mask, batch=1, heads=call.num_heads_q, first_batch=b, **sizes)
        classes = classes.expand(1, call.num_heads_q, *classes.shape[2:])[0]
        classes = classes.transpose(-1, -2) if for_keys else classes
        whole = (torch.arange(classes.shape[-1]) + 1) * other <= (seqlen_q if for_keys else seqlen_k)
        first_slot = (start_k if for_keys else start_q) // own + b if call.packed else 0
        for h in range(call.num_heads_q):
            for first in range(0, classes.shape[1], parts):
                row = (0 if call.packed else b * by_batch) + h * by_head + first_slot + first // parts
                yield row, listed[row].tolist(), classes[h, first : first + parts], whole


@pytest.mark.parametrize("for_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("case", [*LISTED, *UNEQUAL], ids=name_of)
def test_tile_lists_are_the_tile_map(case: Case, for_keys: bool) -> None:
    """Each tile of one side lists, in order, what `TileMap` calls FULL and PARTIAL of the other side."""
    call = call_of(case)
    plan = triton_plans.forward_plan(call)
    if for_keys:
        o, do = call.new_output(), call.new_output()
        plan = triton_plans.backward_plans(call, o, do)[1]
    cfg, mask, _ = plan.extra
    assert mask.classify is not None, "this mask has loop bounds and needs no lists"
    lists = triton_attention.lists_of(call, plan, for_keys, None, {})
    slots = triton_plans.slots_of(call, cfg, for_keys)
    for row, (num_partial, num_full, *tiles), classes, whole in _rows(call, lists, cfg, for_keys):
        full = (classes[0] == FULL) & whole
        partial = (classes[0] != EMPTY) & ~full
        turn = max(num_partial, 1 - num_full)  # behind the tiles that are not FULL, or the one of who sees nothing
        assert tiles[turn] == (row % slots if for_keys else slots - 1 - row % slots)
        assert tiles[:num_partial] == partial.nonzero()[:, 0].tolist()
        assert tiles[::-1][:num_full] == full.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("for_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("case", [*LISTED, *UNEQUAL], ids=name_of)
def test_lists_say_what_parts_of_rows_see(case: Case, for_keys: bool, parts: int) -> None:
    """Of each tile that is not FULL, whether anything."""
    call = call_of(case)
    blocks = (32, 16 * parts) if for_keys else (16 * parts, 32)
    cfg = Config(*blocks, 4, 2, False)
    plan = SimpleNamespace(extra=(cfg, triton_plans.functions(call)[0], triton_plans.Listing(part=16)))
    lists = triton_attention.lists_of(call, plan, for_keys, None, {})
    for _, (num_partial, num_full, *entries), classes, whole in _rows(call, lists, cfg, for_keys, parts):
        seen, clear = classes != EMPTY, (classes == FULL) & whole
        full, visited = clear.all(0), seen.any(0)
        assert entries[::-1][:num_full] == full.nonzero()[:, 0].tolist()
        partial = (visited & ~full).nonzero()[:, 0].tolist()
        assert [n & 2**24 - 1 for n in entries[:num_partial]] == partial
        for part in range(parts):
            passed_over = [entry >> 24 + part & 1 for entry in entries[:num_partial]]
            assert passed_over == [not (part < len(classes) and seen[part, n]) for n in partial]
        if not visited.any():
            assert entries[0] == (1 << parts) - 1 << 24, "hidden from all"
    listed, _, _, width = lists
    assert listed.numel() % width == 0
    assert listed[-1, 0] == 0, "to count with"


MOVED = ("ascending", "causal_ascending", "packed_ascending", "by_head", "undefined", "quotients")


@pytest.mark.parametrize("name", MOVED)
def test_moved_tiles_see_what_others_do(name: str) -> None:
    """They hold every visible key, those that are FULL no other, and there are no more of them."""
    call = call_of(CASES[name])
    assert triton_attention.may_move(call)
    cfg = Config(16, 16, 4, 2, False)
    still, moved = (
        triton_attention.lists_of(
            call, SimpleNamespace(extra=(cfg, triton_plans.functions(call)[0], how)), False, None, {}
        )
        for how in (triton_plans.Listing(), triton_plans.Listing(by_length=True, moved=True))
    )
    by_key = Config(16, 1, 4, 2, False)
    offsets = set()
    for row, (num_partial, num_full, *entries), classes, _ in _rows(call, moved, by_key, False):
        listed = [*entries[:num_partial], *entries[::-1][:num_full]]
        assert len(listed) <= still[0][row, :2].sum()
        assert len({entry >> 24 for entry in listed}) <= 1
        offsets |= {entry >> 24 for entry in listed}
        begins = [(entry & 2**24 - 1) * 16 + (entry >> 24) for entry in listed]
        left = classes[0] != EMPTY
        for n, begin in enumerate(begins):
            if n >= num_partial:
                assert (classes[0, begin : begin + 16] == FULL).all()
                assert begin + 16 <= classes.shape[1]
            left[begin : begin + 16] = False
        assert not left.any()
    assert offsets != {0} or name in ("by_head", "undefined", "quotients")


def test_who_sees_nothing_visits_the_first_tile() -> None:
    """Of those that are moved, too."""
    q = torch.zeros(1, 48, 1, 16)
    call = make_call(q, q, q, mask=lambda b, h, i, j: (i >= 20) & ((j - 36) * (j - 36) < 121))
    assert triton_attention.may_move(call)
    how = triton_plans.Listing(moved=True)
    plan = SimpleNamespace(extra=(Config(16, 16, 4, 2, False), triton_plans.functions(call)[0], how))
    listed, *_ = triton_attention.lists_of(call, plan, False, None, {})
    assert listed[0, :3].tolist() == [0, 0, 0]
    assert listed[1, :4].tolist() == [2, 0, 1, 2]
    assert listed[2, [0, 1, 2, -1]].tolist() == [1, 1, 10 << 24 | 2, 10 << 24 | 1]


def test_lists_of_other_packed_lengths_are_sorted_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is kept for all lengths of as many rows, and how wide a list is depends on the longest declared."""
    case = CASES["packed_document"].with_(heads_q=2, heads_kv=1)
    calls = [call_of(case.with_(packed=tuple((n, n) for n in lengths))) for lengths in ((500, 10), (250, 260))]
    calls = [replace(call, bounds=LengthBounds(most, most, True)) for call, most in zip(calls, (500, 260), strict=True)]
    monkeypatch.setattr(triton_launch, "remember", True)
    found = []
    for key in (None, "of as many rows"):
        for call in calls:
            plan = triton_plans.forward_plan(call)
            plan.extra = (*plan.extra[:2], triton_plans.Listing(by_length=True))
            found.append(triton_attention.lists_of(call, plan, False, key, {}))
    widths = [width for *_, width in found]
    assert widths[0] != widths[1]
    for (want, *_), (got, *_) in zip(found[:2], found[2:], strict=True):
        turns = [[row[2 + max(row[0], 1 - row[1])] for row in rows[:-1].tolist()] for rows in (want, got)]
        assert turns[0] == turns[1]


@pytest.mark.parametrize(("sets", "slots"), [(1, 1), (2, 5), (3, 40)])
def test_rows_that_visit_most_have_the_first_turn(sets: int, slots: int) -> None:
    """Rows that visit as many keep their order."""
    listed = torch.randint(0, 4, (sets, slots, 9), dtype=torch.int32)
    before = listed.clone()
    sort_lists[(sets,)](listed, 9, slots, triton.next_power_of_2(slots), 4, False)
    want = torch.argsort(before[..., 0] + before[..., 1], dim=1, descending=True, stable=True)
    place = 2 + torch.maximum(before[..., :1], 1 - before[..., 1:2]).long()
    assert torch.equal(listed.gather(2, place)[..., 0].long(), want)
    assert torch.equal(listed.scatter(2, place, before.gather(2, place)), before)


@pytest.mark.parametrize("shape", [(1,), (31,), (32,), (33,), (3, 64), (2, 4, 100)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_block_extrema_are_pytorchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randint(-1000, 1000, shape, dtype=dtype)
    blocks = -(-shape[-1] // 32)
    low, high = (torch.empty(*shape[:-1], blocks, dtype=dtype) for _ in range(2))
    block_extrema[(low.numel(),)](x, low, high, shape[-1], blocks, 32, False)
    dims = ("keep",) * (len(shape) - 1) + ("j",)
    want = build_tables([Extremum(0, "min", dims), Extremum(0, "max", dims)], [x], 16, 32)
    assert torch.equal(low, want[0])
    assert torch.equal(high, want[1])


def test_extrema_of_a_call_are_pytorchs() -> None:
    """By the kernel where it can, by PyTorch elsewhere: the same tables."""
    for case in LISTED:
        call = call_of(case)
        assert call.mask is not None
        rule: TileRule = tile_rule(call.mask.text)
        cfg, *_ = triton_plans.forward_plan(call).extra
        got = triton_attention._tables(rule, call.mask.tensors, cfg.block_m, cfg.block_n, False)
        for table, want in zip(
            got, build_tables(rule.tables, call.mask.tensors, cfg.block_m, cfg.block_n), strict=True
        ):
            assert torch.equal(table, want)


@triton.jit
def turns(OUT, slots, pairs, together):
    for n in range(slots * pairs):
        pair, slot = take_turns(0 * slots + n, slots, pairs, together)
        tl.store(OUT + n * 2, pair)
        tl.store(OUT + n * 2 + 1, slot)


@pytest.mark.parametrize(("slots", "pairs"), [(1, 1), (5, 1), (1, 7), (4, 6), (3, 7)])
@pytest.mark.parametrize("together", [1, 2, 4, 7])
def test_every_slot_of_every_pair_has_its_turn(slots: int, pairs: int, together: int) -> None:
    """Pairs in groups, in order; within a group slot by slot."""
    out = torch.full((slots * pairs, 2), -1, dtype=torch.int32)
    turns[(1,)](out, slots, pairs, together)
    groups = [range(first, min(first + together, pairs)) for first in range(0, pairs, together)]
    want = [(pair, slot) for group in groups for slot in range(slots) for pair in group]
    assert [tuple(place) for place in out.tolist()] == want


@triton.jit
def located(CU, OUT, batch, slots, BLOCK: tl.constexpr):
    for slot in range(slots):
        b, tile = locate(slot, CU, batch, BLOCK)
        tl.store(OUT + slot * 2, b)
        tl.store(OUT + slot * 2 + 1, tile)


def test_every_packed_tile_has_one_slot() -> None:
    """Over random lengths, zeros among them: the located places are every tile of every sequence once, in order."""
    draws = random.Random(0)
    for _ in range(25):
        lengths = [draws.choice([0, 0, 1, draws.randint(0, 100)]) for _ in range(draws.randint(1, 9))]
        block = draws.choice([16, 32])
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        slots = -(-sum(lengths) // block) + len(lengths)
        out = torch.full((slots, 2), -1, dtype=torch.int32)
        located[(1,)](cu, out, len(lengths), slots, block)
        places = [(b, tile) for b, tile in out.tolist() if tile * block < lengths[b]]
        assert places == [(b, tile) for b, length in enumerate(lengths) for tile in range(-(-length // block))]


@triton.jit
def first_values(CU, OUT, batch, rows, HEADS: tl.constexpr, PACKED: tl.constexpr):
    for slot in range(batch * HEADS):
        at = 0 * rows + slot  # a number of the device in the interpreter too
        b = at // HEADS
        row0 = tl.load(CU + b) if PACKED else 0 * b
        tl.store(OUT + slot, row_values(b, at % HEADS, row0, rows, batch, HEADS, PACKED))


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_each_row_has_a_number_of_its_own(packed: bool) -> None:
    """Numbers by row: sequences begin at multiples of 16 bytes, do not overlap, and end inside the tensor."""
    draws = random.Random(2)
    for _ in range(25):
        lengths = [draws.choice([0, 1, draws.randint(0, 100)]) for _ in range(draws.randint(1, 9))]
        lengths = lengths if packed else [draws.randint(1, 100)] * len(lengths)
        batch, heads = len(lengths), 3
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        rows = sum(lengths) if packed else lengths[0]
        q = torch.zeros(*((rows,) if packed else (batch, rows)), heads, 16)
        call = make_call(q, q, q, layout=tw.Packed(cu) if packed else None)
        first = torch.empty(batch * heads, dtype=torch.int64)
        first_values[(1,)](cu, first, batch, rows, heads, packed)
        assert not (first % 4).any()
        taken = [int(first[b * heads + h]) + m for b in range(batch) for h in range(heads) for m in range(lengths[b])]
        assert len(set(taken)) == len(taken)
        assert max(taken, default=0) < max(1, triton_plans.row_values_size(call))


@triton.jit
def given_runs(b, h, x0, x1, args, nums):
    return nums[0], nums[1], nums[2], nums[3]


@triton.jit
def visited(OUT, nums, low, size, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """For each visited tile 1 if it is FULL, else 2."""
    begin, full_begin, num_full, num_partial = visits(
        low * 0, 0, low * 0, low * 0, low, size, (), nums, OUT, False, TILES, BLOCK
    )
    for MASKED in tl.static_range(2):
        for t in range(num_partial if MASKED else num_full):
            tile = visit(t, begin, full_begin, num_full, OUT, 0, False, MASKED)
            tl.store(OUT + tile, tl.load(OUT + tile) + 1 + MASKED)


def test_loop_bounds_visit_each_tile_once_and_call_full_what_is() -> None:
    draws = random.Random(1)
    for _ in range(60):
        size, block, low = draws.randint(1, 90), 16, draws.randint(-50, 50)
        any_ = (draws.randint(-40, 100), draws.randint(-40, 100))
        all_ = (draws.randint(any_[0], any_[0] + 60), draws.randint(any_[1] - 60, any_[1]))
        found = torch.zeros(-(-size // block), dtype=torch.int32)
        visited[(1,)](found, tuple(low + x for x in (*any_, *all_)), low, size, given_runs, block)
        for n, times in enumerate(found.tolist()):
            cells = range(n * block, min(n * block + block, size))
            seen = any(any_[0] <= j <= any_[1] for j in cells)
            whole = len(cells) == block and all(all_[0] <= j <= all_[1] for j in cells)
            assert times == (1 if seen and whole else 2 if seen else 0)


@triton.jit
def kept(
    OUT, SEED, row, first_i, start_j, dropout, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    offs_i = first_i + tl.arange(0, BLOCK_I)
    keep = keep_tile(tl.load(SEED), row, offs_i, start_j, dropout, BLOCK_J, KEYS_FIRST)
    offs_m = tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_J)
    if KEYS_FIRST:
        out = OUT + offs_m[None, :] * BLOCK_J + offs_n[:, None]
    else:
        out = OUT + offs_m[:, None] * BLOCK_J + offs_n[None, :]
    tl.store(out, keep.to(tl.int8))


@pytest.mark.parametrize("keys_first", [False, True], ids=["by_query", "by_key"])
@pytest.mark.parametrize(
    ("seed", "dropout", "row", "first_i", "start_j"),
    [
        (0, 0.5, 0, 0, 0),
        (1, 0.1, 7, 5, 16),
        (2**62 + 12345, 0.9, 2**31 - 5, -9, 32),
        (2**33, 0.999, 3, 2**20, 4 * 10**6),
    ],
)
def test_dropout_bits_are_those_of_the_cpu(
    keys_first: bool, seed: int, dropout: float, row: int, first_i: int, start_j: int
) -> None:
    out = torch.zeros(16, 32, dtype=torch.int8)
    kept[(1,)](out, torch.tensor([seed]), row, first_i, start_j, dropout, 16, 32, keys_first)
    i, j = torch.arange(first_i, first_i + 16)[:, None], torch.arange(start_j, start_j + 32)
    assert torch.equal(out.bool(), keep_mask(seed, dropout, torch.tensor(row), i, j))


def test_lists_of_masks_that_capture_nothing_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run in turn; those of a tensor, whose values may change, are made at every call."""
    monkeypatch.setattr(triton_launch, "remember", True)
    monkeypatch.setattr(triton_attention, "_LISTS", triton_launch.Plans(limit=2))
    rows, ids = 512, torch.arange(512) // 200

    def every(n: int) -> tw.Mask:
        return as_mask(lambda b, h, i, j: (i // 64 - j // 64) % n == 0)

    masks = {"second": every(2), "third": every(3), "fifth": every(5), "captured": tw.document(ids)}
    q, k, v = (torch.randn(1, rows, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))

    def right(name: str) -> bool:
        found, want = (tw.attention(q, k, v, mask=masks[name], impl=impl) for impl in ("triton", "reference"))
        return bool(torch.allclose(found, want, atol=1e-5))

    assert right("second")
    assert not triton_attention._LISTS._known, "beside other kernels, whose turns nobody knows"
    monkeypatch.setattr(triton_attention, "in_turn", lambda device: True)
    for name, kept in (("second", 1), ("second", 1), ("third", 2), ("second", 2), ("captured", 2), ("fifth", 2)):
        assert right(name)
        assert len(triton_attention._LISTS._known) == kept
    ids.copy_(torch.arange(rows) // 400)
    assert right("captured")
    assert right("second")
