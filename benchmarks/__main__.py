"""`python -m benchmarks <case>` measures and appends records; `merge DIR` brings in those of another machine."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.cases import CASES, Options
from benchmarks.records import RESULTS, merge


def main(argv: list[str] | None = None) -> int:
    """Run one case, all of them, or merge; exit status 0 when every part ran, 2 where --only names none."""
    listing = "\n".join(f"  {name:<18} {what}" for name, what in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=f"Cases:\n{listing}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", choices=[*CASES, "all", "merge"])
    parser.add_argument("source", nargs="?", type=Path, help="merge: the results folder to bring in")
    parser.add_argument("--out", type=Path, help="results folder (default: benchmarks/results)")
    parser.add_argument("--rounds", type=int, default=60, help="timed calls per contender, or turns of calls, at most")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the case, by name")
    parser.add_argument("--model", help="engine: random:NAME, smollm2, or a checkpoint's folder")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="engine_equality: keep findings there, and go on")
    parser.add_argument("--quick", action="store_true", help="tiny problems, to see that a case runs; needs --out")
    given = parser.parse_args(argv)
    if given.case == "merge":
        if given.source is None:
            parser.error("merge needs the folder to bring in")
        print(f"{merge(given.source, given.out or RESULTS)} lines added")
        return 0
    if given.quick and given.out is None:
        parser.error("--quick measures nothing worth keeping: give a folder with --out")
    options = Options(given.out or RESULTS, given.rounds, tuple(given.only), given.quick, given.model, given.resume)
    for name in CASES if given.case == "all" else [given.case]:
        importlib.import_module(f"benchmarks.cases.{name}").run(options)
    if options.unknown:
        names = ", ".join(sorted(options.parts)) or "none"
        print(f"--only: got {', '.join(options.unknown)}; parts of {given.case}: {names}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
