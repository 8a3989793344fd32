"""The ```python blocks of README.md and docs/ run as they stand, top to bottom, one namespace a file.

`<!-- gpu -->` on the line before a block: it runs only where PyTorch sees a GPU. `<!-- not run -->`: it never runs
(a fragment, or the code of another library).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import UnsupportedError
from tools import support_matrix

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!--\s*(gpu|not run)\s*-->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One code block: its text without the indentation of its fence, its first line, its mark ("", gpu, not run)."""

    code: str
    line: int
    mark: str


def blocks(text: str) -> list[Block]:
    """Every ```python block of a Markdown text."""
    found = []
    for match in FENCE.finditer(text):
        indent, body = match.groups()
        code = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        mark = MARK.search(text[: match.start()])
        found.append(Block(code, text.count("\n", 0, match.start()) + 2, mark.group(1) if mark else ""))
    return found


def run(path: Path, namespace: dict[str, Any], *, gpu: bool) -> int:
    """Run the file's blocks in order; tracebacks name the file and its lines. Returns how many ran."""
    count = 0
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.mark == "not run" or (block.mark == "gpu" and not gpu):
            continue
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)
        count += 1
    return count


@pytest.mark.parametrize(
    "path", [path for path in FILES if blocks(path.read_text())], ids=lambda path: str(path.relative_to(ROOT))
)
def test_code_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run(path, {"__name__": "__main__"}, gpu=torch.cuda.is_available())


def test_blocks_share_a_namespace_and_obey_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\ntext\n\n<!-- gpu -->\n\n```python\nx = 2\n```\n"
        "<!-- not run -->\n```python\nraise ValueError\n```\n- list\n  ```python\n  if x:\n      y = x + 10\n  ```\n"
        "```bash\nexit 1\n```\n"
    )
    namespace: dict[str, Any] = {}
    assert run(page, namespace, gpu=False) == 2
    assert (namespace["x"], namespace["y"]) == (1, 11)
    assert run(page, {}, gpu=True) == 3


def test_a_broken_block_fails_and_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("title\n\n```python\nx = 1\nundefined_name\n```\n")
    with pytest.raises(NameError) as caught:
        run(page, {}, gpu=False)
    assert (caught.traceback[-1].path.name, caught.traceback[-1].lineno + 1) == ("page.md", 5)


def test_the_readme_fits_a_newcomer() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_the_imports_that_the_readme_names_work() -> None:
    table = (ROOT / "README.md").read_text().partition("## Coming from")[2].partition("## ")[0]
    statements = re.findall(r"`((?:from|import) [^`]+)`", table)
    assert len(statements) >= 7
    for statement in statements:
        exec(statement, {})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        outside = path.parent != ROOT and ROOT / "docs" not in page.resolve().parents  # the site has docs/ alone
        if outside or not page.exists() or (anchor and anchor not in _anchors(page)):
            missing.append(target)
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MkDocs give a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_menu_and_in_the_index() -> None:
    menu, index = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "index.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in FILES if page.parent != ROOT]
    assert [page for page in pages if f": {page}\n" not in menu] == []
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


def test_the_table_of_hardware_is_what_calls_on_a_cpu_do(tmp_path: Path) -> None:
    cells = [cell.strip() for cell in support_matrix.hardware(tmp_path).splitlines()[2].split("|")[1:-1]]
    assert cells == [
        "CPU (PyTorch)", "fp16, bf16, fp32, fp64", "1–512", "dense, packed, paged", "dense, packed", "emulated",
        "every CI run",
    ]  # fmt: skip
    lengths, table = torch.tensor([0, 2, 5], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    for name, short in support_matrix.DTYPES.items():
        assert short in cells[1]
        rows = torch.randn(1, 5, 2, 512, dtype=getattr(torch, name), requires_grad=True)
        for x, layout in ((rows, None), (rows[0], tw.Packed(lengths))):
            assert torch.autograd.grad(tw.attention(x, x, x, layout=layout).sum(), rows)[0].isfinite().all()
        paged = tw.Paged(table, torch.tensor([5], dtype=torch.int32))
        assert tw.attention(*3 * [rows.detach()], layout=paged).shape == rows.shape
    with pytest.raises(UnsupportedError):
        tw.attention(rows, rows, rows, layout=paged)


def test_the_glossary_is_in_order() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    terms = [line.split("|")[1].strip().lower() for line in lines if line.startswith("| ")][1:]
    assert terms == sorted(terms)
    assert len(terms) == len(set(terms)) > 30


def test_every_guarantee_names_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    promises = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| guarantee |")]
    named = [re.findall(r"`(tests/[\w/.]+)`", line) for line in promises]
    assert all(named), "a promise without a test"
    assert [path for paths in named for path in paths if not (ROOT / path).exists()] == []
