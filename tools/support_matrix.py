"""What runs where, from the dispatch tables and the receipts: the README's table of hardware, and in docs/support.md
the matrix of operations and all about each implementation.

Rows stand in the order in which dispatch prefers them. "verified on" appears only while the sources that a receipt
vouches for are byte for byte those of today.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS
from tools.families import NEIGHBOURS, ROOT, family_of
from tools.receipts import read_all, verified

OPERATIONS = ("attention", "merge", "kv_write", "qkv_prologue", *NEIGHBOURS)
KINDS = {"cpu": "on a CPU, PyTorch", "triton": "on a GPU, Triton", "hopper": "on Hopper, Gluon"}
VERIFIED = "✓"
HARDWARE = {
    "cpu": "CPU (PyTorch)",
    "triton": "NVIDIA sm_80 or newer (Triton)",
    "hopper": "NVIDIA sm_90, Hopper (Gluon)",
}
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
LAYOUTS = ("dense", "packed", "paged")
KEEPS = {  # the layouts that a row with this need runs; a row without such a need runs all
    "the dense layout": ("dense",),
    "the paged layout": ("paged",),
    "packed queries over pages": ("paged",),
    "the dense or the packed layout": ("dense", "packed"),
    "the dense or the paged layout": ("dense", "paged"),
}
_HOPPER_PAGES = (
    "keys that are not paged, or strides in multiples of 16 elements and a mask of one run of keys per query"
)
_DECODE_DIMS = "head dimensions of 48 to 256, multiples of 16"
_NO_CODES = "keys and values that are not encoded"
_OVER_PAGES = "packed queries over pages"
_STRIDES = "strides of q, k and v in multiples of 16 elements"
IMPLIED = {  # a need, and others that together say as much or more; what is left of it then, if anything
    "no gradients with paged keys": (("no gradients",), ""),
    "deterministic=False, or no gradients of captured tensors (summed by atomics)": (("no gradients",), ""),
    "head dimensions up to 256": ((f"{_DECODE_DIMS} (of int4: of 32)",), ""),
    f"{_DECODE_DIMS} (of int4: of 32)": ((_NO_CODES,), _DECODE_DIMS),
    "bfloat16 queries where keys and values are encoded": ((_NO_CODES,), ""),
    "keys that are not encoded by channel": ((_NO_CODES,), ""),
    "share_prefixes=False where keys and values are encoded": ((_NO_CODES,), ""),
    "the dense or the paged layout": ((_OVER_PAGES,), ""),
    _HOPPER_PAGES: ((_OVER_PAGES, _STRIDES), "a mask of one run of keys per query"),
}
NO_BACKWARD = {"no gradients": LAYOUTS, "no gradients with paged keys": ("paged",)}
EMULATED = ("cpu",)
LARGEST_HEAD = 512


def rows(operation: str) -> list[Any]:
    """The dispatch rows of one operation, in order of preference."""
    return list(importlib.import_module(f"tilewise.ops.{operation}.table").ROWS)


def needs(row: Any) -> str:
    """What a row needs, and the calls that it is the default for, in the words of the table."""
    said = list(dict.fromkeys(need.says for need in row.needs))
    wanted = "; ".join(left for says in said if (left := _beside(says, said))) or "nothing"
    preferred = [need.says for need in getattr(row, "prefers", ())]
    if len(preferred) > 1:
        numbered = "; ".join(f"({n}) {says}" for n, says in enumerate(preferred, 1))
        return f"{wanted}; default only for calls with all of: {numbered}"
    return f"{wanted}; default only for {preferred[0]}" if preferred else wanted


def _beside(says: str, said: list[str]) -> str:
    """What a need says beyond the row's other needs."""
    others, left = IMPLIED.get(says, ((says,), says))
    return left if all(other in said for other in others) else says


def proof(row: Any, results: Path = RESULTS, root: Path = ROOT, operation: str = "attention") -> str:
    """Where the row's tests passed on today's sources."""
    family = family_of(row.name, operation)
    if family is None or not family.ci:
        return "every CI run"
    words = [f"CI: {family.ci}"]
    for device, receipt in sorted(verified(family.name, results, root).items()):
        words.append(f"verified on {device}, {receipt.date[:10]} ({receipt.tests['passed']:,} tests)")
    return "; ".join(words)


