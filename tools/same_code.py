"""Whether code of today does what recorded code did.

A receipt or a benchmark record names the hash of its family's sources (`tools.syntax`). Where today's sources have
another hash, it still speaks for them if the family's variants compile to the same instructions and are launched in the
same way. Two files say so: tests/compile/code.json what today's code compiles to, benchmarks/results/code.jsonl what
recorded code compiled to. `python -m tools.kernel_resources` writes both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS
from benchmarks.records import read_all as read_records
from tilewise.testing.instructions import digest
from tilewise.testing.offline import Resources
from tools.families import FAMILIES, ROOT, Family
from tools.syntax import state
from tools.variants import Variant, variants

TABLE = ROOT / "tests" / "compile" / "code.json"
LEDGER = RESULTS / "code.jsonl"
WITNESSED = (90,)  # compute capabilities of the GPUs that receipts and records name


@dataclass(frozen=True)
class Recorded:
    """What a family's code was when `sources` was written into a receipt or record.

    `syntax` is the hash of the same sources by `tools.syntax`: `sources` itself, but in records that are older than
    that hash. `variants` has two digests by a variant's name: of its instructions, and of its launches.
    """

    family: str
    sources: str
    syntax: str
    commit: str
    triton: str
    variants: dict[str, str]


def compiled_by(family: Family) -> list[Variant]:
    """The variants whose kernels are the family's."""
    return [variant for variant in every_variant() if variant.row in family.compiled]


@functools.cache
def every_variant() -> tuple[Variant, ...]:
    """The variants that digests are kept of."""
    return tuple(variant for variant in variants() if variant.sm in WITNESSED)


def digests(launches: Iterable[Resources]) -> str:
    """Of a variant's launches in order: the digest of their instructions, and that of how they are launched."""
    found = list(launches)
    return f"{digest(one.code for one in found)} {digest(one.launch for one in found)}"


def read_table(path: Path = TABLE) -> dict[str, Any]:
    """What today's code compiles to: {"triton": version, "families": {name: hash}, "variants": {name: digests}}; the
    hashes are of the sources that were compiled.
    """
    return json.loads(path.read_text()) if path.exists() else {"triton": "", "families": {}, "variants": {}}


def read_ledger(path: Path = LEDGER) -> list[Recorded]:
    """What recorded code compiled to."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Recorded(**json.loads(line)) for line in lines]


def stale(table: dict[str, Any], root: Path = ROOT) -> list[Family]:
    """The families whose sources are not those that the table was made of."""
    with_kernels = (family for family in FAMILIES.values() if family.compiled)
    return [family for family in with_kernels if table["families"].get(family.name) != family.hash(root)]


def of_today(sources: str, family: Family | None = None, root: Path = ROOT) -> bool:
    """Whether recorded code is today's, in its definitions or in what it compiles to.

    Args:
        sources: the hash in the receipt or record.
        family: whose; None for any.
        root: the checkout.
    """
    files = (root / path.relative_to(ROOT) for path in (TABLE, LEDGER))
    states = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in files)
    found = _todays(root, (state(root), states), tuple(FAMILIES.values()))
    return any(sources in found[one.name] for one in ([family] if family else FAMILIES.values()))


@functools.lru_cache(maxsize=4)
def _todays(root: Path, _state: object, families: tuple[Family, ...]) -> dict[str, set[str]]:
    """Hashes in receipts and records that stand for today's code, by family."""
    table, ledger = read_table(root / TABLE.relative_to(ROOT)), read_ledger(root / LEDGER.relative_to(ROOT))
    today = {family.name: family.hash(root) for family in families}
    found = {name: {sources} for name, sources in today.items()}
    for one in ledger:
        compiled = one.family in today and table["families"].get(one.family) == today[one.family]
        if one.syntax == today.get(one.family) or (compiled and _same_instructions(one, table)):
            found[one.family].add(one.sources)
    return found


def _same_instructions(recorded: Recorded, table: dict[str, Any]) -> bool:
    known = table["variants"]
    same = all(known.get(name) == digests for name, digests in recorded.variants.items())
    return bool(recorded.variants) and recorded.triton == table["triton"] and same


def update(table: dict[str, Any], found: dict[str, str], before: dict[str, str], triton: str) -> dict[str, Any]:
    """The table with newly compiled variants, and with the hash of each family whose variants were all compiled.

    Args:
        table: as it was read.
        found: digests by variant.
        before: hashes of the families' sources before anything was compiled.
        triton: the version that compiled.
    """
    names = {str(variant) for variant in every_variant()}
    kept = table["variants"] if table["triton"] == triton else {}
    families = table["families"] if table["triton"] == triton else {}
    known = {name: digests for name, digests in (kept | found).items() if name in names}
    for family in FAMILIES.values():
        own = {str(variant) for variant in compiled_by(family)}
        if own and own <= found.keys():
            families = families | {family.name: before[family.name]}
    return {"triton": triton, "families": dict(sorted(families.items())), "variants": dict(sorted(known.items()))}


def remember(table: dict[str, Any], commit: str, path: Path = LEDGER) -> list[Recorded]:
    """Add a line to the ledger for each family whose current hash a receipt or record names for the first time."""
    from tools.receipts import read_all as read_receipts

    named = {record.sources for _, record in read_records()} | {receipt.sources for receipt in read_receipts()}
    known = {(one.family, one.sources) for one in read_ledger(path)}
    new = [
        Recorded(family.name, today, today, commit, table["triton"], of_family(family, table))
        for family in FAMILIES.values()
        if family.compiled and (today := family.hash()) in named and (family.name, today) not in known
        if table["families"].get(family.name) == today
    ]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(one)) + "\n" for one in new)
    return new


def of_family(family: Family, table: dict[str, Any]) -> dict[str, str]:
    """Digests by variant, of a family."""
    return {str(variant): table["variants"][str(variant)] for variant in compiled_by(family)}
