"""Questions `kv_waste`, `kv_sharing` and `kv_operations`: what pages cost and save, by the allocator alone, on a CPU.

`kv_waste` is the share of reserved slots that hold no token, both summed over the steps of all requests (one token a
step; a request's memory does not depend on the others, so they run one after another). Pages of 1 to 64 tokens stand
against contiguous memory: 2048 slots for every request; the prompt and the output's length rounded up to a power of
two, in a buddy block (a power of two again); and a buddy block for the exact lengths, as if they were known. Holes
between buddy blocks are not counted.

`kv_sharing` is 1 - pages / (sum of the block tables' lengths), summed in the same way, for n samples of one prompt, and
for beam search whose survivors are drawn at each step at random, with replacement, from the beams: no model's scores
enter, which may keep beams apart for longer. For n = 2 to 6 Kwon et al. (below, section 6.3) measured 6.1 to 9.8 %
(Alpaca) and 16.2 to 30.5 % (ShareGPT) with samples, 37.6 to 55.2 % and 44.3 to 66.3 % with beams.

The workloads have the mean lengths that Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, give in figure 11 for ShareGPT and Alpaca. It gives no spread in numbers: lengths are
log-normal, with three values of sigma for the waste and 1 for the sharing. Requests beyond 2048 tokens are drawn again,
so the means that were drawn stand in the records. All samples and beams of a request have the same output length.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.cases import Options
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.timing import quantiles
from tilewise.kv import PageAllocator, Sequence
from tilewise.testing.pages import MirroredCache, random_operations
from tools.families import FAMILIES

MEANS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}  # prompt, output
SIGMAS = (0.5, 1.0, 1.5)
PAGE_SIZES = (1, 8, 16, 32, 64)
WIDTHS = (2, 4, 6)
MAX_LENGTH = 2048
PAGE_SIZE = 16  # for sharing and random operations
POOL = 128  # pages, for random operations
Lengths = list[tuple[int, int]]
Grow = Callable[[PageAllocator, int, int, int, random.Random], Iterator[list[Sequence]]]


def run(options: Options) -> None:
    """Simulate every workload, then time random operations."""
    requests = 1000 if not options.quick else 5
    method = f"simulation of {requests} requests for waste and {requests // 5} for sharing, seeded"
    writer = Writer(current("cpu"), method=method, ceilings=(None, None), results=options.out)
    for workload in MEANS:
        for sigma in SIGMAS:
            if options.wants("waste"):
                _waste(workload, sigma, requests, writer)
        if options.wants("sharing"):
            _sharing(workload, requests // 5, writer)
    if options.wants("operations"):
        _operations(options)


def lengths(workload: str, sigma: float, requests: int) -> Lengths:
    """(prompt, output) of each request: log-normal around the workload's means, at least 1, together at most 2048."""
    draw = random.Random(f"{workload} {sigma}")
    found: Lengths = []
    while len(found) < requests:
        prompt, output = (
            max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))) for mean in MEANS[workload]
        )
        if prompt + output <= MAX_LENGTH:
            found.append((prompt, output))
    return found


