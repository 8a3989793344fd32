"""Run the gpu tier and write one receipt per kernel family: `python -m tools.gpu_receipt` on a machine with a GPU."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.environment import current
from benchmarks.records import RESULTS
from tools.families import FAMILIES, ROOT, Family
from tools.receipts import Receipt, append


class Outcomes:
    """A pytest plugin that counts outcomes per test file; a broken set-up or tear-down counts as a failure."""

    def __init__(self) -> None:
        self.by_file: dict[Path, Counter[str]] = {}
        self.collection_errors = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            counts = self.by_file.setdefault((ROOT / report.location[0]).resolve(), Counter())
            counts["skipped" if report.skipped else "passed" if report.passed else "failed"] += 1
        if report.failed:  # now: a run that is cut short prints no summary
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collection_errors += report.failed

    def of(self, family: Family) -> dict[str, int]:
        """Passed, failed and skipped tests in the family's test files; a file that did not load is a failure."""
        files = {path.resolve() for pattern in family.tests for path in ROOT.glob(pattern)}
        total = sum((counts for path, counts in self.by_file.items() if path in files), Counter())
        return {
            "passed": total["passed"],
            "failed": total["failed"] + self.collection_errors,
            "skipped": total["skipped"],
        }


def gpu_families(names: Sequence[str] = ()) -> list[Family]:
    """Families that the gpu tier proves, or those of them that are named."""
    found = [family for family in FAMILIES.values() if any(test.startswith("tests/gpu") for test in family.tests)]
    return [family for family in found if family.name in names] if names else found


def tests_of(chosen: Sequence[Family]) -> list[str]:
    """The files that hold their tests."""
    return sorted({str(path) for family in chosen for pattern in family.tests for path in ROOT.glob(pattern)})


def main(argv: list[str] | None = None) -> int:
    """Run the tests, append the receipts, print them; exit status is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="results folder (default: benchmarks/results)")
    parser.add_argument(
        "--workers", default="4", help="pytest-xdist processes: they share the GPU and compile in parallel"
    )
    names = [family.name for family in gpu_families()]
    parser.add_argument("--families", nargs="*", choices=names, default=[], help="only these; all if none is named")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU: a receipt can only be written on a machine where PyTorch sees one", file=sys.stderr)
        return 2
    environment = current("cuda")
    chosen = gpu_families(given.families)
    before = {family.name: family.hash() for family in chosen}
    outcomes = Outcomes()
    options = ["-n", given.workers, "--dist", "loadgroup", "-q"]
    status = pytest.main([*tests_of(chosen), *options], plugins=[outcomes])
    for family in chosen:
        if family.hash() != before[family.name]:
            print(f"{family.name}: its sources changed while the tests ran, no receipt", file=sys.stderr)
            return 3
        receipt = Receipt(
            family=family.name,
            sources=family.hash(),
            device=environment.device,
            driver=environment.driver,
            torch=environment.torch,
            triton=environment.triton,
            commit=environment.commit,
            date=environment.date,
            command=environment.command,
            tests=outcomes.of(family),
        )
        path = append(receipt, given.out)
        print(f"{receipt.family} {receipt.sources} {receipt.tests} -> {path}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
