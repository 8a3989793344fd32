"""The README's table of speed: how many times as fast as its peers each formula ran, from the newest records."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import RESULTS, Record, read_all
from benchmarks.report import latest, ratio

DEVICE = "h200"
PASSES = ("attention_forward", "attention_backward")
PEERS = {"flex": "FlexAttention, compiled", "cudnn": "cuDNN"}


def table(results: Path = RESULTS) -> str:
    """The Markdown table with its caption: one row a peer, one column a formula, forward / backward in a cell."""
    tables = latest(read_all(results))
    passes = [dict(_by_formula(tables.get((DEVICE, question), []))) for question in PASSES]
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
    return "\n".join(lines) + (
        f"\n\n{record.device}, {size['dtype']}, batch {size['batch']}, {size['num_heads_q']} heads of "
        f"{size['head_dim']}, {size['seqlen_q']:,} tokens, {record.date[:10]}."
    )


def _by_formula(rows: list[tuple[str, dict[str, Record]]]) -> list[tuple[str, dict[str, Record]]]:
    return [(next(iter(row.values())).problem["formula"], row) for _, row in rows]


def _ratio(row: dict[str, Record], peer: str) -> str:
    value = ratio({impl: record for impl, record in row.items() if impl == peer or impl.startswith("tilewise")})
    return "" if value is None else f"{value:.2f}"
