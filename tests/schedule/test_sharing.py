"""Which requests share a prefix, and how that divides: every key of every request is in exactly one unit of its."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.errors import InputError
from tilewise.schedule.sharing import Group, common_tiles, groups_of
from tilewise.schedule.worklist import WorkList

FREE = {"together": 4, "tile_bytes": 1000, "part_bytes": 1}


def test_what_neighbours_have_in_common() -> None:
    """Whole tiles of pages that are the same, before the queries of both."""
    tables = [(7, 8, 9, 1), (7, 8, 9, 2), (7, 8, 9, 2), (7, 8), (), (5, 8), (5, 8)]
    seqlens = [64, 60, 63, 32, 0, 32, 31]
    assert common_tiles(tables, seqlens, 1, 16, 8) == [0, 6, 7, 3, 0, 0, 3]
    assert common_tiles(tables, seqlens, 8, 16, 8) == [0, 6, 6, 3, 0, 0, 2]
    assert common_tiles(tables, seqlens, 1, 16, 64) == [0] * 7
    assert common_tiles([], [], 1, 16, 64) == []


@pytest.mark.parametrize(
    ("common", "groups"),
    [
        ([], []),
        ([0], []),
        ([0, 0, 0], []),
        ([0, 5, 5, 4], [(0, 4, 4)]),
        ([0, 5, 0, 3, 0], [(0, 2, 5), (2, 2, 3)]),
        ([0, 9, 2, 9, 9], [(0, 2, 9), (2, 3, 9)]),
        ([0, 2, 2, 9, 2], [(0, 2, 2), (2, 2, 9)]),
        ([0, 9, 5, 3, 2], [(0, 5, 2)]),
    ],
)
def test_groups(common: list[int], groups: list[tuple[int, int, int]]) -> None:
    assert groups_of(common, **FREE) == groups


def test_a_group_must_pay() -> None:
    """Four requests read ten tiles once instead of four times: 30 saved, of 100 bytes, for four requests' parts."""
    sizes = {"together": 4, "tile_bytes": 100}
    assert groups_of([0, 10, 10, 10], part_bytes=576, **sizes) == [(0, 4, 10)]
    assert groups_of([0, 10, 10, 10], part_bytes=577, **sizes) == []
    assert groups_of([0, 10, 10, 10], part_bytes=1, together=1, tile_bytes=100) == [], "each reads it for itself"


COMMON = st.lists(st.integers(0, 12), min_size=1, max_size=20)


@given(COMMON, st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 9), st.integers(0, 400))
def test_every_key_is_in_one_unit_of_its_request(
    drawn: list[int], together: int, heads: int, programs: int, part_bytes: int
) -> None:
    common = [0, *drawn[1:]]
    keys = [16 * max(pair) + 1 + r % 16 for r, pair in enumerate(itertools.pairwise([*common, 0]))]
    groups = groups_of(common, together=together, tile_bytes=100, part_bytes=part_bytes)
    for group in groups:
        assert group.requests > 1
        assert 0 < group.tiles <= min(common[group.first + 1 : group.first + group.requests])
    ends = [(group.first, group.first + group.requests) for group in groups]
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(ends))
    work = WorkList.build(
        [1] * len(keys), keys, heads_q=heads, heads_kv=heads, programs=programs, block_n=16, groups=groups,
        together=together,
    )  # fmt: skip
    seen: dict[int, list[tuple[int, int]]] = {}
    for unit, (request, begin, count, prefix) in enumerate(
        zip(work.request, work.begin, work.count, work.prefix, strict=True)
    ):
        if prefix < 0:
            assert begin == 0
            continue
        if prefix:
            of = unit - int(prefix)
            assert work.prefix[of] == -1
            assert work.request[of] == request - prefix + 1
            assert prefix <= together
            seen.setdefault(int(request), []).append((0, int(work.count[of])))
        seen.setdefault(int(request), []).append((int(begin), int(begin + count)))
    assert list(seen) == list(range(len(keys)))
    for request, runs in seen.items():
        ends = [0, *(end for _, end in runs)]
        assert [begin for begin, _ in runs] == ends[:-1]
        assert ends[-1] == -(-keys[request] // 16)
    assert len(work.request) <= 2 * len(keys)  # what a kernel has room for


def test_requests_of_several_tiles_share_nothing() -> None:
    with pytest.raises(InputError, match="groups: got 3 tiles"):
        WorkList.build([40, 40], [90, 90], heads_q=1, heads_kv=1, programs=1, groups=[Group(0, 2, 1)], together=2)
