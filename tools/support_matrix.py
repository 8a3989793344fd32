"""What runs where, from the dispatch tables and the receipts: the README's matrix, and all about each row in
docs/support.md.

Rows stand in the order in which dispatch prefers them. "verified on" appears only while the sources that a receipt
vouches for are byte for byte those of today.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS
from tools.families import NEIGHBOURS, ROOT, family_of
from tools.receipts import verified

OPERATIONS = ("attention", "merge", "kv_write", *NEIGHBOURS)
KINDS = {"cpu": "on a CPU, PyTorch", "triton": "on a GPU, Triton", "hopper": "on Hopper, Gluon"}
VERIFIED = "✓"


def rows(operation: str) -> list[Any]:
    """The dispatch rows of one operation, in order of preference."""
    return list(importlib.import_module(f"tilewise.ops.{operation}.table").ROWS)


def needs(row: Any) -> str:
    """What a row needs, and what it prefers, in the words of the table."""
    wanted = "; ".join(need.says for need in row.needs) or "nothing"
    preferred = ", ".join(need.says for need in getattr(row, "prefers", ()))
    return f"{wanted}; prefers {preferred}" if preferred else wanted


def proof(row: Any, results: Path = RESULTS, root: Path = ROOT, operation: str = "attention") -> str:
    """Where the row's tests passed on today's sources."""
    family = family_of(row.name, operation)
    if family is None or not family.ci:
        return "every CI run"
    words = [f"CI: {family.ci}"]
    for device, receipt in sorted(verified(family.name, results, root).items()):
        words.append(f"verified on {device}, {receipt.date[:10]} ({receipt.tests['passed']:,} tests)")
    return "; ".join(words)


def matrix(results: Path = RESULTS, root: Path = ROOT) -> str:
    """A Markdown table: a line an operation, its rows by where they run, with a mark behind those verified today."""
    lines = [_line("operation", *KINDS.values(), "backward"), "|---" * (2 + len(KINDS)) + "|"]
    for operation in OPERATIONS:
        found = rows(operation)
        cells = [
            ", ".join(_marked(row, results, root, operation) for row in found if row.name.startswith(kind))
            for kind in KINDS
        ]
        backward = any(row.backward for row in found)
        lines.append(_line(f"`{operation}`", *cells, "yes" if backward else "no"))
    return "\n".join(lines)


def details(results: Path = RESULTS, root: Path = ROOT) -> str:
    """A section an operation, with a Markdown table of all about its rows."""
    sections = []
    for operation in OPERATIONS:
        lines = [_line("implementation", "what it is", "backward", "needs", "tested"), "|---" * 5 + "|"]
        for row in rows(operation):
            tested = proof(row, results, root, operation)
            lines.append(_line(f"`{row.name}`", row.summary, "yes" if row.backward else "no", needs(row), tested))
        sections.append("\n".join([f"## {operation}", "", *lines]))
    return "\n\n".join(sections)


def _marked(row: Any, results: Path, root: Path, operation: str) -> str:
    seen = "verified" in proof(row, results, root, operation)
    return f"`{row.name}` {VERIFIED}" if seen else f"`{row.name}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
