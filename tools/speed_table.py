"""The README's tables of speed: how many times as fast as its peers each problem ran, from the newest records of one
GPU. Where kernels have changed since, who ran the command again might find other numbers, and the caption says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.grid_report import place
from benchmarks.records import RESULTS, Record, read_all
from benchmarks.report import Table, latest, outdated, ratio

DEVICES = ("h200", "h100-80gb-hbm3")
PASSES = ("attention_forward", "attention_backward")
EXACT = ("exact_forward", "exact_backward")
BESIDE = ("neighbours_forward", "neighbours_backward")
FEWER = ("few_bits_forward", "sliding_tile", "sparse_whole")
SELECTED = "hopper_codes.selected"
SLIDING = ("sliding", "sliding_int8", "sliding_int8_blocks")  # in FP8, `Sage2` and INT8 by blocks
SCHEMES = {
    "sage2": "`Sage2()`",
    "int8_blocks": "INT8 by blocks",
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


def table(results: Path = RESULTS) -> str:
    """The Markdown table with its caption: one row a peer, one column a formula, forward / backward in a cell."""
    tables = of_one_device(results, PASSES)
    passes = [dict(_by_formula(tables[question])) for question in PASSES]
    formulas = [formula for formula in passes[0] if formula in passes[1]]
    if not formulas:
        return "No records yet."
    lines = [
        "| forward / backward, times as fast as | " + " | ".join(formulas) + " |",
        "|---" * (1 + len(formulas)) + "|",
    ]
    for peer, name in PEERS.items():
        cells = [" / ".join(_ratio(rows[formula], peer) for rows in passes) for formula in formulas]
        lines.append("| " + " | ".join([name, *("" if cell == " / " else cell for cell in cells)]) + " |")
    record = next(iter(passes[0][formulas[0]].values()))
    size = record.problem
    return (
        "\n".join(lines)
        + (
            f"\n\n{record.device}, {size['dtype']}, batch {size['batch']}, {size['num_heads_q']} heads of "
            f"{size['head_dim']}, {size['seqlen_q']:,} tokens, {record.date[:10]}."
        )
        + of_earlier(record for rows in passes for row in rows.values() for record in row.values())
    )


def exact(results: Path = RESULTS) -> str:
    """The same for attention without a formula, against the best peer: one row a head dimension, full or causal, one
    column a length; grouped queries and packed documents in the caption.
    """
    tables = of_one_device(results, EXACT)
    passes = [tables[question] for question in EXACT]
    cells: dict[str, dict[int | str, str]] = {}
    first: Record | None = None
    for (_, forward), (_, backward) in zip(*passes, strict=True):
        record = next(iter(forward.values()))
        first = first or record
        size = record.problem
        packed, grouped, *_ = place(size)
        row = f"head dimension {size['head_dim']}, {size['formula']}"
        where: int | str = size.get("seqlen_q", 0)
        if packed or grouped:
            row, where = "", f"{size['batch']} packed documents" if packed else "grouped queries"
        ratios = [ratio(_without_variants(found)) for found in (forward, backward)]
        cells.setdefault(row, {})[where] = " / ".join(UNKNOWN if x is None else f"{x:.2f}" for x in ratios)
    if first is None:
        return "No records yet."
    others = cells.pop("", {})
    lines = _by_length("forward / backward, times as fast as the best peer", cells)
    caption = [f"{first.device}, {first.problem['dtype']}, {first.date[:10]}"]
    caption += [f"{what} {value}" for what, value in others.items()]
    if any(UNKNOWN in value for row in cells.values() for value in row.values()):
        caption.append(f"{UNKNOWN}: times of this run lay too far apart to be found again")
    earlier = of_earlier(record for rows in passes for _, row in rows for record in row.values())
    return "\n".join(lines) + "\n\n" + "; ".join(caption) + "." + earlier


def beside(results: Path = RESULTS) -> str:
    """What stands beside attention: one row an operation, its share of a copy's rate, and how many times as fast it is
    as PyTorch's own; of several shapes the first.
    """
    tables = of_one_device(results, BESIDE)
    passes = []
    for question in BESIDE:
        rows: dict[str, dict[str, Record]] = {}
        for _, row in tables[question]:
            rows.setdefault(next(iter(row.values())).problem["operation"], row)
        passes.append(rows)
    names = [name for name in passes[0] if name in passes[1]]
    if not names:
        return "No records yet."
    lines = [
        "| forward / backward | rows × numbers | share of a copy's rate | times as fast as eager | `torch.compile` |",
        "|---" * 5 + "|",
    ]
    for name in names:
        row = [found[name] for found in passes]
        ours = [found["tilewise.triton"] for found in row]
        share = " / ".join(f"{x.gbps / x.ceiling_gbps:.2f}" if x.gbps and x.ceiling_gbps else "" for x in ours)
        speed = [" / ".join(_ratio(found, peer) for found in row) for peer in ("eager", "compile")]
        lines.append("| " + " | ".join((f"`{name}`", ours[0].problem["shape"], share, *speed)) + " |")
    caption = f"{ours[0].device}, {ours[0].problem['dtype']}, {ours[0].date[:10]}."
    earlier = of_earlier(record for rows in passes for row in rows.values() for record in row.values())
    return "\n".join(lines) + "\n\n" + caption + earlier


def fewer(results: Path = RESULTS) -> str:
    """Attention in few bits: one row a scheme, head dimension and mask, one column a length, how many times as fast as
    the exact kernel with codes that the call makes, and with codes that are there; over fewer tiles, in 16 bits and in
    few, in the caption.
    """
    tables = of_one_device(results, FEWER)
    bits, sliding, chosen = ([row for _, row in tables[question]] for question in FEWER)
    if not bits:
        return "No records yet."
    cells: dict[str, dict[int | str, str]] = {}
    first = bits[0]["tilewise.hopper"]
    for key, scheme in SCHEMES.items():
        for row in bits:
            exact_one, whole, kernel = (
                row[f"tilewise.{impl}"] for impl in ("hopper", f"hopper_codes.{key}", f"hopper_codes.{key}.kernel")
            )
            size = exact_one.problem
            name = f"{scheme}, head dimension {size['head_dim']}, {size['formula']}"
            cells.setdefault(name, {})[size["seqlen_q"]] = f"{_times(exact_one, whole)} / {_times(exact_one, kernel)}"
    lines = _by_length("times as fast as exact, codes made in the call / before", cells)
    caption = [f"{first.device}, {first.problem['dtype']}, {first.date[:10]}"]
    for row in sliding:
        ours = row["tilewise.hopper.sliding"]
        coded = min((row[f"tilewise.hopper_codes.{name}"] for name in SLIDING), key=lambda one: one.p50_ms or math.inf)
        peer = min((row[impl] for impl in DENSE if impl in row), key=lambda record: record.p50_ms or math.inf)
        mask, share = ours.problem["formula"].rsplit(", ", 1)
        times = f"{_times(peer, ours)} / {_times(peer, coded)}"
        caption.append(f"`{mask}`, {share}: {times} times as fast as {DENSE[peer.impl]} over all")
    synthetic = [row for row in chosen if row["tilewise.hopper.dense"].problem.get("operation") != "demo"]
    for row in synthetic[-1:]:
        dense, ours, coded = (row[f"tilewise.{impl}"] for impl in ("hopper.dense", "hopper.selected", SELECTED))
        where = f"{ours.problem['seqlen_q']:,} tokens, {ours.problem['formula']}"
        caption.append(
            f"`Sparge`, {where}: {_times(dense, ours)} / {_times(dense, coded)} times as fast as exact over all"
        )
    records = (record for row in (*bits, *sliding, *chosen) for record in row.values())
    return "\n".join(lines) + "\n\n" + "; ".join(caption) + "." + of_earlier(records)


def of_earlier(records: Iterable[Record]) -> str:
    """What a caption says of records that were made with other sources than today's."""
    found = list(records)
    if not outdated(found):
        return ""
    commits = sorted({record.commit[:7] for record in found})
    return (
        f" Measured at {', '.join(commits)}: sources have changed since, and this GPU's records of today's are still "
        "to be made."
    )


