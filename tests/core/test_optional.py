"""Packages of extras: one error where one is missing, whose extra has what the caller says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tilewise.core.errors import MissingExtraError
from tilewise.core.optional import importing

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted((ROOT / "src" / "tilewise").rglob("*.py"))


def calls(function: str) -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function by its plain name in the package."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if f"{function}(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                yield path, node


def test_a_missing_package_names_what_needs_it_and_what_installs_it() -> None:
    with pytest.raises(MissingExtraError) as caught, importing("no_such_package>=2", "draw", name="pictures"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    assert str(caught.value) == (
        "pictures: got No module named 'no_such_package'; expected no_such_package>=2. "
        "Hint: pip install 'tilewise[draw]'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_what_else_goes_wrong_stays_what_it_is() -> None:
    with importing("torch", "draw"):
        import torch  # noqa: F401
    with pytest.raises(KeyError), importing("torch", "draw"):
        {}["missing"]


def test_extras_install_what_their_users_name() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    lists = r"^(\w+) = \[(.*?)\](?: #[^\n]*)?$"  # Python 3.10 has no tomllib
    extras = dict(re.findall(lists, text, re.MULTILINE | re.DOTALL))
    wanted = [(path, *(ast.literal_eval(x) for x in call.args)) for path, call in calls("importing")]
    assert len(wanted) > 6
    for path, package, extra in wanted:
        need = Requirement(package)
        found = [x for x in map(Requirement, re.findall(r'"([\w.>=]+)"', extras[extra])) if x.name == need.name]
        assert [str(x.specifier) for x in found] == [str(need.specifier)], path


def test_one_function_raises_it() -> None:
    assert [path.name for path, _ in calls("MissingExtraError")] == ["optional.py"]
