"""Timing that treats every contender alike: they take turns, call by call, so that clocks and heat are shared.

At its limit of power a GPU lowers its clock until what runs draws less. Call by call contenders then share one clock,
which whoever draws most has lowered for all; so products take turns of many calls, of which the first half is left out:
then the clock is that of a contender's own work (benchmarks/NOTES.md).

On a GPU each call is timed by CUDA events after a read of a buffer larger than the L2 cache, which then holds nothing
of the call's, and nothing that its first reads would have to write back for others (benchmarks/NOTES.md). The host
never waits between calls, and the GPU does before each, or before a turn of many, so that a time holds no launch that
came late (what launches cost is a case of its own, `overhead`). Where the host falls behind all the same, since others
have its processors, the calls that the GPU came to before they were launched do not count; where hardly any is left,
all contenders take their turns again, the host further ahead. On a CPU each call is timed by the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from tilewise.testing.graphs import captured

FLUSH_BYTES = 256 * 2**20
WARMUP_MS = 50.0
TURN_MS = 120.0  # of calls that may run at the limit of power
TURNS = 5  # of these for each contender, at most
LEAD_CYCLES = 40_000_000  # some 20 ms, which the host is ahead when a turn of many calls begins
FLUSH_MS = 0.06  # about what lies between calls
FEWEST = 5  # calls launched in time; if there are fewer, the GPU waits longer
LONGER = (1, 8, 64)  # times as long
LATE = "the host launched its calls late"
WAIT_CYCLES = 600_000  # 0.3 ms, in which the host gets through most calls
METHOD_GPU = (
    "CUDA events around each call, L2 filled before it by a read of 256 MiB and the GPU kept waiting until the host is "
    "ahead, contenders alternating call by call, {rounds} rounds after {warmup_ms:.0f} ms of warm-up each, calls that "
    "were launched late left out"
)
METHOD_TURNS = (
    "CUDA events around each call, L2 filled before it by a read of 256 MiB, contenders alternating in turns of "
    "{turn_ms:.0f} ms, before each of which the GPU waits 20 ms for the host to be ahead and whose second half counts, "
    "calls that were launched late left out, {rounds} turns each after {warmup_ms:.0f} ms of warm-up"
)
METHOD_CPU = (
    "monotonic clock around each call, contenders alternating call by call, "
    "{rounds} rounds after {warmup_ms:.0f} ms of warm-up each"
)

R = TypeVar("R")
Call = Callable[[], object]
Quantiles = tuple[float, float, float]


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one contender over all rounds, or the message of the error that it raised."""

    times_ms: list[float]
    failure: str | None = None

    @property
    def quantiles(self) -> Quantiles | None:
        """(p20, p50, p80) in milliseconds."""
        return quantiles(self.times_ms) if self.times_ms else None


