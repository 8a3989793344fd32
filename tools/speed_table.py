"""The speed tables of docs/performance.md, from the newest records of one GPU.

Where kernels have changed since they were measured, the caption says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.grid_report import place
from benchmarks.records import RESULTS, Record, read_all
from benchmarks.report import Table, latest, outdated, ratio

DEVICES = ("h200", "h100-80gb-hbm3")
PASSES = ("attention_forward", "attention_backward")
EXACT = ("exact_forward", "exact_backward")
FUSED = ("neighbours_forward", "neighbours_backward")
QUANTIZED = ("few_bits_forward",)
SPARSE = ("sliding_tile", "sparse_whole")
SELECTED = "hopper_codes.selected"
SLIDING = ("sliding", "sliding_int8", "sliding_int8_blocks")  # in FP8, `Sage2` and INT8 with block scales
SCHEMES = {
    "sage2": "`Sage2()`",
    "int8_blocks": "INT8, block scales",
    "fp8": '`Sage("fp8")`',
    "blocks": '`FP8("block", "block", "block")`',
}
PEERS = {"flex": "FlexAttention, compiled", "cudnn": "cuDNN"}
UNKNOWN = "–"
DENSE = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa4": "FlashAttention-4"}


def of_one_device(results: Path, questions: Iterable[str]) -> dict[str, Table]:
    """The tables of these questions, by name, on the first GPU whose records are all of today's sources; if there is
    none, on the first that has any.
    """
    tables, wanted = latest(read_all(results)), list(questions)
    found = [{name: tables.get((device, name), []) for name in wanted} for device in DEVICES]
    there = [one for one in found if any(one.values())] or found
    whole = (one for one in there if all(one.values()))
    return next((one for one in whole if not outdated(_records(one))), there[0])


def _records(tables: dict[str, Table]) -> Iterator[Record]:
    return (record for rows in tables.values() for _, row in rows for record in row.values())


def formulas(results: Path = RESULTS) -> str:
    """Masks and scores: one row a peer, one column a formula, forward / backward in a cell."""
    tables = of_one_device(results, PASSES)
    passes = [dict(_by_formula(tables[question])) for question in PASSES]
    names = [formula for formula in passes[0] if formula in passes[1]]
    if not names:
        return "No records yet."
    lines = ["| speedup, forward / backward, over | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for peer, name in PEERS.items():
        cells = [" / ".join(_shown(over(rows[formula], peer)) for rows in passes) for formula in names]
        lines.append("| " + " | ".join([name, *("" if cell == " / " else cell for cell in cells)]) + " |")
    record = next(iter(passes[0][names[0]].values()))
    size = record.problem
    caption = (
        f"{made(_records(tables))}; batch {size['batch']}, {size['num_heads_q']} heads, "
        f"head_dim {size['head_dim']}, {size['seqlen_q']:,} tokens."
    )
    return _page(lines, caption, _records(tables))


def exact(results: Path = RESULTS) -> str:
    """Attention without a formula, against the fastest peer: one row a head dimension, full or causal, one column a
    length; grouped queries and packed documents in the caption.
    """
    tables = of_one_device(results, EXACT)
    cells: dict[str, dict[int | str, str]] = {}
    for size, ratios in exact_ratios(tables):
        packed, grouped, *_ = place(size)
        row = f"head_dim {size['head_dim']}, {size['formula']}"
        where: int | str = size.get("seqlen_q", 0)
        if packed or grouped:
            row, where = "", f"{size['batch']} packed documents" if packed else "grouped queries"
        cells.setdefault(row, {})[where] = " / ".join(UNKNOWN if x is None else f"{x:.2f}" for x in ratios)
    if not cells:
        return "No records yet."
    others = cells.pop("", {})
    lines = _by_length("speedup over the fastest peer, forward / backward", cells)
    caption = [made(_records(tables))]
    caption += [f"{what} {value}" for what, value in others.items()]
    if any(UNKNOWN in value for row in cells.values() for value in row.values()):
        caption.append(f"{UNKNOWN}: timings of this run vary too much to be quoted")
    return _page(lines, "; ".join(caption) + ".", _records(tables))


def exact_ratios(tables: dict[str, Table]) -> Iterator[tuple[dict[str, Any], list[float | None]]]:
    """Each problem of EXACT with its speedup over the fastest peer, forward and backward."""
    for (_, forward), (_, backward) in zip(*(tables[question] for question in EXACT), strict=True):
        problem = next(iter(forward.values())).problem
        yield problem, [ratio(_without_variants(found)) for found in (forward, backward)]


def fused(results: Path = RESULTS) -> str:
    """Fused layers: one row an operation, its fraction of copy bandwidth, and its speedup over the faster of PyTorch
    eager and compiled; of several shapes the first.
    """
    tables = of_one_device(results, FUSED)
    found = list(first_shapes(tables))
    if not found:
        return "No records yet."
    lines = [
        "| forward / backward | shape | fraction of copy bandwidth | speedup over the faster of eager and compiled |",
        "|---" * 4 + "|",
    ]
    for name, passes in found:
        ours = [row["tilewise.triton"] for row in passes]
        share = " / ".join(f"{x.gbps / x.ceiling_gbps:.2f}" if x.gbps and x.ceiling_gbps else "" for x in ours)
        speed = " / ".join(_over_pytorch(row) for row in passes)
        lines.append("| " + " | ".join((f"`{name}`", ours[0].problem["shape"], share, speed)) + " |")
    records = [record for _, passes in found for row in passes for record in row.values()]
    return _page(lines, f"{made(records)}.", records)


def pytorch(row: dict[str, Record]) -> str:
    """The faster of eager mode and `torch.compile` in this row; "compile" where neither has a time."""
    timed = {impl: time for impl in ("compile", "eager") if impl in row and (time := row[impl].p50_ms) is not None}
    return min(timed, key=timed.__getitem__, default="compile")


def _over_pytorch(row: dict[str, Record]) -> str:
    """The speedup over `pytorch`, which is named where it is eager mode."""
    peer = pytorch(row)
    return _shown(over(row, peer)) + (" (eager)" if peer == "eager" else "")


def first_shapes(tables: dict[str, Table]) -> Iterator[tuple[str, list[dict[str, Record]]]]:
    """Each operation of FUSED with its forward and backward row, of several shapes the first."""
    passes: list[dict[str, dict[str, Record]]] = []
    for question in FUSED:
        rows: dict[str, dict[str, Record]] = {}
        for _, row in tables[question]:
            rows.setdefault(next(iter(row.values())).problem["operation"], row)
        passes.append(rows)
    for name in passes[0]:
        if name in passes[1]:
            yield name, [rows[name] for rows in passes]


def quantized(results: Path = RESULTS) -> str:
    """Quantized attention: one row a scheme, head dimension and mask, one column a length, speedup over the exact
    kernel with quantisation in the call, and with q, k and v that are quantized already.
    """
    tables = of_one_device(results, QUANTIZED)
    cells: dict[str, dict[int | str, str]] = {}
    for scheme, size, included, excluded in quantized_ratios(tables):
        name = f"{SCHEMES[scheme]}, head_dim {size['head_dim']}, {size['formula']}"
        cells.setdefault(name, {})[size["seqlen_q"]] = f"{_shown(included)} / {_shown(excluded)}"
    if not cells:
        return "No records yet."
    lines = _by_length("speedup over exact attention, quantisation included / excluded", cells)
    return _page(lines, f"{made(_records(tables))}.", _records(tables))


def quantized_ratios(
    tables: dict[str, Table],
) -> Iterator[tuple[str, dict[str, Any], float | None, float | None]]:
    """Scheme, problem, and speedup over the exact kernel with quantisation included and excluded."""
    for scheme in SCHEMES:
        for _, row in tables[QUANTIZED[0]]:
            dense, whole, kernel = (
                row[f"tilewise.{impl}"]
                for impl in ("hopper", f"hopper_codes.{scheme}", f"hopper_codes.{scheme}.kernel")
            )
            yield scheme, dense.problem, times(dense, whole), times(dense, kernel)


def sparse(results: Path = RESULTS) -> str:
    """Block-sparse attention, whole calls: one row a workload, speedup over attention to all pairs in 16 and 8 bits."""
    tables = of_one_device(results, SPARSE)
    found = list(sparse_rows(tables))
    if not found:
        return "No records yet."
    lines = ["| workload | computed | speedup, 16 bits | speedup, 8 bits | over all pairs by |", "|---" * 5 + "|"]
    for what, share, ours, coded, name, peer in found:
        cells = (what, share, _shown(times(peer, ours)), _shown(times(peer, coded)), name)
        lines.append("| " + " | ".join(cells) + " |")
    return _page(lines, f"{made(_records(tables))}.", _records(tables))


def sparse_rows(tables: dict[str, Table]) -> Iterator[tuple[str, str, Record, Record, str, Record]]:
    """Workload, what is computed of it, ours in 16 bits, in the fastest 8, and who computed all pairs, by name."""
    windows, selections = (tables[question] for question in SPARSE)
    for _, row in windows:
        ours = row["tilewise.hopper.sliding"]
        coded = min((row[f"tilewise.hopper_codes.{name}"] for name in SLIDING), key=lambda one: one.p50_ms or math.inf)
        peer = min((row[impl] for impl in DENSE if impl in row), key=lambda record: record.p50_ms or math.inf)
        mask, share = ours.problem["formula"].rsplit(", ", 1)
        yield f"`{mask}`", share, ours, coded, DENSE[peer.impl], peer
    for _, row in selections:
        dense, ours, coded = (row[f"tilewise.{impl}"] for impl in ("hopper.dense", "hopper.selected", SELECTED))
        what, _, share = ours.problem["formula"].rpartition(", ")
        words = ["`Sparge`", f"{ours.problem['seqlen_q']:,} tokens", what]
        if ours.problem.get("operation") == "demo":
            words.append("the demo's model")
        where = ", ".join(word for word in words if word)
        yield where, share, ours, coded, "tilewise, exact", dense


def made(records: Iterable[Record]) -> str:
    """The GPU, the dtype and the days of some records."""
    found = list(records)
    return f"{found[0].device}, {found[0].problem['dtype']}, {dates(found)}"


def dates(records: Iterable[Record]) -> str:
    """The first and the last day of some records."""
    days = sorted({record.date[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def of_earlier(records: Iterable[Record]) -> str:
    """What a caption says of records that were made with other kernels than today's."""
    found = list(records)
    if not outdated(found):
        return ""
    commits = sorted({record.commit[:7] for record in found})
    return f" Measured at {', '.join(commits)}; kernels have changed since, re-measurement pending."


