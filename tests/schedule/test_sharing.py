"""Which requests share a prefix, and how that divides: every key of every request is in exactly one unit of its."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.errors import InputError
from tilewise.schedule.sharing import Group, common_tiles, groups_of, saves
from tilewise.schedule.worklist import WorkList

FREE = {"together": 4, "block_n": 16, "token_bytes": 1000, "part_bytes": 1}


def test_what_neighbours_have_in_common() -> None:
    """Whole tiles of pages that are the same, before the queries of both."""
    tables = [(7, 8, 9, 1), (7, 8, 9, 2), (7, 8, 9, 2), (7, 8), (), (5, 8), (5, 8)]
    seqlens = [64, 60, 63, 32, 0, 32, 31]
    assert common_tiles(tables, seqlens, 1, 16, 8) == [0, 6, 7, 3, 0, 0, 3]
    assert common_tiles(tables, seqlens, 8, 16, 8) == [0, 6, 6, 3, 0, 0, 2]
    assert common_tiles(tables, seqlens, 1, 16, 64) == [0] * 7
    assert common_tiles(tables, seqlens, 1, 16, 8, 16) == [0, 6, 6, 2, 0, 0, 2]
    assert common_tiles(tables, seqlens, 1, 16, 16, 8) == common_tiles(tables, seqlens, 1, 16, 16)
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
    """Four requests read ten tiles once instead of four times: 30 saved, of 100 bytes, for two parts of each."""
    sizes = {"together": 4, "block_n": 25, "token_bytes": 4}
    assert groups_of([0, 10, 10, 10], part_bytes=374, **sizes) == [(0, 4, 10)]
    assert groups_of([0, 10, 10, 10], part_bytes=375, **sizes) == []
    assert groups_of([0, 10, 10, 10], part_bytes=1, **sizes | {"together": 1}) == [], "each reads it for itself"


def test_a_prefix_in_many_pieces_leaves_more_parts() -> None:
    """Two requests: half of their keys saved, two parts of each up to 511 tokens, and a third from 512 on."""
    sizes = {"together": 2, "token_bytes": 2, "part_bytes": 255}
    assert saves(2, 511, **sizes)
    assert not saves(2, 512, **sizes)
    assert saves(2, 1023, **sizes)


COMMON = st.lists(st.integers(0, 12), min_size=1, max_size=20)


@given(
    COMMON, st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 9), st.integers(0, 200),
    st.sampled_from([8, 16]),
)  # fmt: skip
def test_every_key_is_in_one_unit_of_its_request(
    drawn: list[int], together: int, heads: int, programs: int, part_bytes: int, prefix_n: int
) -> None:
    common = [0, *drawn[1:]]
    keys = [16 * max(pair) + 1 + r % 16 for r, pair in enumerate(itertools.pairwise([*common, 0]))]
    groups = groups_of(common, together=together, block_n=16, token_bytes=6, part_bytes=part_bytes)
    for group in groups:
        assert group.requests > 1
        assert 0 < group.tiles <= min(common[group.first + 1 : group.first + group.requests])
    ends = [(group.first, group.first + group.requests) for group in groups]
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(ends))
    work = WorkList.build(
        [1] * len(keys), keys, heads_q=heads, heads_kv=heads, programs=programs, block_n=16, groups=groups,
        together=together, prefix_n=prefix_n,
    )  # fmt: skip
    assert (work.prefixes is None) == (not groups)
    assert work.request.tolist() == list(range(len(keys)))
    sharers: dict[int, list[int]] = {}
    for request, begin, count, prefix in zip(work.request, work.begin, work.count, work.prefix, strict=True):
        assert begin + count == -(-keys[request] // 16)
        assert (prefix < 0) == (begin == 0)
        if prefix >= 0:
            assert work.prefixes is not None
            assert work.prefixes.begin[prefix] == 0
            assert work.prefixes.count[prefix] * prefix_n == begin * 16
            sharers.setdefault(int(prefix), []).append(int(request))
    for prefix, requests in sharers.items():
        assert work.prefixes is not None
        assert len(requests) <= together
        assert requests == [int(work.prefixes.request[prefix]) + n for n in range(len(requests))]
    for merge in work.merges():
        assert (work.prefix[merge.unit] >= 0) == bool(merge.prefix)
        assert len(merge.slots) > 1 or merge.prefix
    if work.prefixes is not None:
        assert list(sharers) == list(range(len(work.prefixes.request)))
        assert len(sharers) <= len(keys)  # what a kernel has room for
        assert {(m.unit, m.head) for m in work.merges()} >= {
            (unit, head) for unit in np.flatnonzero(work.prefix >= 0) for head in range(heads)
        }


def test_pieces_of_a_prefix_are_not_small() -> None:
    """A part for each 512 keys, where there are more programs; as many as there are, where there is more."""
    sizes: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "programs": 12, "together": 2}
    for tiles, pieces in ((1, 1), (8, 1), (9, 2), (32, 4), (800, 12)):
        work = WorkList.build([1, 1], [60_000] * 2, groups=[Group(0, 2, tiles)], **sizes)
        assert work.prefixes is not None
        assert work.prefixes.programs == pieces
        assert [len(merge.prefix) for merge in work.merges()] == [pieces] * 2


def test_requests_of_several_tiles_share_nothing() -> None:
    with pytest.raises(InputError, match="groups: got 3 tiles"):
        WorkList.build([40, 40], [90, 90], heads_q=1, heads_kv=1, programs=1, groups=[Group(0, 2, 1)], together=2)
