"""Receipts: lines that say on which GPU, with which sources, a kernel family's tests passed.

benchmarks/results/<device>/receipts.jsonl is only ever appended to. A receipt speaks for the code of today as long as
that is the same code (tools/same_code.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.records import RESULTS, device_slug
from tools.families import FAMILIES, ROOT
from tools.same_code import of_today

FILE = "receipts.jsonl"


@dataclass(frozen=True)
class Receipt:
    """One family's test run on one device. `sources` is the hash of the family's sources; `tests` counts outcomes."""

    family: str
    sources: str
    device: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str
    date: str
    command: str
    tests: dict[str, int]

    @property
    def passed(self) -> bool:
        """Whether the family's tests ran and none failed."""
        return self.tests.get("failed", 0) == 0 and self.tests.get("passed", 0) > 0

    def current(self, root: Path = ROOT) -> bool:
        """Whether the family's code is still what was tested."""
        family = FAMILIES.get(self.family)
        return family is not None and of_today(self.sources, family, root)


def append(receipt: Receipt, results: Path = RESULTS) -> Path:
    """Add one line to the device's receipts; returns the file."""
    path = results / device_slug(receipt.device) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(receipt)) + "\n")
    return path


def read_all(results: Path = RESULTS) -> list[Receipt]:
    """Every receipt, oldest first per device; ValueError names the file and line that is not one."""
    found = []
    for path in sorted(results.glob(f"*/{FILE}")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                found.append(Receipt(**json.loads(line)))
            except (ValueError, TypeError) as problem:
                raise ValueError(f"{path}:{number}: {problem}") from problem
    return found


def verified(family: str, results: Path = RESULTS, root: Path = ROOT) -> dict[str, Receipt]:
    """By device name: the latest receipt of `family` that passed and speaks for today's code.

    A later run of the same code that failed takes the word back.
    """
    latest = {r.device: r for r in read_all(results) if r.family == family and r.current(root)}
    return {device: receipt for device, receipt in latest.items() if receipt.passed}
