"""docs/papers.md, docs/design/ and STRUCTURE.md point at files and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "papers.md", ROOT / "STRUCTURE.md", *sorted((ROOT / "docs" / "design").glob("*.md")))
PLACES = (ROOT, ROOT / "src" / "tilewise", ROOT / "src" / "tilewise" / "ops" / "attention")
CODE = re.compile(r"`([^`\n]+)`|<code>(.*?)</code>")


def missing(text: str) -> list[str]:
    """Files and `tw.` names that a Markdown text mentions as code and that are not there; `*` is a wildcard."""
    found = []
    for match in CODE.finditer(text):
        code = match.group(1) or match.group(2)
        if re.fullmatch(r"[\w./*]+(\.py|\.md|\.toml|/)", code):
            pattern = code.removesuffix("/")
            if not any(list(place.glob(pattern)) for place in PLACES):
                found.append(code)
        found += [name for name in re.findall(r"\btw\.(\w+)", code) if not hasattr(tilewise, name)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_index_names_exists(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_every_name_of_the_library_is_in_the_index_or_a_plain_helper() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    library = {*vars(tilewise.formula.library), *vars(tilewise.formula.grids), *vars(tilewise.formula.scores)}
    named = {name for name in tilewise.__all__ if name in library and not name[0].isupper()}
    plain = {"mask", "score", "lengths", "bias", "tanh_score", "sigmoid_score"}  # from no paper
    assert sorted(name for name in named - plain if f"tw.{name}" not in text) == []


def test_a_wrong_pointer_is_found() -> None:
    text = "`ops/attention/cpu.py`, `triton_fwd.py`, `ops/gone.py`, `tw.causal & tw.cusal`, `Paged`, `tools/`, `attic/`"
    assert missing(text) == ["ops/gone.py", "cusal", "attic/"]
