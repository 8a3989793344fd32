"""The plan of prefixes that requests share, in the interpreter: as the host's, and places of parts that do not meet."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.interpret.test_paged import pieces_and_owners
from tests.interpret.test_shared_prefixes import GROUPINGS, PAGED, call_of, case_of
from tilewise.ops.attention import triton_paged, triton_prefixes, triton_work
from tilewise.ops.attention.problem import make_call
from tilewise.ops.attention.sharing import bytes_of, requests_of_tile, rows_of_shared_tile, unshared
from tilewise.ops.attention.triton_paged import PREFIX_KEYS
from tilewise.ops.attention.triton_planned import PrefixTile, shared_work_of
from tilewise.ops.attention.triton_plans import multiprocessors
from tilewise.ops.attention.triton_work import UNIT
from tilewise.schedule.sharing import PIECE_KEYS, Group, common_tiles, groups_of, programs_of_lines
from tilewise.schedule.worklist import WorkList
from tilewise.testing.sharing import alike


@settings(max_examples=40, deadline=None)
@given(requests=GROUPINGS, page_size=st.integers(1, 40), queries=st.integers(1, 4), group=st.integers(1, 6))
@example(requests=[(700, 0), (700, 140), (700, 600)], page_size=16, queries=1, group=1)
@example(requests=[(700, 0), (700, 600), (700, 140)], page_size=16, queries=1, group=1)
@example(requests=[(700, 0)] + [(700, 600)] * 6, page_size=1, queries=4, group=4)
@example(requests=[(700, 0)] + [(700, 130)] * 2, page_size=16, queries=1, group=32)  # costs more than it saves
@example(requests=[(700, 0)] + [(700, 130)] * 3, page_size=16, queries=1, group=32)  # does not
def test_the_device_plans_as_the_host(
    requests: list[tuple[int, int]], page_size: int, queries: int, group: int
) -> None:
    keys, common = [n for n, _ in requests], [0, *(n for _, n in requests[1:])]
    case = case_of(keys, queries, heads_q=2 * group)
    call = call_of(alike(PAGED, case, common, page_size))
    assert unshared(call) is None
    assert call.pages is not None
    rows, block_n = triton_paged._tile(call)
    work = triton_paged._plans(call).work
    memory = work.memory(call)
    memory.arrived.fill_(7)
    work.launch(call, memory)
    assert memory.arrived.eq(0).all()
    assert memory.common is not None
    assert memory.prefixes is not None
    tables = call.pages.table.tolist()
    tables = [table[: -(-n // page_size)] for table, n in zip(tables, keys, strict=True)]
    tiles = common_tiles(tables, keys, queries, page_size, block_n)
    assert memory.common.tolist() == tiles
    token, part = bytes_of(call)
    shared_rows = rows_of_shared_tile(call, "triton_paged")
    together = requests_of_tile(call, shared_rows)
    assert together * queries * group <= shared_rows < 2 * together * queries * group
    assert rows >= queries * group
    groups = groups_of(tiles, together=together, block_n=block_n, token_bytes=token, part_bytes=part)
    want = WorkList.build(
        [queries] * len(keys), keys, heads_q=2 * group, heads_kv=2, programs=3, rows=rows, block_n=block_n,
        groups=groups, together=together, prefix_n=min(block_n, PREFIX_KEYS),
    )  # fmt: skip
    many = multiprocessors(call.q.device)
    of_prefixes, of_own = lines(want, prefix_n=min(block_n, PREFIX_KEYS), block_n=block_n, programs=many)
    same_line(want, memory.units, memory.before, of_own)
    if want.prefixes is None:
        assert memory.prefixes[1].eq(0).all()
    else:
        same_line(want.prefixes, *memory.prefixes, of_prefixes)


@settings(max_examples=20, deadline=None)
@given(requests=GROUPINGS, page_size=st.integers(1, 40), queries=st.integers(1, 4))
@example(requests=[(700, 0)] + [(700, 600)] * 6, page_size=1, queries=4)
def test_prefixes_of_larger_tiles(requests: list[tuple[int, int]], page_size: int, queries: int) -> None:
    """A prefix has whole ones of its own tiles, of four of the others each."""
    keys, common = [n for n, _ in requests], [0, *(n for _, n in requests[1:])]
    call = call_of(alike(PAGED, case_of(keys, queries, heads_q=4), common, page_size))
    work = shared_work_of(call, 32, 16, 6, 0, PrefixTile(3, 64, 128), 6)
    memory = work.memory(call)
    work.launch(call, memory)
    assert call.pages is not None
    assert memory.prefixes is not None
    tables = [row[: -(-n // page_size)] for row, n in zip(call.pages.table.tolist(), keys, strict=True)]
    tiles = common_tiles(tables, keys, queries, page_size, 32, 128)
    token, part = bytes_of(call)
    together = requests_of_tile(call, 64)
    groups = groups_of(tiles, together=together, block_n=32, token_bytes=token, part_bytes=part)
    want = WorkList.build(
        [queries] * len(keys), keys, heads_q=4, heads_kv=2, programs=6, block_n=32, groups=groups, together=together,
        prefix_n=128,
    )  # fmt: skip
    of_prefixes, of_own = lines(want, prefix_n=128, block_n=32, programs=3)
    same_line(want, memory.units, memory.before, of_own)
    if want.prefixes is not None:
        same_line(want.prefixes, *memory.prefixes, of_prefixes)
        assert (want.prefixes.count * 128 == want.begin[want.prefixes.request] * 32).all()


def lines(want: WorkList, **sizes: int) -> tuple[int, int]:
    """Programs of both lines, where twice as many are for requests' own tiles, one launch after the other."""
    tiles = 0 if want.prefixes is None else want.prefixes.work
    return programs_of_lines(tiles, want.work, own_programs=2 * sizes["programs"], meanwhile=False, **sizes)


