"""The table of formulas on a CPU of docs/performance.md, from the newest records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.records import RESULTS, Record, read_all
from benchmarks.report import latest
from tools.speed_table import made, of_earlier

QUESTIONS = {"cpu_formula_forward": "forward", "cpu_formula_backward": "forward and backward"}
PEERS = ("sdpa", "eager")  # the first that computes the same


def table(results: Path = RESULTS) -> str:
    """A row for each formula and direction, a column for each length: the range of speedups over all head shapes."""
    tables = latest(read_all(results))
    rows = [(what, row) for question, what in QUESTIONS.items() for _, row in tables.get(("cpu", question), [])]
    found = [(what, row, ratio) for what, row in rows for ratio in _ratio(row)]
    if not found:
        return "No records yet."
    problems = [next(iter(row.values())).problem for _, row, _ in found]
    lengths = sorted({problem["seqlen_q"] for problem in problems})
    lines = ["| | | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |", "|---" * (2 + len(lengths)) + "|"]
    for formula in dict.fromkeys(problem["formula"] for problem in problems):
        for what in QUESTIONS.values():
            cells = []
            for length in lengths:
                own = [
                    ratio
                    for (said, _, ratio), problem in zip(found, problems, strict=True)
                    if (said, problem["formula"], problem["seqlen_q"]) == (what, formula, length)
                ]
                cells.append(f"{min(own):.2f}–{max(own):.2f}" if own else "")
            lines.append(f"| {formula} | {what} | " + " | ".join(cells) + " |")
    used = [record for _, row, _ in found for record in row.values()]
    shapes = dict.fromkeys((p["num_heads_q"], p["num_heads_kv"], p["head_dim"]) for p in problems)
    heads = ", ".join(f"{q} heads{'' if q == kv else f' ({kv} KV heads)'} of {dim}" for q, kv, dim in shapes)
    caption = f"{made(used)}, {problems[0]['threads']} threads; batch 1; {heads}."
    return "\n".join(lines) + "\n\n" + caption + of_earlier(used)


def _ratio(row: dict[str, Record]) -> Iterator[float]:
    """The peer's time over ours, where both were measured."""
    ours = row.get("tilewise.cpu")
    theirs = next((row[name] for name in PEERS if name in row), None)
    if ours is not None and theirs is not None and ours.p50_ms and theirs.p50_ms:
        yield theirs.p50_ms / ours.p50_ms
