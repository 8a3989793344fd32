"""Questions `engine_throughput`, `engine_first_token`, `engine_between_tokens`, `engine_step`, `engine_prefix` and
`engine_pages`: the generation engine beside transformers and nano-vllm, with random weights of a published shape.

Parts, each a workload: `nano`, nano-vllm's own bench (256 requests, prompts and answers of 100 to 1,024 tokens);
`nano_small`, its first 64 requests with a quarter of their answers; `poisson`, these requests at random times, at three
rates; `shared_prefix`, 64 requests over one prefix of 8,192 tokens; `agent`, 16 conversations of five turns, in which
each prompt is the one before, its answer and new text; `smollm2`, SmolLM2-135M-Instruct at batch 1 and 8 beside
transformers (not measured where the model cannot be fetched). `--model` names another model for all parts but the last.
On a CPU workloads are smaller.

`transformers.continuous` is its continuous batching, which takes part in all workloads but `nano`;
`transformers.generate.batch<n>` its `generate` on a CPU. nano-vllm takes part if `nanovllm` can be imported, with its
own random weights and our adapter where flash_attn is missing. Each contender has a process and the GPU to itself; all
sample at temperature 0.6 and ignore end tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Options
from benchmarks.engines import roof
from benchmarks.engines.measured import SIZES, Asked, Measured, results, workloads_of
from benchmarks.engines.peers import find_nano
from benchmarks.engines.workloads import Workload
from benchmarks.environment import current, version
from benchmarks.records import Writer
from benchmarks.timing import ceilings, failure_message, quantiles
from tilewise.core.errors import InputError
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.load import config_of
from tools.families import FAMILIES

PARTS = ("nano", "nano_small", "poisson", "shared_prefix", "agent")
SMALL_MODEL = "smollm2"  # the model of that part
MODELS = {"gpu": "random:qwen3-0.6b", "cpu": "random:smollm2-135m", "quick": "random:tiny"}
ROUNDS = 3
METHOD = (
    "monotonic clock; each contender in a process of its own, one after another, a run of each workload that is not "
    "counted, then {rounds} with other tokens; {says}"
)
INCLUDES = {
    "engine_throughput": "a workload from its first request to its last token; tokens/s of answers; percent: the least "
    "time, of all weights and of keys and values read once a step at the rate of a copy and of prompts at that of a "
    "matrix product, of this one",
    "engine_first_token": "from a request, or from the end of the turn before, until its first token is there",
    "engine_between_tokens": "from a token of a request to its next",
    "engine_step.cuda": "a step's time on the host without its wait for the device; percent: of the time of 64 steps "
    "in which the GPU runs no kernel, by a profiler in another run of the same sizes",
    "engine_step.cpu": "a step's time on the host without the model's; percent: of the time of all steps",
    "engine_prefix": "tokens that go through the model; percent: tokens of prompts found in the prefix cache, of all",
    "engine_pages": "pages in use at most; percent: entries of block tables that need no page of their own, when there "
    "are most entries",
}


def run(options: Options) -> None:
    """Measure the parts that are wanted."""
    device = options.device
    sizes = "quick" if options.quick else "gpu" if device == "cuda" else "cpu"
    parts = tuple(part for part in PARTS if options.wants(part))
    with_nano, says = find_nano(device)
    print(says, flush=True)
    rounds = 1 if options.quick else min(options.rounds, ROUNDS)
    dtype = "bfloat16" if device == "cuda" else "float32"
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    if device == "cuda":
        torch.cuda.empty_cache()  # for others
    method = METHOD.format(rounds=rounds, says=f"{says}; transformers {version('transformers')}")
    writer = Writer(current(device), method=method, ceilings=ceiling, results=options.out)
    model = options.model or MODELS[sizes]
    if parts:
        for contender, own in _contenders(parts, device, nano=with_nano).items():
            _write(Asked(contender, model, dtype, device, sizes, own, rounds), writer, not options.quick)
    if options.wants(SMALL_MODEL):
        small = MODELS["quick"] if options.quick else SMALL_MODEL
        try:
            config_of(small)
        except InputError as error:
            if options.only:
                raise
            print(f"{SMALL_MODEL} left out: {failure_message(error)}", flush=True)
            return
        for contender, own in _beside_smollm2(device).items():
            _write(Asked(contender, small, dtype, device, sizes, own, rounds), writer, not options.quick)


def _contenders(parts: tuple[str, ...], device: str, *, nano: bool) -> dict[str, tuple[str, ...]]:
    """Who takes part, and in what."""
    but_the_largest = tuple(part for part in parts if part != "nano")
    found = {"tilewise": parts} | ({"nano-vllm": parts} if nano else {})
    found["transformers.continuous"] = but_the_largest  # which takes by far the longest
    if device == "cpu":
        found |= {f"transformers.generate.batch{n}": tuple({"nano_small"} & set(parts)) for n in (1, 8)}
    return {name: own for name, own in found.items() if own}


def _beside_smollm2(device: str) -> dict[str, tuple[str, ...]]:
    generate = {f"transformers.generate.batch{n}": (f"smollm2.{n}",) for n in (1, 8)}
    return dict.fromkeys(("tilewise", "transformers.continuous"), ("smollm2",)) | generate


def _write(asked: Asked, writer: Writer, isolated: bool) -> None:
    """Measure a contender, and write what it took as it comes."""
    workloads = workloads_of(asked.parts, SIZES[asked.sizes], asked.model)
    config = config_of(asked.model)
    for measured in results(asked, isolated=isolated):
        _records(measured, workloads[measured.part], asked, config, writer)


def _records(measured: Measured, workload: Workload, asked: Asked, config: ModelConfig, writer: Writer) -> None:
    problem: dict[str, Any] = {
        "model": Path(asked.model).name, "workload": workload.says, "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens, "dtype": asked.dtype,
    }  # fmt: skip
    if asked.device == "cpu":
        problem["threads"] = torch.get_num_threads()
    ours = asked.contender == "tilewise"

    def write(question: str, **what: Any) -> None:
        includes = INCLUDES.get(question) or INCLUDES[f"{question}.{asked.device}"]
        sources = FAMILIES["engine"].hash() if ours else None
        writer.write(question, problem, asked.contender, includes=includes, sources=sources, **what)

    if measured.failure is not None:
        metric = "failure" if measured.applies else "not applicable"
        return write("engine_throughput", error={"metric": metric, "message": measured.failure})
    times = quantiles(list(measured.runs_ms))
    tokens = {"tokens_per_s": workload.output_tokens, "total_tokens_per_s": workload.output_tokens}
    tokens["total_tokens_per_s"] += workload.prompt_tokens
    rates = {name: 1e3 * count / times[1] for name, count in tokens.items()}
    write(
        "engine_throughput", times_ms=times, percent=_share_of_roof(workload, asked, config, writer, times[1]), **rates
    )
    for question, found in (("first_token", measured.first), ("between_tokens", measured.between)):
        if found is not None:
            write(f"engine_{question}", times_ms=tuple(found[:3]), p99_ms=found[3])
    if measured.host is not None:
        waited = None if measured.waited is None else 100 * measured.waited
        write("engine_step", times_ms=tuple(measured.host[:3]), p99_ms=measured.host[3], percent=waited)
    if measured.counts is not None:
        counts = measured.counts
        cached = 100 * counts["cached"] / workload.prompt_tokens
        write("engine_prefix", count=counts["computed"], percent=cached)
        shared = 100 * (1 - counts["held"] / counts["entries"]) if counts["entries"] else 0.0
        write("engine_pages", count=counts["pages"], percent=shared)
    return None


def _share_of_roof(
    workload: Workload, asked: Asked, config: ModelConfig, writer: Writer, took_ms: float
) -> float | None:
    """Percent; None where requests come at times of their own."""
    tflops, gbps = writer.ceilings
    if any(request.arrival for request in workload.requests) or tflops is None or gbps is None:
        return None
    itemsize = getattr(torch, asked.dtype).itemsize
    return 1e5 * roof.seconds(config, itemsize, workload, tflops=tflops, gbps=gbps) / took_ms
