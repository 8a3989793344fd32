"""When the warpgroups of one SM use its units: a simulation of the Hopper forward's main loop, in clocks.

A model of the schedule, not of the machine. Two units are shared, the tensor cores and the exponential units; who uses
one at the same time shares it evenly. Nothing else takes turns, and signals take no time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tilewise.core.errors import InputError

TENSOR_FLOP = 4096  # dense 16-bit operations an SM does in a clock: twice an A100's 2048 (NVIDIA's white papers)
EXPONENTIALS = 16  # an SM's, in a clock (CUDA C++ Programming Guide, throughput of arithmetic instructions, 9.0)
FETCHED = 64  # bytes an SM receives in a clock: assumed, to have something to draw

Schedule = Literal["in step", "overlapped", "in turns"]
SCHEDULES: tuple[Schedule, ...] = ("in step", "overlapped", "in turns")
Name = tuple[str, int, int]  # kind, warpgroup (-1: the fetching warp), tile


@dataclass(frozen=True)
class Trip:
    """Clocks of one iteration of a warpgroup's loop, if it has each unit to itself.

    Args:
        scores, output: of the two products, on the tensor cores.
        exponentials: on the exponential units.
        rest: of the rest of the softmax, on units that are not shared: maxima, conversions, rescaling.
        fetch: until one tile of keys, or of values, is loaded.

    Example:
        >>> from tilewise.explain.timeline import Trip
        >>> trip = Trip.of(block_n=128, head_dim=128)
        >>> trip.scores, trip.exponentials
        (512.0, 512.0)
    """

    scores: float
    output: float
    exponentials: float
    rest: float = 0.0
    fetch: float = 0.0

    @classmethod
    def of(cls, block_n: int, head_dim: int) -> Trip:
        """64 queries on Hopper, in 16 bits; `rest` counts a warp's instructions, one per clock.

        Args:
            block_n: keys of a tile.
            head_dim: of q, k and v.

        Returns:
            A `Trip`.
        """
        product = 2 * 64 * block_n * head_dim / TENSOR_FLOP
        held, accumulated = 64 * block_n / 128, 64 * head_dim / 128  # numbers in each of 128 threads
        rest = held + held / 2 + accumulated  # maximum; conversion, two at a time; rescaling
        return cls(product, product, 64 * block_n / EXPONENTIALS, rest, 2 * block_n * head_dim / FETCHED)


@dataclass(frozen=True)
class Span:
    """What happened from `begin` to `end`. Kinds: keys, values (warpgroup -1), scores, output, rest, exponentials."""

    kind: str
    warpgroup: int
    tile: int
    begin: float
    end: float


@dataclass(frozen=True)
class _Task:
    unit: str
    clocks: float
    after: tuple[Name, ...]  # names of no task count as finished


def simulate(
    trip: Trip, tiles: int, schedule: Schedule = "in turns", *, warpgroups: int = 2, stages: int = 2
) -> tuple[Span, ...]:
    """Simulate the main loop of warpgroups that share an SM.

    Args:
        trip: clocks of one iteration.
        tiles: iterations.
        schedule: "in step": each product is waited for where it is issued. "overlapped": the scores of a tile and the
            output of the previous one are issued together, and the softmax of the tile runs during that output. "in
            turns": overlapped, and the two products of a warpgroup are issued after those of the previous warpgroup.
        warpgroups: consumer warpgroups.
        stages: slots of each ring buffer.

    Returns:
        A `Span` for each load, product and softmax, ordered by its beginning.

    Raises:
        InputError: a count below 1, or an unknown schedule.

    Example:
        >>> from tilewise.explain.timeline import Trip, simulate
        >>> max(span.end for span in simulate(Trip(512, 512, 512), tiles=4))
        9216.0
    """
    for name, value in (("tiles", tiles), ("warpgroups", warpgroups), ("stages", stages)):
        if value < 1:
            raise InputError(name, got=value, expected="an integer of at least 1", hint="the kernels have 2 stages")
    if schedule not in SCHEDULES:
        raise InputError("schedule", got=schedule, expected=", ".join(SCHEDULES), hint="see simulate's docstring")
    groups, last = range(warpgroups), tiles - 1
    tasks: dict[Name, _Task] = {}
    for t in range(tiles):
        before = ("values", -1, t - 2) if t > 1 else ("keys", -1, t - 1)
        free = tuple(("scores", c, t - stages) for c in groups)
        tasks["keys", -1, t] = _Task("fetch", trip.fetch, (before, *free))
        before = ("keys", -1, t + 1) if t < last else ("values", -1, t - 1)
        free = tuple(("output", c, t - stages) for c in groups)
        tasks["values", -1, t] = _Task("fetch", trip.fetch, (before, *free))
        for c in groups:
            ready: tuple[Name, ...] = (("keys", -1, t), ("output", c, t - 1))
            if schedule != "in step":
                ready = (("keys", -1, t), ("exponentials", c, t - 1), ("output", c, t - 2))
            if schedule == "in turns" and t > 0:
                ready = (*ready, ("output", c - 1, t - 1) if c > 0 else ("output", warpgroups - 1, t - 2))
            tasks["scores", c, t] = _Task("tensor", trip.scores, ready)
            tasks["rest", c, t] = _Task(f"rest {c}", trip.rest, (("scores", c, t),))
            tasks["exponentials", c, t] = _Task("exponentials", trip.exponentials, (("rest", c, t),))
            ready = (("exponentials", c, t), ("values", -1, t))
            if schedule != "in step":
                ready = (*ready, ("scores", c, t + 1))
            tasks["output", c, t] = _Task("tensor", trip.output, ready)
    return _run(tasks)


def _run(tasks: dict[Name, _Task]) -> tuple[Span, ...]:
    """All tasks, each as soon as what it comes `after` is finished."""
    left = {name: task.clocks for name, task in tasks.items()}
    begun: dict[Name, float] = {}
    spans: list[Span] = []
    now = 0.0
    while left:
        running = [name for name in left if not any(other in left for other in tasks[name].after)]
        sharing = Counter(tasks[name].unit for name in running)
        step = min(left[name] * sharing[tasks[name].unit] for name in running)
        for name in running:
            begun.setdefault(name, now)
            left[name] -= step / sharing[tasks[name].unit]
            if left[name] < 1e-6:
                del left[name]
                spans.append(Span(*name, begun[name], now + step))
        now += step
    return tuple(sorted(spans, key=lambda span: (span.begin, span.end)))


def period(trip: Trip, schedule: Schedule, *, warpgroups: int = 2) -> float:
    """Clocks of one iteration in the steady state, in closed form, if tiles arrive in time.

    For "in turns" it is a lower bound, which `Trip.of` reaches with the kernel's tile sizes.

    Args:
        trip: clocks of one iteration.
        schedule, warpgroups: as in `simulate`.

    Returns:
        A number of clocks.

    Example:
        >>> from tilewise.explain.timeline import Trip, period
        >>> period(Trip.of(block_n=128, head_dim=128), "in turns")
        2048.0
    """
    products, exponentials = trip.scores + trip.output, warpgroups * trip.exponentials
    if schedule == "in step":
        return warpgroups * products + trip.rest + exponentials
    if schedule == "overlapped":
        return warpgroups * trip.scores + max(warpgroups * trip.output, trip.rest + exponentials)
    return max(warpgroups * products, exponentials, trip.scores + trip.rest + trip.exponentials)