def contiguous(prompt: int, output: int) -> dict[str, int]:
    """Slots that each contiguous scheme reserves for a request, by its name."""
    return {
        "contiguous_max": MAX_LENGTH,
        "contiguous_pow2": _power_of_two(prompt + _power_of_two(output)),
        "contiguous_oracle": _power_of_two(prompt + output),
    }


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def paged_slots(page_size: int, prompt: int, output: int) -> int:
    """Slots of the pages that a request uses, summed over its steps."""
    allocator = PageAllocator(-(-MAX_LENGTH // page_size), page_size)
    sequence = allocator.create()
    allocator.append(sequence, prompt)
    slots = 0
    for _ in range(output):
        allocator.append(sequence)
        slots += allocator.num_used * page_size
    return slots


def _waste(workload: str, sigma: float, requests: int, writer: Writer) -> None:
    drawn = lengths(workload, sigma, requests)
    tokens = sum(prompt * output + output * (output + 1) // 2 for prompt, output in drawn)
    slots = {
        f"tilewise.page{size}": sum(paged_slots(size, prompt, output) for prompt, output in drawn)
        for size in PAGE_SIZES
    }
    for prompt, output in drawn:
        for name, reserved in contiguous(prompt, output).items():
            slots[name] = slots.get(name, 0) + reserved * output
    for name, total in slots.items():
        writer.write(
            "kv_waste",
            _problem(workload, sigma, drawn),
            name,
            percent=100 * (total - tokens) / total,
            includes="reserved slots without a token, of all reserved slots, both summed over steps",
            sources=_sources(name),
        )


def sampled(
    allocator: PageAllocator, prompt: int, output: int, n: int, draw: random.Random
) -> Iterator[list[Sequence]]:
    """Parallel sampling: the sequences after each step."""
    first = allocator.create()
    allocator.append(first, prompt)
    live = [first, *allocator.fork(first, n - 1)]
    for _ in range(output):
        for sequence in live:
            allocator.append(sequence)
        yield live


def beams(allocator: PageAllocator, prompt: int, output: int, n: int, draw: random.Random) -> Iterator[list[Sequence]]:
    """Beam search: the same, where each step's beams go on from beams of the step before, drawn with replacement."""
    for live in sampled(allocator, prompt, output, n, draw):
        yield live
        survivors = draw.choices(live, k=n)
        for sequence in list(live):
            if sequence in survivors:
                survivors += allocator.fork(sequence, survivors.count(sequence) - 1)
            else:
                allocator.free(sequence)
        live[:] = dict.fromkeys(survivors)


def saved(grow: Grow, drawn: Lengths, n: int) -> float:
    """Share of the block tables' entries that needs no page of its own, over all steps of all requests."""
    draw = random.Random(n)
    tables = pages = 0
    for prompt, output in drawn:
        allocator = PageAllocator(n * (MAX_LENGTH // PAGE_SIZE + 1), PAGE_SIZE)
        for live in grow(allocator, prompt, output, n, draw):
            tables += sum(len(sequence.pages) for sequence in live)
            pages += allocator.num_used
    return 1 - pages / tables


def _sharing(workload: str, requests: int, writer: Writer) -> None:
    drawn = lengths(workload, 1.0, requests)
    schemes: dict[str, Grow] = {"samples": sampled, "beams": beams}
    for name, grow in schemes.items():
        for n in WIDTHS:
            writer.write(
                "kv_sharing",
                {**_problem(workload, 1.0, drawn), "decoding": f"{n} {name}"},
                f"tilewise.page{PAGE_SIZE}",
                percent=100 * saved(grow, drawn, n),
                includes="pages saved by sharing, of the pages without sharing, both summed over steps",
                sources=_sources("tilewise"),
            )


def _operations(options: Options) -> None:
    """A million random operations beside a plain copy of every sequence, in ten parts: the time of one operation."""
    operations = 100_000 if not options.quick else 500
    method = f"monotonic clock around each of ten times {operations} seeded operations, divided by their number"
    writer = Writer(current("cpu"), method=method, ceilings=(None, None), results=options.out)
    times = []
    for seed in range(10):
        cache = MirroredCache(POOL, PAGE_SIZE)
        start = time.perf_counter()
        random_operations(cache, operations, seed)
        times.append((time.perf_counter() - start) * 1e3 / operations)
    writer.write(
        "kv_operations",
        {"operations": 10 * operations, "num_pages": POOL, "page_size": PAGE_SIZE},
        f"tilewise.page{PAGE_SIZE}",
        times_ms=quantiles(times),
        includes="one operation of allocator or index, the same on plain lists, and the comparison of both",
        sources=_sources("tilewise"),
    )


def _problem(workload: str, sigma: float, drawn: Lengths) -> dict[str, Any]:
    prompts, outputs = (round(sum(values) / len(drawn), 1) for values in zip(*drawn, strict=True))
    return {
        "workload": f"{workload}, sigma {sigma}", "mean_prompt": prompts, "mean_output": outputs,
        "max_length": MAX_LENGTH, "requests": len(drawn),
    }  # fmt: skip


def _sources(impl: str) -> str | None:
    return FAMILIES["kv"].hash() if impl.startswith("tilewise") else None
