"""The plan of a batch of which some requests are another launch's, in the interpreter: whose work it has, and how the
multiprocessors are divided.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.ops import triton_launch
from tilewise.ops.attention.problem import make_call
from tilewise.ops.attention.triton_planned import Beside, work_of
from tilewise.ops.attention.triton_work import SLOWER, UNIT
from tilewise.schedule.worklist import WorkList
from tilewise.testing.case import Case
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged

ROWS, KEYS, FEW = 4, 16, 12  # of a tile, and of a request


def _planned(
    lengths: list[tuple[int, int]], group: int, beside: Beside
) -> tuple[np.ndarray, int, list[int], WorkList | None, int]:
    """(units, tiles, shares) by the kernel, and the host's plan of those with few rows and the tiles of all others."""
    inputs = make_inputs(Case("plan", packed=tuple(lengths), heads_q=2 * group), torch.float32)
    pool = paged(inputs, 16)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(triton_launch, "remember", False)
        call = make_call(inputs.q, pool.k, pool.v, layout=pool.layout)
        work = work_of(call, ROWS, KEYS, 64, 9, ROWS, beside=beside)
        memory, shares = work.memory(call), torch.full((3,), -7, dtype=torch.int32)
        work.launch(call, memory, shares)

    def on_host(some: list[tuple[int, int]]) -> WorkList | None:
        sizes = {"heads_q": 2 * group, "heads_kv": 2, "programs": 3, "rows": ROWS, "block_n": KEYS}
        return WorkList.build([q for q, _ in some], [k for _, k in some], **sizes) if some else None

    many = on_host([pair for pair in lengths if pair[0] * group > FEW])
    few = on_host([pair for pair in lengths if pair[0] * group <= FEW])
    elsewhere = 0 if many is None else int(many.count.sum())
    units = memory.units.view(-1, UNIT.value).numpy()
    return units, int(memory.before[-2]), shares.tolist(), few, elsewhere


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400)), min_size=1, max_size=8),
    group=st.integers(1, 3),
    multiprocessors=st.integers(2, 132),
    spare=st.integers(0, 5),
)
def test_few_are_planned_and_the_others_counted(
    lengths: list[tuple[int, int]], group: int, multiprocessors: int, spare: int
) -> None:
    beside = Beside(FEW, max(1, multiprocessors - spare), multiprocessors)
    units, tiles, (start, idle, share), few, elsewhere = _planned(lengths, group, beside)
    count = 0 if few is None else len(few.request)
    if few is not None:
        of_all = [b for b, (queries, _) in enumerate(lengths) if queries * group <= FEW]
        columns = (np.array(of_all, dtype=np.int64)[few.request], few.tile, few.begin, few.count)
        for n, want in enumerate(columns):
            assert np.array_equal(units[:count, n], want), f"column {n} of the units"
    assert tiles == (0 if few is None else int(few.count.sum()))

    # so that both end together, in the model of cost: rounded up, and no more than reads as fast as memory is
    weight = SLOWER.value * tiles
    want = 0 if tiles == 0 else math.ceil(multiprocessors * weight / (weight + 8 * elsewhere))
    if elsewhere:
        want = min(want, 2 * multiprocessors // 3)
    assert share == want
    assert (start, idle) == (-idle, max(0, share - (multiprocessors - beside.programs)))
    assert idle < beside.programs or not elsewhere, "someone is left for the others"


def test_all_multiprocessors_are_theirs_who_are_alone() -> None:
    decoding, prompts = [(1, 300)] * 5, [(30, 300)] * 2
    assert _planned(decoding, 1, Beside(FEW, 132, 132))[2] == [-132, 132, 132]
    assert _planned(prompts, 1, Beside(FEW, 132, 132))[2] == [0, 0, 0]
    start, idle, share = _planned(decoding + prompts, 1, Beside(FEW, 132, 132))[2]
    assert 0 < idle == share == -start < 132
