"""How the report shows the questions about serving: the names of their rows, and each contender beside its baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.records import Record

QUESTIONS = (
    "decode", "prefill_paged", "decode_encoded", "decode_shared", "mixed", "decode_layers", "plan", "selected_pages",
)  # fmt: skip
Baseline = tuple[str, Callable[[str, str], bool]]


def _same_row(impl: str, other: str) -> bool:
    return other == ".".join(impl.split(".")[:2])


# what a contender's time is divided by, in words, and whether another one is that
BASELINES: dict[str, Baseline] = {
    "decode_encoded": (
        "the fastest row of ours over keys that are not encoded",
        lambda _, other: other.count(".") == 1,
    ),
    "decode_shared": ("the same row, prefixes not shared", _same_row),
    "decode_layers": ("the same row, planned anew in each layer", _same_row),
    "selected_pages": ("the same row over all pages", _same_row),
    "mixed": ("two calls", lambda _, other: other.endswith(".two_calls")),
}


def label(problem: dict[str, Any]) -> str:
    """A row's name: requests and their mean length, how lengths are mixed, the page size, and where a part of
    them is read, how many heads keys have; or what the problem says.
    """
    where = [f"on the {problem['on']}"] if "on" in problem else []
    if "workload" in problem:
        return ", ".join([str(problem["workload"]), *where])
    mean = problem["tokens"] / problem["batch"]
    heads = [f"{problem['num_heads_kv']} heads of keys"] if "read" in problem else []
    name = [f"{problem['batch']} × {mean:,.0f} tokens", problem["lengths"], f"pages of {problem['page_size']}"]
    return ", ".join([*name, *heads])


def speedup(question: str, impl: str, row: Mapping[str, Record]) -> float | None:
    """The baseline's time over that of `impl`; None for what is a baseline itself, and where a time is missing."""
    time = row[impl].p50_ms if impl in row else None
    if question not in BASELINES or time is None:
        return None
    _, is_baseline = BASELINES[question]
    baselines = {other: record.p50_ms for other, record in row.items() if is_baseline(impl, other)}
    times = [found for found in baselines.values() if found is not None]
    return min(times) / time if times and impl not in baselines and time > 0 else None
