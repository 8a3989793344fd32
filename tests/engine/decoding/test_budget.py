"""How many nodes a step computes, under made-up times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tests.engine.decoding.toy import random_tree
from tilewise.core.errors import InputError
from tilewise.engine.decoding.budget import Calibration, StepTimes, allocate
from tilewise.engine.decoding.tree import TokenTree

CHAIN = TokenTree((7, 1, 2, 3, 4), (-1, 0, 1, 2, 3), (1.0, 0.8, 0.64, 0.5, 0.4))


def times(seconds: Callable[[int], float], sizes: tuple[int, ...] = tuple(range(1, 9))) -> StepTimes:
    found = StepTimes()
    for size in (*sizes, *(16 * 2**n for n in range(7))):
        found.record(size, seconds(size))
    return found


def flat(tokens: int) -> float:
    """Bound by reading weights."""
    return 0.010


def loaded(tokens: int) -> float:
    """Bound by arithmetic."""
    return 0.001 * tokens


def knee(tokens: int) -> float:
    """The first up to 64 tokens, then the second."""
    return max(0.010, 0.010 * tokens / 64)


def test_times_are_learned_and_never_fall() -> None:
    found = StepTimes()
    assert found.predict(5) == 1.0
    found.record(64, 0.030)
    assert [found.predict(n) for n in (32, 64, 999)] == pytest.approx([0.015, 0.030, 0.030])
    found.record(128, 0.020)  # a lucky one
    assert found.predict(128) == 0.030
    for _ in range(50):
        found.record(128, 0.050)
        found.record(1, 0.010)
    assert found.predict(128) == pytest.approx(0.050, rel=0.02)
    assert found.predict(96) == pytest.approx(0.040, rel=0.02)
    assert found.predict(1) == pytest.approx(0.010)
    assert all(found.predict(n) <= found.predict(n + 1) for n in range(1, 300))


def test_one_slow_step_changes_little() -> None:
    found = StepTimes()
    for _ in range(30):
        found.record(8, 0.010)
    found.record(8, 5.0)
    assert found.predict(8) < 0.0125


def test_what_costs_nothing_is_taken() -> None:
    found = allocate([CHAIN, CHAIN], times(flat), tokens=2, most=99)
    assert found.trees == [CHAIN, CHAIN]
    assert found.gain == pytest.approx(1 + sum(CHAIN.values[1:]))


def test_nothing_is_taken_where_nothing_pays() -> None:
    found = allocate([CHAIN] * 4, times(loaded), tokens=4, most=99)
    assert [len(tree.tokens) for tree in found.trees] == [1] * 4
    assert found.gain == 1.0


@pytest.mark.parametrize("requests", [1, 4, 16, 32, 64, 200])
def test_load_takes_the_place_of_nodes(requests: int) -> None:
    found = allocate([CHAIN] * requests, times(knee), tokens=requests, most=9999)
    taken = sum(len(tree.tokens) - 1 for tree in found.trees)
    assert taken == (4 * requests if 5 * requests <= 64 else max(64 - requests, 0))


def test_requests_with_better_values_get_the_nodes() -> None:
    poor = TokenTree(CHAIN.tokens, CHAIN.parents, (1.0, 0.3, 0.2, 0.1, 0.1))
    found = allocate([poor, CHAIN, poor], times(flat), tokens=3, most=5)
    assert [len(tree.tokens) - 1 for tree in found.trees] == [1, 4, 0]
    found = allocate([poor, CHAIN], times(flat), tokens=2, most=3, factors=[1.0, 0.1])
    assert [len(tree.tokens) - 1 for tree in found.trees] == [3, 0]


def test_prompts_in_the_step_are_paid_for_anyway() -> None:
    pays = allocate([CHAIN], times(loaded), tokens=1024, most=4)
    assert len(pays.trees[0].tokens) == 5


def test_overhead_and_margin() -> None:
    assert allocate([CHAIN], times(flat), tokens=1, most=9, overhead=0.1).trees[0].tokens == (7,)
    assert allocate([CHAIN], times(flat), tokens=1, most=9, margin=3.0).gain > 3.0
    assert allocate([CHAIN], times(flat), tokens=1, most=9, margin=3.5).trees[0].tokens == (7,)
    assert allocate([], times(flat), tokens=0, most=9).trees == []
    assert allocate([CHAIN], times(flat), tokens=1, most=0).trees[0].tokens == (7,)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_is_faster(seed: int) -> None:
    """Every choice of nodes that is closed under parents, by brute force."""
    draw = random.Random(seed)
    trees = [random_tree(draw, size, 9) for size in (5, 4, 1)]
    step = times(lambda tokens: 1.0 + draw.choice([0.05, 0.4]) * (tokens > 4) + 0.2 * (tokens // 4))
    best = 0.0
    nodes = [(at, n) for at, tree in enumerate(trees) for n in range(1, len(tree.tokens))]
    for chosen in itertools.product([False, True], repeat=len(nodes)):
        taken = {node for node, yes in zip(nodes, chosen, strict=True) if yes}
        if all(trees[at].parents[n] == 0 or (at, trees[at].parents[n]) in taken for at, n in taken):
            rate = (3 + sum(trees[at].values[n] for at, n in taken)) / step.predict(3 + len(taken))
            best = max(best, rate)
    found = allocate(trees, step, tokens=3, most=99)
    assert found.gain == pytest.approx(best * step.predict(3) / 3)


@pytest.mark.parametrize(("seconds", "known", "best"), [(loaded, 40, 8), (loaded, 8, 8), (flat, 40, 40), (flat, 8, 40)])
def test_a_size_that_was_never_tried_is_tried_once_and_then_known(
    seconds: Callable[[int], float], known: int, best: int
) -> None:
    step, sizes = StepTimes(), [known]
    for _ in range(12):
        step.record(sizes[-1], seconds(sizes[-1]))
        found = allocate([CHAIN] * 8, step, tokens=8, most=99)
        sizes.append(sum(len(tree.tokens) for tree in found.trees))
    assert sizes[-3:] == [best] * 3


def test_a_request_that_promises_too_much_loses_its_nodes_and_is_tried_again() -> None:
    calibration = Calibration()
    assert calibration.factor == 1.0
    for _ in range(20):
        calibration.record(CHAIN, 0)
    assert calibration.factor < 0.1
    honest = Calibration()
    for _ in range(20):
        honest.record(CHAIN, 2)
    assert honest.factor == pytest.approx(2 / sum(CHAIN.values[1:]), rel=0.1)
    for _ in range(100):
        calibration.record()
    assert calibration.factor > 0.8


def test_nodes_for_the_proposer_promise_nothing() -> None:
    calibration = Calibration()
    calibration.record(TokenTree((7, 1), (-1, 0), (1.0, 1.0), (True, False)), 0)
    assert calibration.factor == 1.0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("tokens", lambda: StepTimes().record(0, 1.0)),
        ("seconds", lambda: StepTimes().record(1, 0.0)),
        ("seconds", lambda: StepTimes().record(1, float("nan"))),
        ("most", lambda: allocate([CHAIN], StepTimes(), tokens=1, most=-1)),
        ("tokens", lambda: allocate([CHAIN], StepTimes(), tokens=0, most=1)),
        ("factors", lambda: allocate([CHAIN], StepTimes(), tokens=1, most=1, factors=[])),
    ],
)
def test_bad_input_is_refused(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert error.value.name == name
