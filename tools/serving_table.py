"""The README's table of serving: decoding over pages beside cuDNN over contiguous keys and FlashInfer, from the newest
records, and what codes, shared prefixes, one call for prompts and decoding, and reading an eighth of the pages gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.records import RESULTS, Record
from tools.speed_table import of_earlier, of_one_device

PAGE = 16
OURS = "tilewise.hopper_decode"
LENGTHS = ("equal", "uniform", "zipf")
GAINS = {  # question: (who, beside whom, in words), in the first problem of the question
    "decode_encoded": (
        (f"{OURS}.int8", OURS, "{workload} in INT8 {:.2f} times as fast as in bfloat16"),
        (f"{OURS}.fp8", OURS, "in FP8 {:.2f}"),
        (f"{OURS}.int4", OURS, "in INT4 {:.2f}"),
    ),
    "decode_shared": (
        (f"{OURS}.shared", f"{OURS}.copies", "{workload} {:.2f} times as fast as over pages of their own"),
    ),
    "mixed": (
        (
            "tilewise.hopper_mixed",
            "tilewise.hopper.two_calls",
            "{workload}, in one call {:.2f} times as fast as in two",
        ),
    ),
}
SELECTED = "selected_pages"
LONG_PAGES = 256  # tokens of a page


def table(results: Path = RESULTS) -> str:
    """The Markdown table with its caption: a column a batch; bytes a second beside peers, for each mix of lengths."""
    tables = of_one_device(results, ("decode", *GAINS, SELECTED))
    decode = [row for _, row in tables["decode"] if OURS in row and row[OURS].problem["page_size"] == PAGE]
    by_batch: dict[int, dict[str, dict[str, Record]]] = {}
    for row in decode:
        problem = row[OURS].problem
        by_batch.setdefault(problem["batch"], {})[problem["lengths"]] = row
    if not by_batch:
        return "No records yet."
    equal = {batch: rows["equal"] for batch, rows in by_batch.items() if "equal" in rows}
    columns = [f"{batch} × {row[OURS].problem['tokens'] // batch:,}" for batch, row in equal.items()]
    lines = [f"| decoding over pages of {PAGE} | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    rates = [_rates(row, "cudnn.contiguous") for row in equal.values()]
    lines.append("| equal lengths: of cuDNN's bytes a second, contiguous keys | " + " | ".join(rates) + " |")
    for lengths in LENGTHS:
        rates = [_rates(by_batch[batch].get(lengths, {}), "flashinfer") for batch in equal]
        lines.append(f"| {lengths.replace('zipf', 'Zipf')} lengths: of FlashInfer's | " + " | ".join(rates) + " |")
    gains = {question: [row for _, row in tables[question]] for question in (*GAINS, SELECTED)}
    first = next(iter(equal.values()))[OURS]
    problem = first.problem
    caption = (
        f"{first.device}, {problem['dtype']}, {problem['num_heads_q']} heads on {problem['num_heads_kv']} of "
        f"{problem['head_dim']}, {first.date[:10]}."
    )
    gained = "; ".join([*_gains(gains), *_of_selected_pages(gains[SELECTED])])
    caption += f" Beside that: {gained}." if gained else ""
    used = [*decode, *(row for rows in gains.values() for row in rows)]
    return "\n".join(lines) + "\n\n" + caption + of_earlier(record for row in used for record in row.values())


def _rates(row: dict[str, Record], peer: str) -> str:
    if OURS not in row or peer not in row:
        return ""
    ours, theirs = row[OURS].gbps, row[peer].gbps
    return f"{ours / theirs:.2f}" if ours and theirs else ""


def _gains(tables: dict[str, list[dict[str, Record]]]) -> Iterator[str]:
    """What each of GAINS comes to, in words."""
    for question, wanted in GAINS.items():
        for row in tables[question][:1]:
            for impl, beside, says in wanted:
                ours, theirs = (row[name].p50_ms if name in row else None for name in (impl, beside))
                if ours and theirs:
                    yield says.format(theirs / ours, workload=row[impl].problem["workload"])


def _of_selected_pages(rows: list[dict[str, Record]]) -> Iterator[str]:
    """What an eighth of the pages gains over the fastest that reads all, where pages are long and heads have keys of
    their own.
    """
    for row in rows:
        problem = next(iter(row.values())).problem
        names = (f"{OURS}.pages", OURS, "cudnn.contiguous")
        part, *all_pages = (row[name].p50_ms if name in row else None for name in names)
        whole = min((time for time in all_pages if time), default=None)
        if problem["page_size"] == LONG_PAGES and part and whole:
            where = f"{problem['batch']} × {problem['tokens'] // problem['batch']:,} tokens"
            where += f", {problem['num_heads_kv']} heads of keys, pages of {LONG_PAGES}"
            yield f"an eighth of the pages ({where}) {whole / part:.2f} times as fast as all"
