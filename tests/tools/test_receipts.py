from __future__ import annotations

import ast
import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.running import ENVIRONMENT
from tilewise.core.dispatch import Row
from tools import families, gpu_receipt, receipts, support_matrix
from tools.families import FAMILIES, Family
from tools.receipts import Receipt

RECEIPT = Receipt(
    family="toy", sources="", device="NVIDIA H200", driver="1", torch="2", triton="3", commit="abc",
    date="2026-01-01T00:00:00Z", command="c", tests={"passed": 10, "failed": 0, "skipped": 1},
)  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one family of one kernel file, at tmp_path/repo."""
    root = tmp_path / "repo"
    (root / "src").mkdir(parents=True)
    (root / "src" / "triton_toy.py").write_text("kernel = 1\n")
    monkeypatch.setitem(
        FAMILIES, "toy", Family("toy", ("src/triton_*.py",), ("tests/gpu/*.py",), ("toy_row",), "compiled")
    )
    return root


def test_hash_follows_what_the_sources_define(toy: Path) -> None:
    family = FAMILIES["toy"]
    first = family.hash(toy)
    (toy / "src" / "unrelated.py").write_text("x = 1\n")
    assert family.hash(toy) == first
    (toy / "src" / "triton_toy.py").write_text("kernel = 2  # more\n")
    second = family.hash(toy)
    assert second != first
    (toy / "src" / "triton_toy.py").rename(toy / "src" / "triton_other.py")
    assert family.hash(toy) == second


def test_verified_only_while_the_hash_matches(toy: Path, tmp_path: Path) -> None:
    receipts.append(replace(RECEIPT, sources=FAMILIES["toy"].hash(toy)), tmp_path)
    assert set(receipts.verified("toy", tmp_path, toy)) == {"NVIDIA H200"}
    (toy / "src" / "triton_toy.py").write_text("kernel = 2\n")
    assert receipts.verified("toy", tmp_path, toy) == {}


@pytest.mark.parametrize("tests", [{"passed": 10, "failed": 1}, {"passed": 0, "failed": 0, "skipped": 5}])
def test_a_later_failure_on_the_same_sources_takes_the_word_back(
    toy: Path, tmp_path: Path, tests: dict[str, int]
) -> None:
    good = replace(RECEIPT, sources=FAMILIES["toy"].hash(toy))
    receipts.append(good, tmp_path)
    receipts.append(replace(good, tests=tests), tmp_path)
    assert receipts.verified("toy", tmp_path, toy) == {}


def test_a_broken_receipt_is_named(tmp_path: Path) -> None:
    path = receipts.append(RECEIPT, tmp_path)
    path.write_text(path.read_text() + '{"family": "toy"}\n')
    with pytest.raises(ValueError, match=r"receipts\.jsonl:2"):
        receipts.read_all(tmp_path)


def test_matrix_names_the_device_only_with_a_receipt(toy: Path, tmp_path: Path) -> None:
    row = SimpleNamespace(name="toy_row", needs=(), summary="s", backward=None)
    assert "verified" not in support_matrix.proof(row, tmp_path, toy)
    receipts.append(replace(RECEIPT, sources=FAMILIES["toy"].hash(toy)), tmp_path)
    assert "verified on NVIDIA H200, 2026-01-01 (10 tests)" in support_matrix.proof(row, tmp_path, toy)


def test_the_matrix_marks_what_a_gpu_has_shown_today(tmp_path: Path) -> None:
    lines = support_matrix.matrix(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [f"`{name}`" for name in support_matrix.OPERATIONS]
    named = {name for line in lines for name in line.split("`")[3::2]}
    assert named == {row.name for op in support_matrix.OPERATIONS for row in support_matrix.rows(op)} - {
        "reference", "reference_codes", "apart",  # which calls other operations, wherever these run
    }  # fmt: skip
    assert support_matrix.VERIFIED not in "".join(lines)
    merge = FAMILIES["merge_triton"]
    receipts.append(replace(RECEIPT, family=merge.name, sources=merge.hash()), tmp_path)
    marked = [line for line in support_matrix.matrix(tmp_path).splitlines() if support_matrix.VERIFIED in line]
    assert marked == ["| `merge` | `cpu` | `triton` ✓ |  | yes |"]
    assert "verified on NVIDIA H200" in support_matrix.details(tmp_path)


def test_every_dispatch_row_but_the_reference_has_a_family() -> None:
    for operation in support_matrix.OPERATIONS:
        rows = [row.name for row in support_matrix.rows(operation)]
        without = {name for name in rows if families.family_of(name, operation) is None}
        assert without == {"reference"} | ({"reference_codes"} if operation == "attention" else set())
        known = {name for family in FAMILIES.values() if family.operation == operation for name in family.rows}
        assert known <= set(rows), "a family names a row that dispatch no longer has"
    assert {family.operation for family in FAMILIES.values()} <= set(support_matrix.OPERATIONS)


def test_rows_of_one_name_have_the_family_of_their_operation() -> None:
    found = [families.family_of("triton", operation) for operation in ("attention", "merge")]
    assert [family.name for family in found if family] == ["attention_triton", "merge_triton"]
    assert "triton_merge.py" in {path.name for path in FAMILIES["merge_triton"].files()}
    assert "reference.py" not in {path.name for path in FAMILIES["merge_triton"].files()}


def _imported(folder: Path, stem: str, seen: set[str]) -> set[str]:
    """File `stem` of an operation's folder, those there that it imports, and those that they import."""
    if stem not in seen and stem != "table":  # whom a backward asks who can run it; that has a family of its own
        seen.add(stem)
        tree = ast.parse((folder / f"{stem}.py").read_text(encoding="utf-8"))
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            package, _, last = (node.module or "").rpartition(".")
            here = f"tilewise.ops.{folder.name}"
            found = [last] if package == here else [x.name for x in node.names] if node.module == here else []
            for other in found:
                _imported(folder, other, seen)
    return seen


