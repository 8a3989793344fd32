"""The README's support matrix, from the dispatch tables and the receipts.

One row an implementation, operation by operation, in the order in which dispatch prefers them. "verified on" appears
only while the sources that a receipt vouches for are byte for byte those of today.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS
from tools.families import NEIGHBOURS, ROOT, family_of
from tools.receipts import verified

OPERATIONS = ("attention", "merge", "kv_write", *NEIGHBOURS)


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
    """The Markdown table."""
    lines = ["| operation | implementation | what it is | backward | needs | tested |", "|---|---|---|---|---|---|"]
    for operation in OPERATIONS:
        for row in rows(operation):
            backward = "yes" if row.backward else "no"
            tested = proof(row, results, root, operation)
            cells = (operation, f"`{row.name}`", row.summary, backward, needs(row), tested)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
