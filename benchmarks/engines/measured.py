"""One contender's workloads, timed: in this process, or in one of its own with the GPU to itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.engines import ours, peers
from benchmarks.engines.driver import Run, drive
from benchmarks.engines.workloads import CPU, GPU, QUICK, Sizes, Workload, agent, batch, nano, poisson, shared_prefix
from benchmarks.environment import ROOT
from benchmarks.timing import failure_message
from tilewise.core.errors import UnsupportedError
from tilewise.engine import EngineConfig
from tilewise.engine.groups import groups_of
from tilewise.engine.models.load import RANDOM, config_of, decoder_of, folder_of

SIZES = {"gpu": GPU, "cpu": CPU, "quick": QUICK}
LIMIT_S = 1800.0  # of a contender's process
BATCHES = (1, 8)  # of `generate`, and of part smollm2
TEXTS = (
    "The capital of France is", "Once upon a time there was a small", "def fibonacci(n):", "Water boils at",
    "The three laws of motion say that", "Dear Sir or Madam, I write to", "A recipe for bread begins with",
    "In 1969 two people",
)  # fmt: skip
Quantiles = tuple[float, float, float, float]


@dataclass(frozen=True)
class Asked:
    """What a contender is to do.

    Attributes:
        contender: "tilewise", "transformers.continuous", "transformers.generate.batch<n>" or "nano-vllm".
        model: as `decoder_of` takes it.
        dtype, device: of the model.
        sizes: a name in `SIZES`.
        parts: names of workloads, as `workloads_of` has them.
        rounds: timed runs of each, after one that is not timed.
    """

    contender: str
    model: str
    dtype: str
    device: str
    sizes: str
    parts: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Measured:
    """What a contender took for one workload; milliseconds as (p20, p50, p80, p99).

    `host` is a step's time on the host, `waited` the share of time in which the device had nothing to do, and `counts`
    are those of `ours.Counts`: of our engine alone. `failure` is the message of an error, `applies` False where the
    contender said that it cannot do this.
    """

    part: str
    runs_ms: tuple[float, ...] = ()
    first: Quantiles | None = None
    between: Quantiles | None = None
    host: Quantiles | None = None
    waited: float | None = None
    counts: dict[str, int] | None = None
    failure: str | None = None
    applies: bool = True


def workloads_of(parts: Sequence[str], sizes: Sizes, model: str = "") -> dict[str, Workload]:
    """Workloads by name; "poisson" is one for each rate, "smollm2" one for each batch, "smollm2.8" for one of them."""
    found: dict[str, Workload] = {}
    for part in parts:
        if part == "poisson":
            found |= {f"poisson.{rate:g}": poisson(sizes, rate) for rate in sizes.rates}
        elif part.startswith("smollm2"):
            prompts, wanted = _texts(model, sizes), part.removeprefix("smollm2").lstrip(".")
            batches = (int(wanted),) if wanted else BATCHES
            found |= {f"smollm2.{n}": batch(prompts[:n], sizes.texts) for n in batches}
        else:
            made: dict[str, Callable[[], Workload]] = {
                "nano": lambda: nano(sizes, sizes.requests),
                "nano_small": lambda: nano(sizes, sizes.few, 4),
                "shared_prefix": lambda: shared_prefix(sizes),
                "agent": lambda: agent(sizes),
            }
            found[part] = made[part]()
    return found


def _texts(model: str, sizes: Sizes) -> list[list[int]]:
    """Prompts of words where the model has a tokenizer."""
    if model.startswith(RANDOM):
        return [list(request.prompt[:8]) for request in nano(sizes, max(BATCHES)).requests]
    from tilewise.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.read(folder_of(model))
    return [tokenizer.encode(text) for text in TEXTS]


def results(asked: Asked, *, isolated: bool, limit_s: float = LIMIT_S) -> Iterator[Measured]:
    """What the contender took for each of its workloads, as soon as it is known.

    Args:
        asked: contender and workloads.
        isolated: whether it has a process of its own.
        limit_s: seconds that this process may take.
    """
    if not isolated:
        yield from measure(asked)
        return
    words = [sys.executable, "-m", "benchmarks.engines", json.dumps(asdict(asked))]
    left = dict.fromkeys(workloads_of(asked.parts, SIZES[asked.sizes], asked.model))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        late = threading.Event()
        limit = threading.Timer(limit_s, lambda: (late.set(), process.kill()))
        limit.start()
        try:
            for line in process.stdout:
                if line.startswith(_RESULT):
                    found = Measured(**json.loads(line[len(_RESULT) :]))
                    left.pop(found.part, None)
                    yield found
        finally:
            limit.cancel()
            process.kill()  # where this process is interrupted; else it has ended
            process.wait()
        said.seek(0)
        words = said.read().strip().splitlines()
    why = (
        f"TimeoutExpired: not done after {limit_s:.0f} s"
        if late.is_set()
        else (words or ["it ended without a word"])[-1]
    )
    for part in left:
        yield Measured(part, failure=why)


_RESULT = "RESULT "


def main(argv: Sequence[str]) -> None:
    """What the process of a contender does: a line for each workload."""
    given = json.loads(argv[0])
    for found in measure(Asked(**given | {"parts": tuple(given["parts"])})):
        print(_RESULT + json.dumps(asdict(found)), flush=True)


def measure(asked: Asked) -> Iterator[Measured]:
    """The same in this process."""
    workloads = workloads_of(asked.parts, SIZES[asked.sizes], asked.model)
    try:
        with torch.no_grad(), _contender(asked, workloads) as measured:
            for part, workload in workloads.items():
                try:
                    yield measured(part, workload)
                except Exception as error:
                    yield Measured(part, failure=failure_message(error))
    except Exception as error:  # it does not start
        applies = not isinstance(error, UnsupportedError)
        for part in workloads:
            yield Measured(part, failure=failure_message(error), applies=applies)


@contextmanager
def _contender(asked: Asked, workloads: dict[str, Workload]) -> Iterator[Callable[[str, Workload], Measured]]:
    """A function that measures one workload."""
    longest = max(workload.longest for workload in workloads.values())
    vocab = config_of(asked.model).vocab_size

    def timed(run: Callable[[Workload], Run], part: str, workload: Workload, **more: Any) -> Measured:
        run(workload.with_other_tokens(1, vocab))
        runs = [run(workload.with_other_tokens(2 + n, vocab)) for n in range(asked.rounds)]
        times = tuple(1e3 * each.seconds for each in runs)
        first, between = ([x for each in runs for x in getattr(each, name)] for name in ("first", "between"))
        return Measured(part, times, _quantiles(first), _quantiles(between), **more)

    if asked.contender == "tilewise":
        decoder = decoder_of(asked.model, dtype=asked.dtype, device=asked.device)
        pages = None
        if asked.device == "cpu":  # those that all requests need, and as many that are remembered
            needed = (w.tokens // EngineConfig.page_size + 2 * len(w.requests) for w in workloads.values())
            pages = 2 * max(needed) * len(groups_of(decoder.config.windows))
        config = EngineConfig(max_model_len=min(longest + 1, decoder.config.max_length), num_pages=pages)
        engine = ours.Tilewise(decoder, config)
        yield lambda part, workload: timed(
            lambda given: drive(engine, given), part, workload, **_looked_at(engine, workload, vocab, asked)
        )
    elif asked.contender == "nano-vllm":
        rows = max(len(workload.requests) for workload in workloads.values())
        nano_vllm = peers.NanoVllm(asked.model, longest + 1, rows)
        yield lambda part, workload: timed(lambda given: drive(nano_vllm, given), part, workload)
    else:
        model = peers.transformers_model(asked.model, getattr(torch, asked.dtype), asked.device)
        _, kind, *size = asked.contender.split(".")
        if kind == "generate":
            rows = int(size[0].removeprefix("batch"))
            yield lambda part, workload: timed(lambda given: peers.generate(model, given, rows), part, workload)
            return
        largest = max(workloads.values(), key=lambda workload: workload.tokens)
        continuous = peers.Continuous(model, largest)
        try:
            yield lambda part, workload: timed(lambda given: drive(continuous, given), part, workload)
        finally:
            continuous.close()


def _looked_at(engine: ours.Tilewise, workload: Workload, vocab: int, asked: Asked) -> dict[str, Any]:
    """What runs that are not timed tell of our engine: they have tokens of their own, as timed ones have."""
    if any(request.arrival for request in workload.requests):
        return {}  # what a step holds depends on the clock
    counts = ours.counted(engine, workload.with_other_tokens(100, vocab))
    steps = ours.traced(engine, workload.with_other_tokens(101, vocab))
    if asked.device == "cuda":
        waited = ours.waited_on_gpu(engine, steps, workload.with_other_tokens(102, vocab))
    else:
        waited = ours.waited_on_cpu(steps)
    host = _quantiles([ours.host_ms(step, asked.device) / 1e3 for step in steps])
    return {"host": host, "waited": waited, "counts": asdict(counts)}


def _quantiles(seconds: list[float]) -> Quantiles | None:
    """(p20, p50, p80, p99) in milliseconds, linear between neighbours."""
    if not seconds:
        return None
    shares = torch.tensor([0.2, 0.5, 0.8, 0.99], dtype=torch.float64)
    p20, p50, p80, p99 = (torch.tensor(seconds, dtype=torch.float64) * 1e3).quantile(shares).tolist()
    return p20, p50, p80, p99