def test_a_family_holds_what_its_rows_import() -> None:
    for operation in support_matrix.OPERATIONS:
        folder = families.ROOT / "src" / "tilewise" / "ops" / operation
        for row in support_matrix.rows(operation):
            family = families.family_of(row.name, operation)
            imported = _imported(folder, row.module.rpartition(".")[2], set())
            assert family is None or {folder / f"{stem}.py" for stem in imported} <= set(family.files()), row.name


def test_each_row_of_attention_is_declared_in_its_family_and_in_those_that_need_what_it_needs() -> None:
    declared = {}
    names = [row.name for row in support_matrix.rows("attention")]
    needs = {row.name: set(row.needs) for row in support_matrix.rows("attention")}
    for path in sorted((families.ROOT / "src/tilewise/ops/attention/rows").glob("[!_]*.py")):
        module = importlib.import_module(f"tilewise.ops.attention.rows.{path.stem}")
        for row in (value for value in vars(module).values() if isinstance(value, Row)):
            found = families.family_of(row.name)
            holding = {family.name for family in FAMILIES.values() if path in family.files()}
            taken = [families.family_of(name) for name in names if needs[row.name] < needs[name]]
            own = {found.name} if found else set()
            declared[row.name] = own <= holding <= own | {family.name for family in taken if family}
    assert declared == dict.fromkeys(names, True)


def test_kernels_for_pages_leave_what_others_vouch_for() -> None:
    for name in ("attention_triton", "attention_hopper"):
        files = {path.name for path in FAMILIES[name].files()}
        assert not files & {"triton_paged.py", "triton_work.py", "gluon_decode.py", "paged.py", "decode.py", "table.py"}
    assert not [path for path in FAMILIES["attention_triton"].files() if path.name.startswith(("gluon", "hopper"))]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_pattern_of_a_family_matches_a_file(family: Family) -> None:
    empty = [pattern for pattern in (*family.sources, *family.tests) if not list(families.ROOT.glob(pattern))]
    assert empty == []


def test_outcomes_count_a_broken_setup_as_a_failure_and_only_the_familys_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = gpu_receipt.Outcomes()
    here = Path(__file__).relative_to(families.ROOT).as_posix()

    def report(when: str, outcome: str, file: str = here) -> SimpleNamespace:
        kinds = {f"{kind}": kind == outcome for kind in ("passed", "failed", "skipped")}
        said = {"nodeid": f"{file}::test", "longreprtext": f"{when} broke"}
        return SimpleNamespace(when=when, outcome=outcome, location=(file, 1, "test"), **kinds, **said)

    for entry in (
        report("setup", "passed"),
        report("call", "passed"),
        report("teardown", "passed"),
        report("setup", "failed"),
        report("setup", "skipped"),
        report("call", "failed", "tests/elsewhere.py"),
    ):
        outcomes.pytest_runtest_logreport(entry)  # type: ignore[arg-type]
    mine = Family("mine", (), (here,), ())
    assert outcomes.of(mine) == {"passed": 1, "failed": 1, "skipped": 1}
    assert sum(outcomes.by_file.values(), Counter())["failed"] == 2
    assert "tests/elsewhere.py::test\ncall broke" in capsys.readouterr().out


def test_the_gpu_tier_runs_all_files_of_the_families_that_are_named() -> None:
    every = gpu_receipt.tests_of(gpu_receipt.gpu_families())
    assert {Path(path) for path in every} == set((families.ROOT / "tests" / "gpu").glob("test_*.py"))
    some = gpu_receipt.gpu_families(["merge_triton", "kv_write_triton"])
    names = ["test_far_rows.py", "test_kv_write.py", "test_merge.py"]
    assert [Path(path).name for path in gpu_receipt.tests_of(some)] == names


@pytest.mark.parametrize("status", [pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.OK])
def test_a_run_that_was_cut_short_leaves_no_receipt(
    status: pytest.ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_receipt.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_receipt, "current", lambda device: ENVIRONMENT)
    monkeypatch.setattr(gpu_receipt.pytest, "main", lambda *_, **__: status)
    assert gpu_receipt.main(["--families", "merge_triton", "--out", str(tmp_path)]) == int(status)
    assert bool(list(tmp_path.rglob("receipts.jsonl"))) is (status == pytest.ExitCode.OK)
