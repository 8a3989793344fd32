"""What a run found: counted while it goes on, kept in a file to go on from, and told at its end."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, Environment
from tools.fuzz.draw import Name


@dataclass(frozen=True)
class Finding:
    """One case that has been run; `verdict` is ok, refused or failed."""

    name: str
    kind: str
    verdict: str
    reason: str = ""
    text: str = ""

    @property
    def likeness(self) -> str:
        """What failures of one cause mostly share: the kind, and what went wrong without its numbers."""
        what = re.sub(r"\[[^]]*\]|-?\d[\d.e+-]*|\bnan\b", "#", self.text.split(" :: ")[0])
        return f"{self.kind}: {what[:90]}"


@dataclass
class Tally:
    """Findings of one run; failures are kept whole."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Finding] = field(default_factory=list)

    def add(self, found: Finding) -> None:
        """Count one more."""
        self.verdicts[found.kind, found.verdict] += 1
        if found.verdict == "refused":
            self.refusals[f"{found.kind}: {found.reason}"] += 1
        if found.verdict == "failed":
            self.failures.append(found)

    @property
    def cases(self) -> int:
        """How many there are."""
        return self.verdicts.total()

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Verdicts of each kind."""
        found: dict[str, dict[str, int]] = {}
        for (kind, verdict), count in sorted(self.verdicts.items()):
            found.setdefault(kind, {})[verdict] = count
        return found

    def lines(self) -> list[str]:
        """For people."""
        totals = Counter[str]()
        for (_, verdict), count in self.verdicts.items():
            totals[verdict] += count
        found = [f"{self.cases} cases: {', '.join(f'{count} {verdict}' for verdict, count in sorted(totals.items()))}"]
        for kind, verdicts in self.by_kind().items():
            found.append(f"  {kind:<22} {', '.join(f'{count} {verdict}' for verdict, count in verdicts.items())}")
        found += [f"  refused {count:>5}  {reason}" for reason, count in self.refusals.most_common()]
        for like, count in Counter(one.likeness for one in self.failures).most_common():
            first = next(one.name for one in self.failures if one.likeness == like)
            found.append(f"  FAILED {count:>6}  {like} (first {first})")
        return found

    def record(self, run: dict[str, Any], seconds: float, environment: Environment) -> dict[str, Any]:
        """For a file: what `run` was asked for, how long this process took, and where; no place of this machine."""
        failures = [{"name": one.name, "kind": one.kind, "text": without_places(one.text)} for one in self.failures]
        return {
            **run,
            "seconds": round(seconds, 1),
            "cases": self.by_kind(),
            "failures": failures,
            "refusals": dict(self.refusals.most_common()),
            **asdict(environment),
        }


def without_places(text: str) -> str:
    """Paths from the repository's root on, and those of packages from that of the environment."""
    for place in sorted(map(str, (ROOT, sys.prefix, Path.home())), key=len, reverse=True):
        text = text.replace(f"{place}/", "")
    return text


def append(path: Path, record: dict[str, Any]) -> None:
    """One more line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


class Kept:
    """A file with every finding of a run, from which one that was cut short goes on; of other code it starts anew."""

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self.path, self.found = path, list[Finding]()
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and json.loads(lines[0]) == run:
            self.found = [Finding(**json.loads(line)) for line in lines[1:]]
        else:
            path.unlink(missing_ok=True)
            append(path, run)

    def add(self, found: Finding) -> None:
        """Keep one more."""
        if self.path is not None:
            append(self.path, asdict(found))

    def first_of(self, worker: int) -> int:
        """The case that this worker goes on with."""
        names = [Name.of(found.name) for found in self.found]
        return max([0, *(name.case + 1 for name in names if name.worker == worker)])
