"""Registers, spills, shared memory and matrix instructions of every kernel, by compiling without a GPU.

`python -m tools.kernel_resources --write` compiles all variants for all architectures and rewrites
tests/compile/resources.json and code.json; `--sm 90 --only d128` narrows it (other entries are kept), `--changed` to
the families whose sources differ from those that code.json was made of; without --write it prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.environment import commit
from tilewise.testing.offline import Resources
from tools import same_code
from tools.families import FAMILIES, ROOT
from tools.variants import ARCHITECTURES, Variant, variants

TABLE = ROOT / "tests" / "compile" / "resources.json"


def as_entry(found: Resources) -> dict[str, int]:
    """One line of the table."""
    return {"registers": found.registers, "spill": found.spill_bytes, "shared": found.shared_bytes,
            "tensor_core": found.tensor_core}  # fmt: skip


def read_table() -> dict[str, Any]:
    """The committed table: {"triton": version, "kernels": {"variant: kernel": entry}}."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {"triton": "", "kernels": {}}


def _compile(variant: Variant) -> tuple[Variant, list[Resources]]:
    torch.set_num_threads(1)
    return variant, variant.launches()


def _table(known: dict[str, Any], chosen: list[Variant], kernels: dict[str, dict[str, int]], triton: str) -> str:
    """The table as text: of the chosen variants what was found now, of others what was known."""
    names, redone = {str(variant) for variant in variants()}, {str(variant) for variant in chosen}
    kept = {key: entry for key, entry in known["kernels"].items() if key.partition(":")[0] in names - redone}
    return _json({"triton": triton, "kernels": dict(sorted((kept | kernels).items()))})


def _json(table: dict[str, Any]) -> str:
    """A line for each entry of an inner table."""
    parts = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines = (f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            value = "{\n" + ",\n".join(lines) + "\n  }"
        else:
            value = json.dumps(value)
        parts.append(f"  {json.dumps(key)}: {value}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: list[str] | None = None) -> int:
    """Compile, print a line per kernel, and with --write update the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="update resources.json and code.json in tests/compile")
    parser.add_argument("--sm", type=int, nargs="*", default=list(ARCHITECTURES), help="architectures")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--quick", action="store_true", help="only what the compile tier compiles")
    parser.add_argument("--changed", action="store_true", help="only of families whose sources have changed, for the "
                        "GPUs of receipts")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args(argv)
    import triton

    code = same_code.read_table()
    chosen = [v for v in variants() if v.sm in given.sm and given.only in str(v) and (v.quick or not given.quick)]
    if given.changed:
        changed = {variant for family in same_code.stale(code) for variant in same_code.compiled_by(family)}
        chosen = [variant for variant in chosen if variant in changed]
    before = {family.name: family.hash() for family in FAMILIES.values()}
    kernels: dict[str, dict[str, int]] = {}
    digests: dict[str, str] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        for variant, launches in pool.map(_compile, chosen):
            digests[str(variant)] = same_code.digests(launches)
            for name, one in variant.named(launches).items():
                kernels[f"{variant}: {name}"] = as_entry(one)
                print(f"{variant}: {name:<24}", " ".join(f"{k} {n:>6}" for k, n in as_entry(one).items()), flush=True)
    if given.write:
        TABLE.write_text(_table(read_table(), chosen, kernels, triton.__version__))
        code = same_code.update(code, digests, before, triton.__version__)
        same_code.TABLE.write_text(_json(code))
        for one in same_code.remember(code, commit()):
            print(f"{one.family}: {one.sources} is remembered by {len(one.variants)} variants")
    return 0


if __name__ == "__main__":
    sys.exit(main())