def _by_length(title: str, cells: dict[str, dict[int | str, str]]) -> list[str]:
    """The lines of a table with one column a length, in order."""
    lengths = sorted({where for row in cells.values() for where in row if isinstance(where, int)})
    return [
        f"| {title} | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |",
        "|---" * (1 + len(lengths)) + "|",
        *(f"| {name} | " + " | ".join(row.get(n, "") for n in lengths) + " |" for name, row in cells.items()),
    ]


def _times(of: Record, one: Record) -> str:
    """How many times as fast as `of` one is."""
    known = of.p50_ms and one.p50_ms and of.steady and one.steady
    return f"{of.p50_ms / one.p50_ms:.2f}" if known else ""


def _without_variants(row: dict[str, Record]) -> dict[str, Record]:
    """A row without `tilewise.<row>.<variant>`, which is not what a call gets unasked."""
    return {impl: record for impl, record in row.items() if impl.count(".") < 2}


def _by_formula(rows: list[tuple[str, dict[str, Record]]]) -> list[tuple[str, dict[str, Record]]]:
    return [(next(iter(row.values())).problem["formula"], row) for _, row in rows]


def _ratio(row: dict[str, Record], peer: str) -> str:
    value = ratio({impl: record for impl, record in row.items() if impl == peer or impl.startswith("tilewise")})
    return "" if value is None else f"{value:.2f}"
