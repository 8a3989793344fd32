"""A receipt speaks for other sources as long as they compile to the same instructions and launch in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_receipts import RECEIPT
from tools import same_code
from tools.families import FAMILIES, ROOT, Family
from tools.same_code import Recorded

VARIANT = "sm_90 merge bf16 d128 pair"  # which stands for a kernel of the toy family


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a family of one kernel file, a receipt of it and a ledger line."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "triton_toy.py").write_text("kernel = 1\n")
    monkeypatch.setitem(FAMILIES, "toy", Family("toy", ("src/triton_*.py",), (), (), compiled=("merge",)))
    sources = FAMILIES["toy"].hash(tmp_path)
    line = Recorded("toy", sources, sources, "abc", "3.6.0", {VARIANT: "code launch"})
    write(tmp_path / "benchmarks/results/code.jsonl", asdict(line))
    return tmp_path


def write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) + "\n")


def compiled(root: Path, digests: str = "code launch", **other: Any) -> None:
    """The table, as if today's sources had been compiled."""
    table = {"triton": "3.6.0", "families": {"toy": FAMILIES["toy"].hash(root)}, "variants": {VARIANT: digests}}
    write(root / "tests/compile/code.json", table | other)


def test_other_sources_with_the_same_instructions_keep_a_receipt(toy: Path) -> None:
    receipt = replace(RECEIPT, sources=FAMILIES["toy"].hash(toy))
    assert receipt.current(toy)
    (toy / "src" / "triton_toy.py").write_text("kernel = 1 + 0\n")
    assert not receipt.current(toy), "nobody has compiled them"
    compiled(toy)
    assert receipt.current(toy)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: compiled(root, "other launch"),
        lambda root: compiled(root, "code other"),
        lambda root: compiled(root, variants={}),
        lambda root: compiled(root, triton="3.7.0"),
        lambda root: compiled(root, families={"toy": "of other sources"}),
    ],
    ids=["an instruction", "a launch", "a variant that is gone", "another compiler", "a table of other sources"],
)
def test_what_takes_a_receipt_away(toy: Path, change: Callable[[Path], None]) -> None:
    receipt = replace(RECEIPT, sources=FAMILIES["toy"].hash(toy))
    (toy / "src" / "triton_toy.py").write_text("kernel = 2\n")
    compiled(toy)
    assert receipt.current(toy)
    change(toy)
    assert not receipt.current(toy)


def test_another_family_of_the_same_hash_proves_nothing(toy: Path) -> None:
    receipt = replace(RECEIPT, sources=FAMILIES["toy"].hash(toy), family="merge_triton")
    assert not receipt.current(toy)


def test_a_record_of_the_hash_of_bytes_speaks_by_what_its_sources_define(toy: Path) -> None:
    today = FAMILIES["toy"].hash(toy)
    line = Recorded("toy", "bytes", today, "abc", "3.6.0", {})
    write(toy / "benchmarks/results/code.jsonl", asdict(line))
    assert same_code.of_today("bytes", root=toy)
    (toy / "src" / "triton_toy.py").write_text("kernel = 2\n")
    compiled(toy)
    assert not same_code.of_today("bytes", root=toy)


def test_a_family_is_up_to_date_once_all_its_variants_are_compiled() -> None:
    family = FAMILIES["merge_triton"]
    own = [str(variant) for variant in same_code.compiled_by(family)]
    table = {"triton": "3.6.0", "families": {family.name: "before"}, "variants": {own[0]: "old", "gone": "old"}}
    hashes = dict.fromkeys(FAMILIES, "now")
    part = same_code.update(table, {own[0]: "new"}, hashes, "3.6.0")
    assert part["families"] == {family.name: "before"}
    assert part["variants"] == {own[0]: "new"}, "what is no variant any more goes"
    whole = same_code.update(table, dict.fromkeys(own, "new"), hashes, "3.6.0")
    assert whole["families"] == {family.name: "now"}
    other = same_code.update(table, {own[0]: "new"}, hashes, "3.7.0")
    assert other == {"triton": "3.7.0", "families": {}, "variants": {own[0]: "new"}}


def test_the_committed_table_and_ledger_are_whole() -> None:
    table, ledger = same_code.read_table(), same_code.read_ledger()
    assert set(table["variants"]) == {str(variant) for variant in same_code.every_variant()}
    assert set(table["families"]) == {family.name for family in FAMILIES.values() if family.compiled}
    assert {one.family for one in ledger} <= set(FAMILIES)
    assert len({(one.family, one.sources) for one in ledger}) == len(ledger)
    assert (ROOT / "benchmarks/results/code.jsonl").exists()
