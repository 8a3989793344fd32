"""The serving tables of docs/performance.md, from the newest records: paged decode against cuDNN and FlashInfer, and
what quantized caches, shared prefixes, one call for prefill and decode, and selected pages gain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks.records import RESULTS, Record
from benchmarks.report import Table
from tools.speed_table import made, of_earlier, of_one_device

PAGE = 16
OURS = "tilewise.hopper_decode"
PEERS = (  # contender, mix of lengths, and what the table calls them
    ("cudnn.contiguous", "equal", "cuDNN over contiguous keys, equal lengths"),
    ("flashinfer", "equal", "FlashInfer, equal lengths"),
    ("flashinfer", "uniform", "FlashInfer, uniform lengths"),
    ("flashinfer", "zipf", "FlashInfer, Zipf lengths"),
)
GAINS = {  # question: (ours, beside which, what it is called, and what it is compared with), of the first problem
    "decode_encoded": (
        (f"{OURS}.int8", OURS, "INT8 KV cache", "a bfloat16 cache"),
        (f"{OURS}.fp8", OURS, "FP8 KV cache", "a bfloat16 cache"),
        (f"{OURS}.int4", OURS, "INT4 KV cache", "a bfloat16 cache"),
    ),
    "decode_shared": ((f"{OURS}.shared", f"{OURS}.copies", "shared prefix", "a copy of the prefix in each sequence"),),
    "mixed": (("tilewise.hopper_mixed", "tilewise.hopper.two_calls", "prefill and decode in one call", "two calls"),),
}
SELECTED = "selected_pages"
LONG_PAGES = 256  # tokens of a page


def table(results: Path = RESULTS) -> str:
    """Paged decode: a column a batch, bandwidth over that of peers for each mix of lengths."""
    tables = of_one_device(results, ("decode",))
    by_batch = _by_batch(tables["decode"])
    if not by_batch:
        return "No records yet."
    equal = {batch: rows["equal"] for batch, rows in by_batch.items() if "equal" in rows}
    columns = [f"{batch} × {row[OURS].problem['tokens'] // batch:,}" for batch, row in equal.items()]
    lines = ["| bandwidth over that of | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for peer, lengths, name in PEERS:
        rates = [_shown(rate(by_batch[batch].get(lengths, {}), peer)) for batch in equal]
        lines.append(f"| {name} | " + " | ".join(rates) + " |")
    problem = next(iter(equal.values()))[OURS].problem
    used = [record for rows in by_batch.values() for row in rows.values() for record in row.values()]
    caption = (
        f"{made(used)}; {problem['num_heads_q']} query heads, "
        f"{problem['num_heads_kv']} KV heads, head_dim {problem['head_dim']}, pages of {PAGE} tokens."
    )
    return "\n".join(lines) + "\n\n" + caption + of_earlier(used)


def gains(results: Path = RESULTS) -> str:
    """What each way of serving gains: one row a workload, with what it is compared with."""
    tables = of_one_device(results, (*GAINS, SELECTED))
    rows = {question: [row for _, row in found] for question, found in tables.items()}
    lines = [*_gains(rows), *_of_selected_pages(rows[SELECTED])]
    if not lines:
        return "No records yet."
    records = [record for found in rows.values() for row in found for record in row.values()]
    head = ["| | workload | compared with | speedup |", "|---" * 4 + "|"]
    return "\n".join([*head, *lines]) + f"\n\n{made(records)}." + of_earlier(records)


def rates(tables: dict[str, Table], peer: str, lengths: Collection[str]) -> Iterator[float]:
    """Our bandwidth over that of one peer, in every batch of `table` with one of these mixes of lengths."""
    for rows in _by_batch(tables["decode"]).values():
        for mix in lengths:
            found = rate(rows.get(mix, {}), peer)
            if found is not None:
                yield found


def rate(row: dict[str, Record], peer: str) -> float | None:
    """Our bandwidth over that of one peer in a row; None where one of them has none."""
    ours, theirs = (row[impl].gbps if impl in row else None for impl in (OURS, peer))
    return ours / theirs if ours and theirs else None


def _by_batch(rows: Table) -> dict[int, dict[str, dict[str, Record]]]:
    """Rows of decode over pages of PAGE tokens, by batch and mix of lengths."""
    found: dict[int, dict[str, dict[str, Record]]] = {}
    for _, row in rows:
        if OURS in row and row[OURS].problem["page_size"] == PAGE:
            problem = row[OURS].problem
            found.setdefault(problem["batch"], {})[problem["lengths"]] = row
    return found


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _gains(tables: dict[str, list[dict[str, Record]]]) -> Iterator[str]:
    """A line of the table for each of GAINS."""
    for question, wanted in GAINS.items():
        for row in tables[question][:1]:
            for impl, beside, what, compared in wanted:
                ours, theirs = (row[name].p50_ms if name in row else None for name in (impl, beside))
                if ours and theirs:
                    workload = row[impl].problem["workload"]
                    yield f"| {what} | {workload} | {compared} | {theirs / ours:.2f} |"


def _of_selected_pages(rows: list[dict[str, Record]]) -> Iterator[str]:
    """A line for each batch: an eighth of the pages over the fastest that reads all, where pages are long."""
    for row in rows:
        problem = next(iter(row.values())).problem
        names = (f"{OURS}.pages", OURS, "cudnn.contiguous")
        part, *all_pages = (row[name].p50_ms if name in row else None for name in names)
        whole = min((time for time in all_pages if time), default=None)
        if problem["page_size"] == LONG_PAGES and part and whole:
            where = f"{problem['batch']} × {problem['tokens'] // problem['batch']:,} tokens"
            where += f", {problem['num_heads_kv']} KV heads, pages of {LONG_PAGES} tokens"
            yield f"| `TopPages`, an eighth of the pages | {where} | all pages | {whole / part:.2f} |"