def same_line(want: WorkList, units: torch.Tensor, before: torch.Tensor, programs: int) -> None:
    """Units, what is before each, behind the last one all there is, and units of one tile; then how many programs."""
    count = len(want.request)
    found = units.view(-1, UNIT.value).numpy()
    assert count <= len(before) - 2 == len(found) - 2
    for column, name in ((0, "request"), (1, "tile"), (2, "begin"), (3, "count"), (7, "prefix")):
        assert np.array_equal(found[:count, column], getattr(want, name)), name
    assert (found[count:, 3] == 1).all()
    upto = np.append(0, np.cumsum(want.count))
    assert np.array_equal(before.numpy()[: count + 1], upto)
    assert (before.numpy()[count:-1] == upto[-1]).all()
    assert before[-1] == programs


@triton.jit
def parts_found(FOUND, UNITS, OF_PREFIX, BEFORE, batch, rows_q, HEADS_KV: tl.constexpr, GROUP: tl.constexpr,
                PREFIX_TILE: tl.constexpr):  # fmt: skip
    u = tl.program_id(0) // HEADS_KV
    unit = triton_work.unit_of(UNITS, u)
    shared, row = triton_prefixes.parts_of_prefix(
        (OF_PREFIX, BEFORE), UNITS, u, unit, tl.program_id(0) % HEADS_KV, rows_q, batch, HEADS_KV, GROUP, PREFIX_TILE
    )
    tl.store(FOUND + 2 * tl.program_id(0), shared.to(tl.int64))
    tl.store(FOUND + 2 * tl.program_id(0) + 1, row)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), min_size=1, max_size=5),
    together=st.sampled_from([2, 4]),
    heads=st.integers(1, 3),
    programs=st.integers(1, 40),
)
def test_each_finds_the_parts_of_its_prefix(
    sizes: list[tuple[int, int]], together: int, heads: int, programs: int
) -> None:
    """Who leaves which part of a prefix, as on the host; no two parts have a row in common, and each request finds its
    own rows of all of them. Groups of so many requests and tiles; two queries each, of groups of three.
    """
    rows, batch = 6, sum(requests for requests, _ in sizes)
    firsts = np.cumsum([0, *(requests for requests, _ in sizes)]).tolist()
    groups = [Group(first, n, tiles) for first, (n, tiles) in zip(firsts, sizes, strict=False) if n > 1 and tiles > 0]
    work = WorkList.build(
        [2] * batch, [5000] * batch, heads_q=3 * heads, heads_kv=heads, programs=programs, groups=groups,
        together=together,
    )  # fmt: skip
    line = work.prefixes or WorkList(*[np.zeros(0, dtype=np.int64)] * 4, heads, 0, np.zeros(0, dtype=np.int64))
    block_r = together * rows
    left: dict[int, tuple[int, int, int, int]] = {}  # what lies in each row: piece, head, request, row of it
    parts = line.parts() if groups else {}
    rows_of = {p: rows * sum(work.prefix == p) for p in range(len(line.request))}
    for (p, head), pieces in parts.items():
        for piece in pieces:
            first = int(line.request[p])
            at = first * heads * rows + head * rows_of[p] + piece * block_r
            for r in range(rows_of[p]):
                assert at + r not in left, "two parts in one row"
                left[at + r] = (piece, head, first + r // rows, r % rows)
    assert max(left, default=-1) < batch * heads * rows + programs * block_r, "behind the room"

    def tensor(*columns: Any) -> torch.Tensor:
        return torch.from_numpy(np.stack(np.broadcast_arrays(*columns), -1).astype(np.int32)).contiguous()

    queries = np.array([2 * rows_of[p] // rows for p in rows_of])
    units = tensor(work.request, 0, work.begin, work.count, 5000, 2, 0, work.prefix)
    of_prefix = torch.zeros(batch + 2, UNIT.value, dtype=torch.int32)
    of_prefix[: len(queries)] = tensor(line.request, 0, 0, line.count, 0, queries, 0, -1)
    before = torch.full((batch + 2,), int(line.count.sum()), dtype=torch.int32)
    before[-1] = line.programs
    before[: len(queries)] = torch.from_numpy(np.cumsum(line.count) - line.count)
    found = torch.empty(batch, heads, 2, dtype=torch.int64)
    parts_found[(batch * heads,)](found, units, of_prefix, before, batch, 2, heads, 3, (programs, block_r, 64))
    for request, head in itertools.product(range(batch), range(heads)):
        shared, at = found[request, head].tolist()
        pieces = parts.get((int(work.prefix[request]), head), [])
        assert shared == len(pieces)
        for n, piece in enumerate(pieces):
            for r in range(rows):
                assert left[at + n * block_r + r] == (piece, head, request, r)


@triton.jit
def lines_of(FOUND, TILES, OWN, PROGRAMS: tl.constexpr, OWN_PROGRAMS: tl.constexpr, PREFIX_N: tl.constexpr,
             BLOCK_N: tl.constexpr, EARLY: tl.constexpr, N: tl.constexpr):  # fmt: skip
    n = tl.arange(0, N)
    found = triton_prefixes.programs_of_lines(
        tl.load(TILES + n), tl.load(OWN + n), PROGRAMS, OWN_PROGRAMS, PREFIX_N, BLOCK_N, EARLY
    )
    tl.store(FOUND + n, found[0])
    tl.store(FOUND + N + n, found[1])


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9000)), min_size=64, max_size=64),
    programs=st.integers(1, 140),
    of_each=st.integers(1, 3),
    sizes=st.sampled_from([(128, 64), (64, 64), (128, 128), (64, 32)]),
    early=st.booleans(),
)
@example(batches=[(512, 512)] * 64, programs=132, of_each=2, sizes=(128, 64), early=True)
def test_both_launches_have_programs(
    batches: list[tuple[int, int]], programs: int, of_each: int, sizes: tuple[int, int], early: bool
) -> None:
    """As many as on the host, all busy. Where requests are done meanwhile, both fit the GPU."""
    found = torch.empty(2, 64, dtype=torch.int32)
    given = torch.tensor(batches, dtype=torch.int32).T.contiguous()
    lines_of[(1,)](found, *given, programs, of_each * programs, *sizes, early, 64)
    for (tiles, own), got in zip(batches, found.T.tolist(), strict=True):
        prefix_n, block_n = sizes
        few = -(-PIECE_KEYS // prefix_n)
        assert tuple(got) == programs_of_lines(
            tiles, own, prefix_n=prefix_n, block_n=block_n, programs=programs, own_programs=of_each * programs,
            meanwhile=early,
        )  # fmt: skip
        of_prefixes, of_own = got
        assert (of_prefixes > 0) == (tiles > 0)
        assert of_prefixes <= max(programs if tiles >= few * programs else -(-tiles // few), 0)
        if of_own < of_each * programs:
            assert early
            assert own * block_n <= tiles * prefix_n
            assert 0 < of_own == (programs - of_prefixes) * of_each
        if batches[0] == (512, 512):  # 32 requests with 8k in common and 128 of their own, 8 heads
            assert got == [103, 2 * 29]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 150), min_size=1, max_size=27),
    programs=st.integers(1, 12),
    rounds=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_pieces_merge_each_row_once(rows: list[int], programs: int, rounds: int, random: Random) -> None:
    """The parts and counters of `hopper_decode`, whose pieces are several of a program, by a model of what it does:
    rows of so many tiles, whose pieces go on in any order.
    """
    work = sum(rows)
    found = torch.empty(3, 8192, dtype=torch.int32)
    rounds = rounds if work // programs >= triton_work.LARGE.value else 1
    pieces_and_owners[(1,)](*found, programs, rounds, work, 8192)
    starts, owner, _ = found.tolist()
    begins = np.cumsum([0, *rows]).tolist()

    todo: dict[int, list[int]] = {}  # rows of which a piece has some, in order
    for row, (first, end) in enumerate(itertools.pairwise(begins)):
        for piece in range(owner[first], owner[end - 1] + 1):
            if starts[piece + 1] > starts[piece]:
                todo.setdefault(piece, []).append(row)
    slots: dict[int, tuple[int, int]] = {}
    arrived: dict[int, int] = {}
    done: list[int] = []
    while todo:
        piece = random.choice(sorted(todo))
        row = todo[piece].pop(0)
        todo = {p: left for p, left in todo.items() if left}
        first, last = owner[begins[row]], owner[begins[row + 1] - 1]
        holders = [p for p in range(first, last + 1) if starts[p + 1] > starts[p]]
        if first == last:
            done.append(row)  # and written
            continue
        slots[2 * piece + (begins[row] >= starts[piece])] = (row, piece)
        arrived[first] = arrived.get(first, 0) + 1
        if arrived[first] == last - first + 1:
            assert holders == list(range(first, last + 1)), "a piece of nothing would never arrive"
            assert [slots[2 * p + (p == first)] for p in holders] == [(row, p) for p in holders]
            arrived[first] = 0
            done.append(row)
    assert sorted(done) == list(range(len(rows)))
    assert not any(arrived.values())


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.lists(st.integers(1, 150), min_size=1, max_size=9),
    heads=st.integers(1, 3),
    programs=st.integers(1, 40),
    some=st.floats(0, 1),
    rows=st.sampled_from([(1, 1), (3, 4), (4, 4)]),
)
def test_no_program_waits_for_a_later_one(
    tiles: list[int], heads: int, programs: int, some: float, rows: tuple[int, int]
) -> None:
    """Where prefixes may be shared, `some` programs of `hopper_decode` have all tiles, and whoever has a row's last
    tile in an even share of all merges it. Parts of (rows of a request, rows of a part) do not meet.
    """
    counts = [count for count in tiles for _ in range(heads)]
    work, begins = sum(counts), np.cumsum([0, *counts]).tolist()
    found = torch.empty(2, 3, 8192, dtype=torch.int32)
    for x, n in zip(found, (1 + int(some * (programs - 1)), programs), strict=True):
        pieces_and_owners[(1,)](*x, n, 1, work, 8192)
    leaves, merges = found[:, 1].tolist()
    of_request, of_part = rows
    left: set[int] = set()
    for row, (first, end) in enumerate(itertools.pairwise(begins)):
        assert leaves[end - 1] <= merges[end - 1]
        for piece in range(leaves[first], leaves[end - 1] + 1):
            part = {row * of_request + piece * of_part + r for r in range(of_request)}
            assert not part & left, "two parts in one row"
            left |= part
    assert max(left) < len(counts) * of_request + programs * of_part, "behind the room"


