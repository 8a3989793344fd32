"""Our engine as a contender, and what only it is asked: tokens computed, pages shared, what the host takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.engines.driver import Answered, drive
from benchmarks.engines.workloads import Request, Workload
from tilewise.engine import Engine, EngineConfig, SamplingParams
from tilewise.engine.models.decoder import Decoder
from tilewise.explain.engine_tracer import TracedStep, Tracer

TEMPERATURE = 0.6  # of all contenders, as in nano-vllm's bench
WINDOW = 64  # steps whose kernels are looked at


class Tilewise:
    """`tilewise.engine.Engine`, step by step."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self.engine = Engine(decoder, config=config)
        self._keys: dict[str, int] = {}
        self._seen: dict[int, int] = {}

    def add(self, key: int, request: Request) -> None:
        params = SamplingParams(temperature=TEMPERATURE, seed=key, max_tokens=request.count, ignore_eos=True)
        self._keys[self.engine.add(list(request.prompt), params)] = key
        self._seen[key] = 0

    def step(self, wait: float) -> list[Answered]:
        changed, found = self.engine.advance(), []
        now = time.perf_counter()
        for request in changed:
            key, (sample,) = self._keys[request.request_id], request.samples
            count = len(sample.tokens) - sample.prompt_length
            answer = sample.output_tokens if request.finished else None
            found.append(Answered(key, [now] * (count - self._seen[key]), answer))
            self._seen[key] = count
        return found


@dataclass(frozen=True)
class Counts:
    """What a run computed and held, counted at each step.

    Attributes:
        computed: tokens that went through the model.
        cached: tokens of prompts that were found in the prefix cache.
        pages: pages in use, the most at a time.
        entries: entries of block tables in the step in which they are most.
        held: pages in that step.
        preemptions: samples that lost their pages.
    """

    computed: int
    cached: int
    pages: int
    entries: int
    held: int
    preemptions: int


def counted(contender: Tilewise, workload: Workload) -> Counts:
    """Answer a workload and count; not to be timed."""
    engine = contender.engine
    computed, cached, pages, most = [0], [0], [0], [(0, 0)]
    launch, before = engine.runner.launch, engine.scheduler.preemptions

    def counting(work, growth):  # type: ignore[no-untyped-def]
        computed[0] += sum(each.count for each in work)
        for each in work:
            first = each.sample.index == each.turn == 0 and each.start == each.sample.request.cached_tokens
            cached[0] += each.start if first else 0
        used = engine.pages.allocator.num_used
        held = [sample.sequence for sample in engine.scheduler.running if sample.sequence is not None]
        entries = sum(len(part.pages) - part.dropped for each in held for part in each.parts)
        pages[0], most[0] = max(pages[0], used), max(most[0], (entries, used))
        return launch(work, growth)

    engine.runner.launch = counting  # type: ignore[method-assign]
    try:
        drive(contender, workload)
    finally:
        del engine.runner.launch
    return Counts(computed[0], cached[0], pages[0], *most[0], engine.scheduler.preemptions - before)


def traced(contender: Tilewise, workload: Workload) -> list[TracedStep]:
    """The steps of a workload, with the times of the host's parts."""
    with Tracer(contender.engine, compute=False) as tracer:
        drive(contender, workload)
    return [step for step in tracer.steps if step.counts]


def host_ms(step: TracedStep, device: str) -> float:
    """What the host does itself: on a GPU all but its wait for the device, on a CPU all but the model."""
    return step.ms - step.total("wait") if device == "cuda" else step.ms - step.total("launch", "wait")


def waited_on_cpu(steps: list[TracedStep]) -> float:
    """The share of the time in which nothing of the model is computed."""
    return sum(host_ms(step, "cpu") for step in steps) / sum(step.ms for step in steps)


def waited_on_gpu(contender: Tilewise, steps: list[TracedStep], workload: Workload) -> float | None:
    """The share of the time of some steps in which the GPU runs no kernel, None where there are too few steps.

    The time is that of the `steps` that were traced; the kernels are those of the same steps of another run of the same
    sizes, since a profiler slows the host down. Steps lie in the middle of the run.
    """
    first = len(steps) // 2
    last = first + WINDOW
    if last >= len(steps):
        return None
    wall = steps[last].begin - steps[first].begin
    kernels = profiled(contender, workload, first, last)
    return max(0.0, 1 - busy_ms(kernels) / wall)


def profiled(contender: Tilewise, workload: Workload, first: int, last: int) -> list[tuple[float, float]]:
    """Beginning and end of each kernel and copy of some steps, in milliseconds."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    engine, count = contender.engine, [0]
    launch = engine.runner.launch

    def launching(work, growth):  # type: ignore[no-untyped-def]
        if count[0] in (first, last):
            torch.cuda.synchronize()
            (profiler.start if count[0] == first else profiler.stop)()
        count[0] += 1
        return launch(work, growth)

    engine.runner.launch = launching  # type: ignore[method-assign]
    try:
        drive(contender, workload)
    finally:
        del engine.runner.launch
    on_device = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.time_range.start / 1e3, event.time_range.end / 1e3) for event in on_device]


def busy_ms(spans: list[tuple[float, float]]) -> float:
    """The time that is covered by at least one span."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
