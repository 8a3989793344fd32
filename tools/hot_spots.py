"""Where the samples of a kernel's program counter lie: `python -m tools.hot_spots FILE`.

FILE comes from Nsight Compute: `ncu --section SourceCounters -k regex:NAME -c 1 -o REPORT COMMAND`, then `ncu -i
REPORT.ncu-rep --page source --csv --print-units base > FILE`. Printed are the segments, rows of instructions that were
executed as often, with what their warps waited for, and the instructions of each that were sampled most. A warp that
waits is sampled at the instruction it cannot issue, so the one to blame often stands before.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

WAIT = "stall_"


@dataclass(frozen=True)
class Instruction:
    """A line of machine code: how many warps executed it, its samples, and those by what the warp waited for."""

    number: int
    text: str
    executed: int
    samples: int
    waits: Counter[str]


def read(path: Path) -> list[Instruction]:
    """The instructions of one kernel, in order."""
    _title, names, *rows = csv.reader(path.read_text().splitlines())
    waits = {n: name.removeprefix(WAIT) for n, name in enumerate(names) if name.startswith(WAIT) and "(" not in name}
    text, executed, samples = (names.index(name) for name in ("Source", "Instructions Executed", "# Samples"))
    return [
        Instruction(
            number,
            " ".join(row[text].split()),
            int(row[executed] or 0),
            int(row[samples] or 0),
            Counter({name: int(row[n]) for n, name in waits.items() if row[n] and int(row[n])}),
        )
        for number, row in enumerate(rows)
    ]


def segments(code: list[Instruction], near: float = 0.02) -> Iterator[list[Instruction]]:
    """Neighbours that were executed as often, to 2 %."""
    cuts = [b.number for a, b in pairwise(code) if abs(a.executed - b.executed) > near * max(1, a.executed)]
    for begin, end in pairwise([0, *cuts, len(code)] if code else []):
        yield code[begin:end]


def summed(code: list[Instruction]) -> tuple[int, Counter[str]]:
    return sum(x.samples for x in code), sum((x.waits for x in code), Counter[str]())


def shares(waits: Counter[str], total: int, count: int) -> str:
    return ", ".join(f"{name} {100 * n / max(1, total):.0f} %" for name, n in waits.most_common(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--least", type=float, default=1.0, help="percent of all samples from which on to print")
    parser.add_argument("--top", type=int, default=5, help="instructions of a segment")
    given = parser.parse_args()
    code = read(given.file)
    total = max(1, summed(code)[0])
    for segment in segments(code):
        samples, waits = summed(segment)
        if 100 * samples >= given.least * total:
            span = f"{segment[0].number}-{segment[-1].number}"
            print(
                f"{span:>11} {len(segment):5} instructions x {segment[0].executed:<8} {100 * samples / total:5.1f} %   "
                f"{shares(waits, samples, 4)}"
            )
            for x in sorted(segment, key=lambda x: -x.samples)[: given.top]:
                reasons = shares(x.waits, x.samples, 2)
                print(f"{x.number:>17}  {100 * x.samples / total:5.2f} %  {x.text[:60]:<60} {reasons}")


if __name__ == "__main__":
    main()
