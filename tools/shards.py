"""The tests in shards that continuous integration runs as far as its time lasts: `python -m tools.shards --budget S`.

A unit is a test file, or a class of one, with the seconds that it takes on a quiet core and the implementations that it
runs (tests/seconds.json, written by `--measure`). The first shards run every implementation, whatever the budget; the
others follow as long as there is time for them, from another one on for each commit. What was left out is named, and
comes first in the next run on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from tests.measuring import FOLDER
from tools import kernel_tests
from tools.families import ROOT
from tools.machine import slowness

MEASURED = ROOT / "tests" / "seconds.json"
LEFT_OUT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tilewise" / "left_out.json"
WORKERS = 2
SHARD_S = 150.0  # that a shard takes at most, where no unit alone takes longer
START_S = 12.0  # until the first test of a shard runs
NEWEST_SHARE = 0.7  # of a unit's seconds: fewer variants, a slower compiler
TIERS: dict[str, dict[str, str]] = {  # with what a tier's tests are started
    "cpu": {},
    "interpret": {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    "compile": {},
    "newest": {},  # the compile tier again, with the newest Triton
}


@dataclass(frozen=True)
class Unit:
    """A test file, or a class of one; `runs` are modules of implementations, `compiles` rows of `tools.variants`."""

    name: str
    seconds: float
    runs: frozenset[str]
    compiles: frozenset[str] = frozenset()

    @property
    def tier(self) -> str:
        """By the first folder under tests."""
        folder = self.name.split("/")[1]
        return folder if folder in TIERS else "cpu"


@dataclass(frozen=True)
class Shard:
    """What one pytest process runs; `seconds` on two quiet cores."""

    tier: str
    units: tuple[str, ...]
    seconds: float
    always: bool = False

    @property
    def name(self) -> str:
        """The tier and the first unit; of those that run every implementation the tier alone."""
        first = self.units[0].removeprefix("tests/").removesuffix(".py")
        return (
            f"{self.tier}: every implementation" if self.always else f"{self.tier}: {first} ({len(self.units)} units)"
        )


def units(path: Path = MEASURED) -> list[Unit]:
    """All that was measured."""
    found = json.loads(path.read_text())
    return [
        Unit(name, entry["seconds"], frozenset(entry["runs"]), frozenset(entry["compiles"]))
        for name, entry in found.items()
    ]


def plan(
    measured: Sequence[Unit], *, newest: bool, known: Mapping[str, Collection[str]] = MappingProxyType({})
) -> list[Shard]:
    """The shards: first those that run every implementation, then all other units.

    Args:
        measured: all units.
        newest: whether the compile tier runs with the newest Triton, too.
        known: of a tier that compiles, the rows whose kernels have not changed: their tests run in rotation.
    """
    found = [_in_turns(unit, known.get(unit.tier, ())) for unit in measured]
    first = every_implementation(found)
    always = [
        Shard(tier, tuple(unit.name for unit in own), _seconds(own), True)
        for tier in TIERS
        if (own := [unit for unit in first if unit.tier == tier])
    ]
    rest = [unit for unit in found if unit not in first]
    tiers = {tier: [unit for unit in rest if unit.tier == tier] for tier in TIERS}
    of_newest = [unit for unit in measured if unit.tier == "compile" and runs_with_newest(unit)] if newest else []
    slower = (replace(unit, seconds=unit.seconds * NEWEST_SHARE) for unit in of_newest)
    tiers["newest"] = [_in_turns(unit, known.get("newest", ())) for unit in slower]
    return [*always, *itertools.chain.from_iterable(_cut(tier, own) for tier, own in tiers.items())]


def runs_with_newest(unit: Unit) -> bool:
    """Whether the newest Triton runs this unit of the compile tier."""
    return any(name in unit.name for name in kernel_tests.OF_NEWEST)


def _in_turns(unit: Unit, known: Collection[str]) -> Unit:
    """With the seconds that it takes where one in so many of its tests runs."""
    waits = unit.compiles and unit.compiles.issubset(known)
    return replace(unit, seconds=unit.seconds / kernel_tests.TURNS) if waits else unit


def every_implementation(found: Iterable[Unit]) -> list[Unit]:
    """Units that together run all implementations that any runs: of those that run most new ones a second the first."""
    left = sorted(found, key=lambda unit: unit.name)
    missing = frozenset().union(*(unit.runs for unit in left))
    chosen = []
    while missing:
        best = max(left, key=lambda unit: len(unit.runs & missing) / (1.0 + unit.seconds))
        missing -= best.runs
        chosen.append(best)
    return chosen


def _seconds(found: Iterable[Unit]) -> float:
    return sum(unit.seconds for unit in found) / WORKERS


def _cut(tier: str, own: Sequence[Unit]) -> list[Shard]:
    """Neighbours share a shard."""
    shards: list[Shard] = []
    part: list[Unit] = []
    for unit in sorted(own, key=lambda unit: unit.name):
        if part and _seconds([*part, unit]) > SHARD_S:
            shards.append(Shard(tier, tuple(one.name for one in part), _seconds(part)))
            part = []
        part.append(unit)
    return [*shards, Shard(tier, tuple(one.name for one in part), _seconds(part))] if part else shards


def in_order(shards: Sequence[Shard], commits: int, left_out: Sequence[str] = ()) -> list[Shard]:
    """The order of a run: those that always run, those that the last run left out, then the others from another one
    on for each commit.
    """
    always = [shard for shard in shards if shard.always]
    others = [shard for shard in shards if not shard.always]
    start = commits % len(others) if others else 0
    turned = [*others[start:], *others[:start]]
    return [*always, *sorted(turned, key=lambda shard: shard.name not in left_out)]


class Clock:
    """What shards will take here, from what they have taken so far.

    Args:
        budget: seconds.
        slowness: how many times as long as usual things take on this machine, as one knows before the first shard.
    """

    def __init__(self, budget: float, slowness: float) -> None:
        self.left, self._slowness = budget, max(slowness, 1.0)
        self._usual = self._taken = 0.0

    def fits(self, shard: Shard) -> bool:
        """Whether there is time for it."""
        return shard.always or self._of(shard) * max(self._slowness, self._measured()) <= self.left

    def took(self, shard: Shard, seconds: float) -> None:
        """Note what it took."""
        self.left -= seconds
        self._usual += self._of(shard)
        self._taken += seconds

    def _of(self, shard: Shard) -> float:
        return shard.seconds + START_S

    def _measured(self) -> float:
        return self._taken / self._usual if self._usual else 0.0


def command(shard: Shard) -> list[str]:
    """Of pytest. Tests of the compile tier share no oracle: any process takes any of them."""
    scopes = ["--dist", "load"] if shard.tier in ("compile", "newest") else []
    return [
        sys.executable, "-m", "pytest", *shard.units, "-n", str(WORKERS), "-q", "--color=no", *scopes,
        "--deselect", "tests/test_tiers.py::test_kernels_in_the_interpreter",  # which a tier of its own runs here
    ]  # fmt: skip


def environment(tier: str, newest: str | None) -> dict[str, str]:
    """Of a shard's process; `newest` is the folder that holds the newest Triton."""
    return {**kernel_tests.environment(newest if tier == "newest" else None), **TIERS[tier]}


