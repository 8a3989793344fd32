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


def test_every_guarantee_names_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    promises = [line for line in text.splitlines() if line.startswith("| ") and "held by" not in line]
    named = [re.findall(r"`(tests/[\w/.]+)`", line) for line in promises]
    assert all(named), "a promise without a test"
    assert [path for paths in named for path in paths if not (ROOT / path).exists()] == []
