"""The simulated schedules agree with their closed formulas, and keep the order that the kernel's signals enforce."""

import itertools
from collections import defaultdict

import pytest

from tilewise.core import device
from tilewise.core.errors import InputError
from tilewise.explain.timeline import EXPONENTIALS, SCHEDULES, TENSOR_FLOP, Schedule, Span, Trip, period, simulate

TRIPS = [
    Trip.of(128, 64),
    Trip.of(128, 128),
    Trip.of(64, 256),
    Trip(300, 200, 100),
    Trip(100, 150, 400, 30, 10),
    Trip(100, 50, 150, 500),
]


def end(spans: tuple[Span, ...]) -> float:
    return max(span.end for span in spans)


@pytest.mark.parametrize("trip", TRIPS, ids=str)
@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_further_tile_costs_one_period(schedule: Schedule, warpgroups: int, trip: Trip) -> None:
    ends = [end(simulate(trip, tiles, schedule, warpgroups=warpgroups)) for tiles in (10, 11, 12)]
    expected = period(trip, schedule, warpgroups=warpgroups)
    assert [b - a for a, b in itertools.pairwise(ends)] == pytest.approx([expected, expected])


def test_what_the_schedules_save() -> None:
    trip, tiles = Trip(512, 512, 512, 160), 20
    in_step, overlapped, in_turns = (end(simulate(trip, tiles, schedule)) for schedule in SCHEDULES)
    assert in_step == tiles * (2 * (512 + 512 + 512) + 160)
    # the outputs of all tiles but the last disappear behind the softmax of the next; turns hide that softmax too
    assert in_step - overlapped == (tiles - 1) * 2 * 512
    assert period(trip, "overlapped") - period(trip, "in turns") == 160
    assert overlapped - in_turns == pytest.approx((tiles - 1) * 160, abs=2 * 512)  # but for how the last turn ends


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_order_and_work(schedule: Schedule) -> None:
    trip, tiles, stages = Trip.of(128, 128), 9, 2
    spans = simulate(trip, tiles, schedule, warpgroups=2, stages=stages)
    at = {(span.kind, span.warpgroup, span.tile): span for span in spans}
    assert len(at) == len(spans) == tiles * (2 + 2 * 4)
    for t, c in itertools.product(range(tiles), range(2)):
        assert at["keys", -1, t].end <= at["scores", c, t].begin < at["scores", c, t].end <= at["rest", c, t].begin
        assert at["exponentials", c, t].end <= at["output", c, t].begin
        assert at["values", -1, t].end <= at["output", c, t].begin
        if t >= stages:  # a place is filled again when both warpgroups are done with it
            assert at["scores", c, t - stages].end <= at["keys", -1, t].begin
            assert at["output", c, t - stages].end <= at["values", -1, t].begin
    fetches = sorted((span for span in spans if span.warpgroup < 0), key=lambda span: span.begin)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(fetches))
    assert all(span.end - span.begin >= trip.scores for span in spans if span.kind in ("scores", "output"))


def test_turns_keep_the_products_apart_and_nothing_else_does() -> None:
    products = defaultdict(list)
    for schedule in SCHEDULES:
        for span in simulate(Trip.of(128, 128), 9, schedule):
            if span.kind == "scores" and 0 < span.tile < 8:  # not the first tile and the last, which take no turns
                products[schedule].append(span.end - span.begin)
    assert set(products["in step"]) == set(products["overlapped"]) == {2 * 512.0}
    assert set(products["in turns"]) == {512.0}


def test_clocks_of_a_trip() -> None:
    trip = Trip.of(128, 128)
    assert (trip.scores, trip.output, trip.exponentials) == (512, 512, 512)
    assert trip.rest == 64 + 32 + 64
    assert Trip.of(128, 64).exponentials / Trip.of(128, 64).scores == 2
    h100, a100 = device.find("H100"), device.find("A100")
    hopper, ampere = (gpu.peak("bf16") / gpu.num_sms / flop for gpu, flop in ((h100, TENSOR_FLOP), (a100, 2048)))
    assert (round(hopper / 1e7), round(ampere / 1e7)) == (183, 141)  # the clocks, in 10 MHz, that the peaks are made of
    assert TENSOR_FLOP // EXPONENTIALS == 256


def test_bad_input() -> None:
    for name in ("tiles", "warpgroups", "stages"):
        with pytest.raises(InputError, match=name):
            simulate(Trip(1, 1, 1), **({"tiles": 2} | {name: 0}))
    with pytest.raises(InputError, match="schedule"):
        simulate(Trip(1, 1, 1), 2, "serial")  # type: ignore[arg-type]