def run(shards: Sequence[Shard], clock: Clock, newest: str | None) -> tuple[list[Shard], list[Shard]]:
    """Run what fits; returns the shards that failed, and those that were left out."""
    failed, left_out = [], []
    for shard in shards:
        if not clock.fits(shard):
            left_out.append(shard)
            continue
        print(f"\n--- {shard.name}, {shard.seconds:.0f} s usually, {clock.left:.0f} s left", flush=True)
        start = time.perf_counter()
        status = subprocess.run(command(shard), cwd=ROOT, env=environment(shard.tier, newest), check=False).returncode
        clock.took(shard, time.perf_counter() - start)
        failed += [shard] if status else []
    return failed, left_out


def measure(chosen: Sequence[str] = ()) -> dict[str, dict[str, object]]:
    """Seconds and implementations by unit, of these files or of all."""
    found: dict[str, dict[str, object]] = {}
    files = chosen or [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    for tier in ("cpu", "interpret", "compile"):
        own = [file for file in files if Unit(file, 0.0, frozenset()).tier == tier and "/gpu/" not in file]
        with tempfile.TemporaryDirectory() as folder:
            shard = Shard(tier, tuple(own), 0.0)
            env = environment(tier, None) | {FOLDER: folder}
            if own:
                options = ["-p", "tests.measuring", "--all-kernels"]
                subprocess.run([*command(shard), *options], cwd=ROOT, env=env, check=False)
            for path in Path(folder).iterdir():
                for name, entry in json.loads(path.read_text()).items():
                    before = found.setdefault(name, {"seconds": 0.0, "runs": [], "compiles": []})
                    before["seconds"] += entry["seconds"]
                    for key in ("runs", "compiles"):
                        before[key] = sorted({*before[key], *entry[key]})
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the shards; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", type=float, default=3000.0, help="seconds (default: 3000)")
    parser.add_argument("--newest", metavar="DIR", help="folder of the newest Triton, for the compile tier once more")
    parser.add_argument("--list", action="store_true", help="print the shards and run nothing")
    parser.add_argument(
        "--measure", nargs="*", metavar="FILE", help="time all test files, or these, and write tests/seconds.json"
    )
    given = parser.parse_args(argv)
    if given.measure is not None:
        known: Mapping[str, object] = json.loads(MEASURED.read_text()) if given.measure else {}
        found = {**known, **measure(given.measure)}
        lines = [f"  {json.dumps(name)}: {json.dumps(_rounded(entry))}" for name, entry in sorted(found.items())]
        MEASURED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    table, versions = kernel_tests.read_table(), {"compile": metadata.version("triton")}
    if given.newest:
        versions["newest"] = next(iter(metadata.distributions(name="triton", path=[given.newest]))).version
    before = json.loads(LEFT_OUT.read_text()) if LEFT_OUT.exists() else []
    known = {tier: kernel_tests.unchanged(table.get(version, {})) for tier, version in versions.items()}
    known["interpret"] = known["compile"]
    shards = in_order(plan(units(), newest=given.newest is not None, known=known), kernel_tests.commits(), before)
    if given.list:
        for shard in shards:
            print(f"{shard.seconds:6.0f} s  {shard.name}")
        return 0
    failed, left_out = run(shards, Clock(given.budget, slowness()), given.newest)
    LEFT_OUT.parent.mkdir(parents=True, exist_ok=True)
    LEFT_OUT.write_text(json.dumps([shard.name for shard in left_out]))
    for what, found in (("FAILED", failed), ("left out, no time", left_out)):
        for shard in found:
            print(f"{what}: {shard.name}: {' '.join(shard.units)}")
    print(f"{len(shards) - len(left_out)} of {len(shards)} shards ran, {len(failed)} failed")
    return 1 if failed else 0


def _rounded(entry: Mapping[str, object]) -> dict[str, object]:
    return {**entry, "seconds": round(float(str(entry["seconds"])), 1)}


if __name__ == "__main__":
    sys.exit(main())