def quantiles(times_ms: list[float]) -> Quantiles:
    """(p20, p50, p80), linear between neighbours."""
    values = torch.tensor(times_ms, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    p20, p50, p80 = values.tolist()
    return p20, p50, p80


def method(device: str, rounds: int, warmup_ms: float = WARMUP_MS, turn_ms: float = 0.0) -> str:
    """How `interleaved` measures, in words, for the record."""
    text = METHOD_CPU if device != "cuda" else METHOD_TURNS if turn_ms else METHOD_GPU
    return text.format(rounds=rounds, warmup_ms=warmup_ms, turn_ms=turn_ms)


def interleaved(
    calls: Mapping[str, Call], *, device: str, rounds: int = 60, warmup_ms: float = WARMUP_MS, turn_ms: float = 0.0
) -> dict[str, Timed]:
    """Time every call, taking turns; a call that raises while it warms up drops out and its message is kept.

    Each contender has `rounds` turns: a call, or on a GPU as many as `turn_ms` hold, of which the second half is timed.
    The order rotates from round to round, so no one always follows the same.
    """
    warm, failures = _warm_up_all(calls, device, warmup_ms)
    live = {name: calls[name] for name in warm}
    if device == "cuda":
        repeats = {name: max(1, round(turn_ms / (call_ms + FLUSH_MS))) for name, call_ms in warm.items()}
        times = _gpu_rounds(live, rounds, repeats, LEAD_CYCLES if turn_ms else WAIT_CYCLES)
        failures |= {name: LATE for name in live if not times[name]}
    else:
        times = _cpu_rounds(live, rounds)
    return {name: Timed(times.get(name, []), failures.get(name)) for name in calls}


def failure_message(error: Exception) -> str:
    """The error's type and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _warm_up_all(calls: Mapping[str, Call], device: str, warmup_ms: float) -> tuple[dict[str, float], dict[str, str]]:
    """(Milliseconds of a call, the host's wait for it included, by name; messages of those that raised)."""
    warm, failures = {}, {}
    for name, call in calls.items():
        try:
            warm[name] = _warm_up(call, device, warmup_ms)
        except Exception as error:
            failures[name] = failure_message(error)
    return warm, failures


def _warm_up(call: Call, device: str, warmup_ms: float) -> float:
    call()  # compiles; its time must not count as warm-up
    _wait(device)
    start = time.perf_counter()
    count = 0
    while (time.perf_counter() - start) * 1e3 < warmup_ms:
        call()
        _wait(device)
        count += 1
    return (time.perf_counter() - start) * 1e3 / max(count, 1)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _order(names: list[str], turn: int) -> list[str]:
    shift = turn % len(names) if names else 0
    return names[shift:] + names[:shift]


def _gpu_rounds(
    calls: Mapping[str, Call], rounds: int, repeats: Mapping[str, int], lead: int
) -> dict[str, list[float]]:
    """Milliseconds of the calls by name that were in time, none where hardly any was; see `_gpu_turns`."""
    found: dict[str, list[float]] = {}
    for longer in LONGER:
        timed = _gpu_turns(calls, rounds, repeats, lead * longer)
        found = {name: in_time(of_call) for name, of_call in timed.items()}
        if all(found.values()):
            break
    return found


def _gpu_turns(
    calls: Mapping[str, Call], rounds: int, repeats: Mapping[str, int], lead: int
) -> dict[str, list[tuple[float, bool]]]:
    """Milliseconds of calls by name, and whether they were late: those of the second half of each turn, which has
    `repeats` of them and begins when the host is `lead` clocks ahead.
    """
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, bool]]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in _order(list(calls), turn):
            for count in range(repeats[name]):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.sum()
                if count == 0:
                    torch.cuda._sleep(lead)
                start.record()
                calls[name]()
                end.record()
                late = start.query()  # the GPU was there before all of the call was launched
                if count >= repeats[name] // 2:
                    events[name].append((start, end, late))
    torch.cuda.synchronize()
    return {name: [(start.elapsed_time(end), late) for start, end, late in of_call] for name, of_call in events.items()}


def in_time(timed: list[tuple[float, bool]]) -> list[float]:
    """The times of calls that were not late; none where hardly any was in time."""
    found = [time_ms for time_ms, late in timed if not late]
    return found if len(found) >= min(FEWEST, len(timed)) else []


def _cpu_rounds(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in _order(list(calls), turn):
            start = time.perf_counter()
            calls[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def host_times(calls: Mapping[str, Call], *, device: str, rounds: int = 20, repeat: int = 100) -> dict[str, Timed]:
    """Host time per call, launches included, the device never waited for within a round.

    Each round times `repeat` calls of one contender in a row, then of the next; one value per round.
    """

    live, failures = _warm_up_all(calls, device, WARMUP_MS)
    times: dict[str, list[float]] = {name: [] for name in live}
    for turn in range(rounds):
        for name in _order(list(live), turn):
            call = calls[name]
            _wait(device)
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - start) * 1e3 / repeat)
    return {name: Timed(times.get(name, []), failures.get(name)) for name in calls}


def graphed(call: Callable[[], R], device: str) -> Callable[[], R]:
    """`call` captured in a CUDA graph, whose replays give the same tensors each time; on a CPU the call itself."""
    if device != "cuda":
        return call
    graph, result = captured(call)

    def replay(_keep: object = call) -> R:  # with what it reads
        graph.replay()
        return result

    return replay


def ceilings(device: str, *, size: int | None = None, copy_bytes: int | None = None) -> tuple[float, float]:
    """(TFLOP/s, GB/s) that this machine reaches right now: a square matrix product and a copy, random data.

    GPU: bf16, 8192 x 8192 x 8192, and a copy of 2 GiB. CPU: fp32, 2048 x 2048 x 2048, and a copy of 256 MiB.
    The copy counts bytes read plus bytes written.
    """
    on_gpu = device == "cuda"
    size = size or (8192 if on_gpu else 2048)
    count = (copy_bytes or (2 * 2**30 if on_gpu else 256 * 2**20)) // 4
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    timed = interleaved(
        {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)},
        device=device, rounds=TURNS if on_gpu else 30, warmup_ms=100, turn_ms=TURN_MS,
    )  # fmt: skip
    for name, result in timed.items():
        if result.quantiles is None:
            raise RuntimeError(f"the ceiling could not be measured: {name}: {result.failure}")
    matmul_ms, copy_ms = (result.quantiles[1] for result in timed.values() if result.quantiles)
    return 2 * size**3 / matmul_ms / 1e9, 2 * 4 * count / copy_ms / 1e6