def _page(lines: list[str], caption: str, records: Iterable[Record]) -> str:
    return "\n".join(lines) + "\n\n" + caption + of_earlier(records)


def _by_length(title: str, cells: dict[str, dict[int | str, str]]) -> list[str]:
    """The lines of a table with one column a length, in order."""
    lengths = sorted({where for row in cells.values() for where in row if isinstance(where, int)})
    return [
        f"| {title} | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |",
        "|---" * (1 + len(lengths)) + "|",
        *(f"| {name} | " + " | ".join(row.get(n, "") for n in lengths) + " |" for name, row in cells.items()),
    ]


def times(of: Record, one: Record) -> float | None:
    """The speedup of `one` over `of`; None where one of them has no time, or no steady one."""
    known = of.p50_ms and one.p50_ms and of.steady and one.steady
    return of.p50_ms / one.p50_ms if known else None


def over(row: dict[str, Record], peer: str) -> float | None:
    """The speedup of our best over one peer."""
    return ratio({impl: record for impl, record in row.items() if impl == peer or impl.startswith("tilewise")})


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _without_variants(row: dict[str, Record]) -> dict[str, Record]:
    """A row without `tilewise.<row>.<variant>`, which is not what a call gets unasked."""
    return {impl: record for impl, record in row.items() if impl.count(".") < 2}


def _by_formula(rows: list[tuple[str, dict[str, Record]]]) -> list[tuple[str, dict[str, Record]]]:
    return [(next(iter(row.values())).problem["formula"], row) for _, row in rows]
