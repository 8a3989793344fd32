"""Random calls of everything public, for a while: `python -m tools.fuzz --seconds 300 --seed 1`.

Workers are processes, each with a stream of cases that its number and the seed decide. A case that fails is told at
once with its name, SEED:WORKER:CASE, by which `--replay` runs it again in this process (with the same `--device` and
`--small`). The exit status is 1 where something failed. Before that the library is broken on purpose, to see that such
faults are found; `--no-twins` leaves it out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.environment import current
from benchmarks.records import RESULTS
from tools.fuzz import twins
from tools.fuzz.draw import Name
from tools.fuzz.kinds import KINDS, builder
from tools.fuzz.report import Finding, Kept, Tally, append
from tools.fuzz.workers import Fleet, Plan, run_one

RECORDS = RESULTS / "fuzz.jsonl"  # of all devices: a line is a run, and no measurement
SHOWN = 3  # of failures that look alike; all of them stand in --record, --out and --resume
ON_GPU = ("dense", "paged", "norm")  # kinds whose faults are looked for there, too: each takes kernels


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long workers begin new cases")
    parser.add_argument("--seed", default="1", help="any text without a colon")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=0, help="so many of each worker at most")
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), default=(), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--small", action="store_true", help="short sequences and narrow heads, as in the tests")
    parser.add_argument("--replay", metavar="SEED:WORKER:CASE", help="one case again, here")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep findings there, and go on from them")
    parser.add_argument("--record", action="store_true", help="append a line to benchmarks/results/fuzz.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append that line there")
    parser.add_argument("--jobs", type=int, default=0, help="workers; default 1 on a CPU, half the cores beside a GPU")
    parser.add_argument("--hang", type=float, default=300.0, help="seconds without progress that count as a failure")
    parser.add_argument("--no-twins", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 where a case failed or a fault was not found."""
    given = arguments(argv)
    jobs = given.jobs or (1 if given.device == "cpu" else max(1, (os.cpu_count() or 2) // 2))
    sizes = (given.seconds, jobs, given.cases, tuple(given.only), given.small, given.hang)
    plan = Plan(given.seed, given.device, *sizes)
    if given.replay:
        return replay(Name.of(given.replay), plan)
    if ":" in given.seed:
        raise SystemExit("--seed: no colon, please: names of cases have them")
    environment = current(given.device)
    print(f"{environment.device}, torch {environment.torch}, commit {environment.commit}", flush=True)
    if not given.no_twins:
        missed = twins.check() + (twins.check("cuda", ON_GPU) if given.device == "cuda" else [])
        print(f"faults on purpose: {'all found' if not missed else 'NOT FOUND: ' + ', '.join(missed)}", flush=True)
        if missed:
            return 1
    run = {"seed": given.seed, "device": given.device, "small": given.small, "only": list(given.only)}
    kept = Kept(given.resume, run | {"commit": environment.commit, "torch": environment.torch})
    tally, start = Tally(), time.monotonic()
    for found in kept.found:
        tally.add(found)
    fleet = Fleet(Plan(given.seed, given.device, *sizes, tuple(kept.first_of(worker) for worker in range(jobs))))
    try:
        for found in fleet.findings():
            tally.add(found)
            kept.add(found)
            alike = sum(one.likeness == found.likeness for one in tally.failures)
            if found.verdict == "failed" and alike <= SHOWN:
                print(told(found, plan), flush=True)
    finally:
        fleet.stop()
        print("\n".join(tally.lines()))
        asked = {"seed": given.seed, "on": given.device, "jobs": jobs, "small": given.small, "only": list(given.only)}
        record = tally.record(asked, time.monotonic() - start, environment)
        for path in (RECORDS if given.record else None, given.out):
            if path is not None:
                append(path, record)
    return 1 if tally.failures else 0


def told(found: Finding, plan: Plan) -> str:
    """A failure, and the command that has it again."""
    small = " --small" if plan.small else ""
    return (
        f"FAILED {found.kind}: python -m tools.fuzz --device {plan.device}{small} --replay {found.name}\n  {found.text}"
    )


def replay(name: Name, plan: Plan) -> int:
    """One case, told before it runs."""
    kind, build = builder(name, plan.device, plan.small)
    try:
        print(f"{name} {kind}: {build().text}", flush=True)
    except Exception as error:  # told below as the finding that it is
        print(f"{name} {kind}: not built, {error}", flush=True)
    found = run_one(name, plan)
    assert found is not None
    print(f"{found.verdict} {found.reason} {found.text}")
    return 1 if found.verdict == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