def gpu_runs(results: Path = RESULTS, root: Path = ROOT) -> str:
    """How many implementations for GPUs passed all their tests there with today's sources, and what is known of the
    others.
    """
    found = [(operation, row) for operation in OPERATIONS for row in rows(operation)]
    families = [one for operation, row in found if (one := family_of(row.name, operation)) is not None and one.ci]
    current = [bool(verified(family.name, results, root)) for family in families]
    others = [family.name for family, now in zip(families, current, strict=True) if not now]
    earlier = [receipt for receipt in read_all(results) if receipt.passed and receipt.family in others]
    before = sum(name in {receipt.family for receipt in earlier} for name in others)
    devices = " or ".join(sorted({receipt.device for receipt in earlier}))
    text = f"GPU runs of the current sources: {sum(current)} of {len(families)} implementations."
    said = [f"{before} passed on {devices} at an earlier commit"] if before else []
    left = len(others) - before
    said += [f"{left} {'has' if left == 1 else 'have'} not passed on a GPU yet"] if left else []
    return f"{text} Of the others, {' and '.join(said)}." if said else text


def matrix(results: Path = RESULTS, root: Path = ROOT) -> str:
    """A Markdown table: a line an operation, its rows by where they run, with a mark behind those verified today."""
    lines = [_line("operation", *KINDS.values(), "backward"), "|---" * (2 + len(KINDS)) + "|"]
    for operation in OPERATIONS:
        found = rows(operation)
        cells = [
            ", ".join(_marked(row, results, root, operation) for row in found if row.name.startswith(kind))
            for kind in KINDS
        ]
        backward = any(row.backward for row in found)
        lines.append(_line(f"`{operation}`", *cells, "yes" if backward else "no"))
    return "\n".join(lines)


def layouts(row: Any, *, backward: bool = False) -> set[str]:
    """The layouts that a row of attention runs, forward or backward, by what it needs."""
    said = [need.says for need in row.needs]
    found = set(LAYOUTS).intersection(*(KEEPS[says] for says in said if says in KEEPS))
    if backward:
        found = found if row.backward else set()
        found = found.difference(*(NO_BACKWARD[says] for says in said if says in NO_BACKWARD))
    return found


def hardware(results: Path = RESULTS, root: Path = ROOT) -> str:
    """A Markdown table of attention: a line a kind of hardware, its dtypes, head dimensions, layouts, and proof."""
    head = ("hardware", "dtypes", "head_dim", "layouts", "backward", "`quantize=`", "tested")
    lines = [_line(*head), "|---" * len(head) + "|"]
    for kind, name in HARDWARE.items():
        found = [row for row in rows("attention") if row.name.startswith(kind)]
        exact = [row for row in found if "quantize=" not in [need.says for need in row.needs]]
        quantized = [row for row in found if row not in exact]
        forward, backward = (
            set[str]().union(*(layouts(row, backward=back) for row in exact)) for back in (False, True)
        )
        shown = [", ".join(one for one in LAYOUTS if one in kept) for kept in (forward, backward)]
        codes = ("emulated" if kind in EMULATED else "yes") if quantized else "no"
        lines.append(
            _line(name, _dtypes(exact), f"1–{_largest_head(exact)}", *shown, codes, _tested(found, results, root))
        )
    return "\n".join(lines)


def _dtypes(found: list[Any]) -> str:
    """The dtypes that some of these rows take."""
    said = [[need.says for need in row.needs if need.says.startswith("dtype ")] for row in found]
    taken = {name for words in said for name in (words[0][6:].split(", ") if words else DTYPES)}
    return ", ".join(short for name, short in DTYPES.items() if name in taken)


def _largest_head(found: list[Any]) -> int:
    said = [re.search(r"head dimensions (?:of \d+ |up )to (\d+)", needs(row)) for row in found]
    return max(int(one[1]) if one else LARGEST_HEAD for one in said)


def _tested(found: list[Any], results: Path, root: Path) -> str:
    """What CI does with all of these rows, and the GPUs on which all of their tests passed with today's sources."""
    families = [family for row in found if (family := family_of(row.name)) and family.ci]
    if not families:
        return "every CI run"
    ci = families[0].ci
    on = set.intersection(*({*verified(family.name, results, root)} for family in families))
    return f"CI: {ci}" + "".join(f"; run on {device}" for device in sorted(on))


def details(results: Path = RESULTS, root: Path = ROOT) -> str:
    """A section an operation, with a Markdown table of all about its rows."""
    sections = []
    for operation in OPERATIONS:
        lines = [_line("implementation", "what it is", "backward", "needs", "tested"), "|---" * 5 + "|"]
        for row in rows(operation):
            tested = proof(row, results, root, operation)
            lines.append(_line(f"`{row.name}`", row.summary, "yes" if row.backward else "no", needs(row), tested))
        sections.append("\n".join([f"## {operation}", "", *lines]))
    return "\n\n".join(sections)


def _marked(row: Any, results: Path, root: Path, operation: str) -> str:
    seen = "verified" in proof(row, results, root, operation)
    return f"`{row.name}` {VERIFIED}" if seen else f"`{row.name}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
