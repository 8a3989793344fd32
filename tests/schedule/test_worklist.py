"""An even split of any batch: every tile once, shares that differ by at most one tile, parts that merge in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.formula.formula import as_mask
from tilewise.schedule.worklist import WorkList

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=6)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.sampled_from([16, 32]))
def test_every_tile_is_done_once_and_shares_are_equal(
    lengths: list[tuple[int, int]], heads: int, group: int, programs: int, rows: int
) -> None:
    work = WorkList.build(
        [q for q, _ in lengths], [k for _, k in lengths], heads_q=heads * group, heads_kv=heads, programs=programs,
        rows=rows, block_n=16,
    )  # fmt: skip
    assert list(work.request) == [r for r, (q, _) in enumerate(lengths) for _ in range(-(-q * group // rows))]
    done: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sizes = []
    for program in range(programs):
        segments = list(work.segments(program))
        sizes.append(sum(s.end - s.first for s in segments))
        for s in segments:
            done.setdefault((s.unit, s.head), []).append((s.first, s.end))
    assert sum(sizes) == work.work == sum(max(1, -(-lengths[r][1] // 16)) for r in work.request) * heads
    assert max(sizes) - min(sizes) <= 1
    assert set(done) == {(unit, head) for unit in range(len(work.request)) for head in range(heads)}
    for (unit, _), parts in done.items():
        ends = [0, *(end for _, end in parts)]
        assert [first for first, _ in parts] == ends[:-1]
        assert ends[-1] == work.count[unit]
    merges = {(m.unit, m.head): m.slots for m in work.merges()}
    assert set(merges) == {key for key, parts in done.items() if len(parts) > 1}
    slots = [slot for m in merges.values() for slot in m]
    assert len(set(slots)) == len(slots)  # no partial result is overwritten
    for key, parts in merges.items():
        assert len(parts) == len(done[key])
        assert list(parts) == sorted(parts)
        assert [slot % 2 for slot in parts] == [1] + [0] * (len(parts) - 1)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=4),
    st.integers(1, 90),
    st.integers(1, 3),
)
def test_units_visit_what_their_rows_see(lengths: list[tuple[int, int]], width: int, group: int) -> None:
    mask = tw.causal & tw.window(width)
    work = WorkList.build(
        [q for q, _ in lengths], [k for _, k in lengths], heads_q=group, heads_kv=1, programs=3, rows=16, block_n=16,
        mask=mask,
    )  # fmt: skip
    for r, tile, begin, count in zip(work.request, work.tile, work.begin, work.count, strict=True):
        queries, keys = lengths[r]
        rows = range(int(tile) * 16, min((int(tile) + 1) * 16, queries * group))
        seen = {
            j // 16
            for i in {row // group + keys - queries for row in rows}
            for j in range(max(0, i - width + 1), min(i, keys - 1) + 1)
        }
        if seen:
            assert (begin, begin + count) == (min(seen), max(seen) + 1)
        else:
            assert count == 1


def test_a_mask_that_is_no_run_visits_everything() -> None:
    mask = as_mask(lambda b, h, i, j: (i - j) % 3 == 0)
    work = WorkList.build([1], [100], heads_q=1, heads_kv=1, programs=2, block_n=16, mask=mask)
    assert (work.begin.tolist(), work.count.tolist()) == ([0], [7])


def test_refused() -> None:
    with pytest.raises(InputError, match="programs: got 0"):
        WorkList.build([1], [1], heads_q=1, heads_kv=1, programs=0)
    with pytest.raises(InputError, match="1 and 2 lengths"):
        WorkList.build([1], [1, 2], heads_q=1, heads_kv=1, programs=1)
    with pytest.raises(InputError, match="3 heads on 2"):
        WorkList.build([1], [1], heads_q=3, heads_kv=2, programs=1)
