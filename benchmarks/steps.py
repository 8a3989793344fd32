"""What the cases about serving share: who can run a step, its CUDA graph, and one record for each contender."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tilewise as tw
from benchmarks.contenders import sources_of
from benchmarks.records import Writer
from benchmarks.timing import Quantiles, Timed, failure_message, graphed, interleaved

METRIC = "relative l2 to float64, one request"
ROWS = {"cuda": ("hopper_decode", "triton_paged"), "cpu": ("cpu_tiled",)}  # that decode over pages


@dataclass(frozen=True)
class Contender:
    """A step, and where our dispatch table does not let it run, what is missing.

    `repeats` is how many times the step does what a record is about, `nbytes` what each of them must read at least.
    """

    step: Callable[[], Any]
    refused: str | None = None
    repeats: int = 1
    nbytes: int | None = None


def refusal(row: str, *tensors: Any, **arguments: Any) -> str | None:
    """None where this row of the dispatch table can run such a call, else what it says."""
    explained = tw.why(*tensors, impl=row, **arguments)
    return None if explained.chosen == row else next(says for name, _, says in explained.rows if name == row)


def measure(
    question: str,
    problem: dict[str, Any],
    contenders: Mapping[str, Contender],
    writer: Writer,
    *,
    device: str,
    rounds: int,
    includes: str,
    error: Callable[[str, Any], float] | None = None,
    metric: str = METRIC,
) -> None:
    """Time the steps of one problem, replayed from CUDA graphs, taking turns; one record for each contender.

    `error` gives that of a contender's result, `metric` says which.
    """
    steps: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    for name, contender in contenders.items():
        if contender.refused is None:
            try:
                steps[name] = graphed(contender.step, device)
            except Exception as raised:
                failures[name] = failure_message(raised)
    timed = interleaved(steps, device=device, rounds=rounds)
    for name, contender in contenders.items():
        result = timed.get(name) or Timed([], failures.get(name))
        times = _each(result.quantiles, contender.repeats)
        outcome: dict[str, Any] | None = None
        if contender.refused is not None:
            outcome = {"metric": "not applicable", "message": contender.refused}
        elif times is None:
            outcome = {"metric": "failure", "message": result.failure}
        elif error is not None:
            value = error(name, steps[name]())
            outcome = {"metric": metric, "value": value}
            if not math.isfinite(value):
                times, outcome = None, {"metric": "failure", "message": f"ArithmeticError: its error is {value}"}
        writer.write(
            question, problem, name, times_ms=times,
            gbps=contender.nbytes / times[1] / 1e6 if contender.nbytes and times else None,
            error=outcome, includes=includes, sources=sources_of(name),
        )  # fmt: skip


def _each(times: Quantiles | None, repeats: int) -> Quantiles | None:
    return None if times is None else (times[0] / repeats, times[1] / repeats, times[2] / repeats)