def test_pages_that_agree_again_are_not_shared() -> None:
    """Behind the first page that is another's, and after 4,096 pages."""
    for different, tiles in ((9, 1), (4095, 511), (4096, 512)):
        table = torch.arange(5000, dtype=torch.int32).repeat(3, 1)
        table[1, different] = 5000
        pool = [torch.zeros(5001, 16, 1, 16)] * 2
        layout = tw.Paged(table, torch.full((3,), 80_000, dtype=torch.int32), share_prefixes=True)
        call = make_call(torch.zeros(3, 1, 1, 16), *pool, layout=layout)
        work = triton_paged._plans(call).work
        memory = work.memory(call)
        work.launch(call, memory)
        assert memory.common is not None
        assert memory.common.tolist() == [0, tiles, tiles]


def test_a_prefix_is_read_by_few() -> None:
    """Of 16 requests of 4 rows, one tile; where each has 32, each two."""
    for heads, tiles in ((8, 1), (64, 8)):
        call = call_of(alike(PAGED, case_of([300] * 16, heads_q=heads), [0] + [280] * 15))
        work = triton_paged._plans(call).work
        memory = work.memory(call)
        work.launch(call, memory)
        assert memory.prefixes is not None
        count = 256 // PREFIX_KEYS
        assert memory.prefixes[1].tolist()[:-1] == [count * min(n, tiles) for n in range(17)]
        assert memory.units.view(-1, UNIT.value)[:16, 2:4].tolist() == [[2, 1]] * 16
