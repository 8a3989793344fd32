"""What a hash of sources sees, and what it does not."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tools.families import FAMILIES, ROOT
from tools.syntax import _Tree, _Writer, sources_hash

KERNEL = '''
"""Rows added."""

import math

from tilewise.tiles.sums import add, double as twice
from tilewise.tiles import sums

LIMIT = 3
"""Rows at most."""


def add_rows(x, n: int):
    """Adds."""
    total = 0.0  # so far
    for row in range(n):
        total = add(total, [y for y in x if y][row])
    return twice(total) + sums.add(LIMIT, math.pi)
'''
SUMS = """
def add(a, b):
    return a + b


def double(a):
    return 2 * a
"""
FILES = {"src/tilewise/__init__.py": "", "src/tilewise/tiles/__init__.py": "", "src/tilewise/tiles/sums.py": SUMS,
         "src/tilewise/kernel.py": KERNEL}  # fmt: skip


def hash_of(root: Path, files: dict[str, str], pattern: str = "src/tilewise/**/*.py") -> str:
    shutil.rmtree(root / "src", ignore_errors=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return sources_hash(root.glob(pattern), root)


def edited(*changes: tuple[str, str], of: str = "src/tilewise/kernel.py") -> dict[str, str]:
    text = FILES[of]
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return FILES | {of: text}


SAME: dict[str, dict[str, str]] = {
    "comments": edited(("  # so far", ""), ("LIMIT = 3", "LIMIT = 3  # rows")),
    "docstrings": edited(('"""Adds."""', '"""Adds rows, one after another."""'), ('"""Rows at most."""', "")),
    "layout": edited(("add(total, [y for y in x if y][row])", "add(\n            total,\n [y for y in x if y][row])")),
    "local names": edited(("total", "so_far"), ("row ", "line "), ("[row]", "[line]")),
    "names of a comprehension": edited(("y for y in x if y", "z for z in x if z")),
    "another way to import": edited(("from tilewise.tiles import sums\n", ""), ("sums.add", "add")),
    "a name of an import": edited(("double as twice", "double"), ("twice(", "double(")),
    "a moved file": {"src/tilewise/core/__init__.py": "", "src/tilewise/__init__.py": "",
                     "src/tilewise/core/adding.py": SUMS,
                     "src/tilewise/core/rows.py": KERNEL.replace("tiles.sums", "core.adding").replace(
                         "tiles import sums", "core import adding").replace("sums.add", "adding.add")},
    "a moved function": FILES | {
        "src/tilewise/tiles/sums.py": SUMS.partition("\n\n\ndef double")[0],
        "src/tilewise/tiles/doubles.py": "def double(a):\n    return 2 * a\n",
        "src/tilewise/kernel.py": KERNEL.replace(
            "import add, double as twice", "import add\nfrom tilewise.tiles.doubles import double as twice"),
    },
    "a module that hands names on": FILES | {
        "src/tilewise/tiles/__init__.py": "from tilewise.tiles.sums import add, double\n",
        "src/tilewise/kernel.py": KERNEL.replace("tilewise.tiles.sums import", "tilewise.tiles import"),
    },
}  # fmt: skip
OTHER: dict[str, dict[str, str]] = {
    "a number": edited(("LIMIT = 3", "LIMIT = 4")),
    "a number elsewhere": edited(("2 * a", "3 * a"), of="src/tilewise/tiles/sums.py"),
    "an operator": edited(("twice(total) +", "twice(total) -")),
    "a function called": edited(("= add(total", "= max(total")),
    "an imported function": edited(("import add, double as twice", "import double as add, double as twice")),
    "a module's function": edited(("sums.add", "sums.double")),
    "a parameter": edited(("x, n: int", "x, m: int"), ("range(n)", "range(m)")),
    "another module": edited(("import math", "import cmath as math")),
    "which local": edited(("add(total, [y", "add(row, [y")),
    "a local that was of the module": edited(("range(n)", "range(LIMIT)"), ("total = 0.0", "LIMIT = total = 0.0")),
    "a statement less": edited(("    total = 0.0  # so far\n", "")),
    "a default": edited(("n: int", "n: int = 2")),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_words_and_places_change_nothing(name: str, tmp_path: Path) -> None:
    assert hash_of(tmp_path, SAME[name]) == hash_of(tmp_path, FILES)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_defined_changes_it(name: str, tmp_path: Path) -> None:
    assert hash_of(tmp_path, OTHER[name]) != hash_of(tmp_path, FILES)


def test_a_name_of_a_file_outside_is_only_a_name(tmp_path: Path) -> None:
    kernel = "src/tilewise/kernel.py"
    outside = edited(("2 * a", "3 * a"), of="src/tilewise/tiles/sums.py")
    assert hash_of(tmp_path, outside, kernel) == hash_of(tmp_path, FILES, kernel)
    assert hash_of(tmp_path, OTHER["a module's function"], kernel) != hash_of(tmp_path, FILES, kernel)


def test_strings_that_name_a_module_of_the_set_stand_for_what_it_holds(tmp_path: Path) -> None:
    row = "src/tilewise/row.py"
    named = FILES | {row: 'MODULE = "tilewise.tiles.sums"\n'}
    moved = {name.replace("sums", "adding"): text.replace("tiles.sums", "tiles.adding").replace(
        "import sums", "import adding").replace("sums.add", "adding.add") for name, text in named.items()}  # fmt: skip
    other = named | {row: 'MODULE = "tilewise.kernel"\n'}
    assert hash_of(tmp_path, moved) == hash_of(tmp_path, named) != hash_of(tmp_path, other)


def test_an_empty_text_within_a_text_changes_nothing_and_elsewhere_it_does() -> None:
    """Python 3.12 has one at the end of a nested format, 3.11 has none."""
    writer = _Writer(_Tree(ROOT), "src/tilewise/__init__.py")
    one, other = (ast.parse('f"{x:<{n}}"').body[0] for _ in range(2))
    spec = next(node for node in ast.walk(other) if isinstance(node, ast.FormattedValue)).format_spec
    assert isinstance(spec, ast.JoinedStr)
    spec.values.append(ast.Constant(""))
    assert writer.text(one, ()) == writer.text(other, ())
    calls = [ast.parse(text).body[0] for text in ("f()", "f('')")]
    assert writer.text(calls[0], ()) != writer.text(calls[1], ())


def test_no_file_has_no_hash(tmp_path: Path) -> None:
    assert sources_hash([], tmp_path) == "none"


def test_a_family_may_move_and_be_reworded(tmp_path: Path) -> None:
    """The sources of the Hopper kernels, one file renamed and all of them with another first line."""
    family = FAMILIES["attention_hopper"]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    before = family.hash(tmp_path)
    assert before == family.hash()
    old, new = "gluon_sm90_fetch", "gluon_sm90_producer"
    for path in tmp_path.rglob("*.py"):
        path.write_text("# reworded\n" + path.read_text().replace(old, new))
    folder = tmp_path / "src/tilewise/ops/attention"
    (folder / f"{old}.py").rename(folder / f"{new}.py")
    files = [*family.files(tmp_path), folder / f"{new}.py"]
    assert sources_hash(files, tmp_path) == before
    kernel = folder / "gluon_sm90_fwd.py"
    kernel.write_text(kernel.read_text().replace("+ 1", "+ 2", 1))
    assert sources_hash(files, tmp_path) != before
