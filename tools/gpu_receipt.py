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
from tools import gpus_in_turns, longest_first
from tools.families import FAMILIES, ROOT, Family
from tools.receipts import Receipt, append
from tools.resumed import Noting, Passed, state_of

PATIENCE = "900"  # seconds of a test: the assembler takes minutes over the longest formula, more beside others


class Outcomes:
    """A pytest plugin that counts outcomes per test file; a broken set-up or tear-down counts as a failure. Tests that
    have `passed` in runs before count, too.
    """

    def __init__(self, passed: Passed | None = None) -> None:
        self._noting = Noting(passed) if passed else None
        self.by_file: dict[Path, Counter[str]] = {}
        self.collection_errors = 0
        for name in passed.names if passed else ():
            self._of_file(name.partition("::")[0])["passed"] += 1

    def _of_file(self, location: str) -> Counter[str]:
        return self.by_file.setdefault((ROOT / location).resolve(), Counter())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            counts = self._of_file(report.location[0])
            counts["skipped" if report.skipped else "passed" if report.passed else "failed"] += 1
        if self._noting is not None:
            self._noting.pytest_runtest_logreport(report)
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
        "--workers", default="4", help="pytest-xdist processes: they share the GPUs and compile in parallel"
    )
    names = [family.name for family in gpu_families()]
    parser.add_argument("--families", nargs="*", choices=names, default=[], help="only these; all if none is named")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE",
        help="write there which tests have passed, and leave out those that have, of the same code on the same GPU",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="whole products of parameters, not covering sets of pairs")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU: a receipt can only be written on a machine where PyTorch sees one", file=sys.stderr)
        return 2
    environment = current("cuda")
    chosen = gpu_families(given.families)
    before = {family.name: family.hash() for family in chosen}
    passed = None if given.resume is None else Passed(given.resume, state_of(chosen, environment))
    outcomes = Outcomes(passed)
    options = ["-n", given.workers, "--dist", "loadgroup", "-q", "--timeout", PATIENCE]
    options += ["-p", gpus_in_turns.__name__, "-p", longest_first.__name__]
    options += passed.leave_out() if passed else []
    options += ["--full"] if given.full else []
    status = pytest.main([*tests_of(chosen), *options], plugins=[outcomes])
    if passed is not None and status == pytest.ExitCode.NO_TESTS_COLLECTED and passed.names:
        status = pytest.ExitCode.OK  # none was left
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print("the tests did not run to their end, no receipt", file=sys.stderr)
        return int(status)
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
