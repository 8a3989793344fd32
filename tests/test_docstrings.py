"""Docstrings of all public names: sections that a reader looks for, each parameter named, examples that run."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.test_docs import _anchors
from tilewise.core import errors
from tools import api_page, readme

NAMED = api_page.PUBLIC
CLASSES = {name: value for name, value in NAMED.items() if inspect.isclass(value)}
COMPACT = "tilewise.kv.allocator"  # a file at its limit of lines: methods name their parameters in sentences
METHODS = {
    f"{name}.{method}": getattr(at, "__func__", at)
    for name, owner in CLASSES.items()
    for method, at in api_page.methods(owner).items()
    if not isinstance(at, property)
}


def parameters(value: Any) -> set[str]:
    return {*inspect.signature(value).parameters} - {"self"}


def named(parts: dict[str, str], section: str) -> list[str]:
    return [name for names, _ in api_page.entries(parts.get(section, "")) for name in names]


def returns(value: Any) -> bool:
    return inspect.signature(value).return_annotation not in (None, "None")


def is_error_of_one_line(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, errors.TilewiseError) and value is not errors.TilewiseError


def test_public_names_are_these() -> None:
    assert {f"tw.{name}" for name in tw.__all__ if not inspect.ismodule(getattr(tw, name))} <= {*NAMED}
    for module in (tw.kv, tw.nn, tw.quant):
        found = {getattr(module, name) for name in module.__all__ if name != "KINDS"}
        assert found <= {value for value in NAMED.values() if callable(value)}
    assert {"InputError", "FormulaError", "UnsupportedError", "OutOfPagesError", "MissingExtraError"} <= {*NAMED}
    assert len({id(value) for value in NAMED.values()}) == len(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_docstring_has_its_sections(name: str) -> None:
    value, parts = NAMED[name], api_page.PARTS[name]
    summary = parts[""].split("\n\n")[0]
    assert summary.endswith(".")
    assert "\n" not in summary
    if is_error_of_one_line(value):
        return
    assert "Example" in parts
    order = ("", "Args", "Attributes", "Returns", "Raises", "Source", "Example")
    assert [*parts] == [section for section in order if section in parts]
    if inspect.isroutine(value):
        assert ("Returns" in parts) == returns(value)
    if callable(value) and parameters(value) and "Attributes" not in parts:
        assert "Args" in parts
        checks = inspect.isroutine(value) or "__post_init__" in vars(value) or issubclass(value, torch.nn.Module)
        assert "Raises" in parts or not checks
    if "Args" in parts:
        assert sorted(named(parts, "Args")) == sorted(parameters(value))
    elif "Attributes" in parts and dataclasses.is_dataclass(value):
        assert sorted(named(parts, "Attributes")) == sorted(field.name for field in dataclasses.fields(value))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_takes_gives_and_raises(name: str) -> None:
    value = METHODS[name]
    parts = api_page.sections(value)
    text = inspect.getdoc(value) or ""
    if value.__module__ == COMPACT:
        assert all(f"`{parameter}`" in text for parameter in parameters(value))
    else:
        assert sorted(named(parts, "Args")) == sorted(parameters(value))
        assert ("Returns" in parts) == returns(value)
        assert "Raises" in parts or not re.search(r"\braise\b|\bcheck_|_check", inspect.getsource(value))
    assert parts[""].split("\n\n")[0].endswith(".")


@pytest.mark.parametrize("name", CLASSES)
def test_properties_say_what_they_are(name: str) -> None:
    found = api_page.methods(CLASSES[name])
    assert all(inspect.getdoc(at) for at in found.values() if isinstance(at, property))


@pytest.mark.parametrize("name", [name for name, value in NAMED.items() if not is_error_of_one_line(value)])
def test_an_example_runs(name: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 100, 4, 16)
    k, v = torch.randn(2, 2, 100, 2, 16)
    known = {"tw": tw, "torch": torch, "q": q, "k": k, "v": v}
    found = doctest.DocTestParser().get_doctest(api_page.PARTS[name]["Example"], known, name, None, 0)
    assert found.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)


PAGE = readme.ROOT / "docs" / "reference.md"


def test_the_reference_is_todays() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == readme.replaced(text, "names", api_page.page()), "run python -m tools.readme"


def test_each_name_has_one_place_in_the_reference() -> None:
    text = api_page.page()
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(map(api_page.heading, NAMED))
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [*api_page.GROUPS]
    assert len(_anchors(PAGE)) == 1 + len(api_page.GROUPS) + len(NAMED)
    masks = text.partition("## Masks and scores")[2].partition("### ")[0]
    assert all(f"* [`tw.{name}`]" in masks for name in ("causal", "window", "document", "tree", "alibi", "softcap"))


def test_a_docstring_becomes_markdown() -> None:
    text = """Sum x * y, as `tilewise.merge` and `Packed` do.

    Args:
        x, y: (n,), see `mask`; where
            i < j.

    Source: Someone,
    "Some paper".

    Example:
        >>> 1 + 1
        2
    """
    assert [*api_page.body(api_page.sections(text))] == [
        r"Sum x \* y, as [`tilewise.merge`](#twmerge) and [`Packed`](#class-twpacked) do.",
        "**Args**\n\n* `x`, `y`: (n,), see `mask`; where i &lt; j.",
        '**Source:** Someone,\n"Some paper".',
        "```python\n1 + 1\n# 2\n```",
    ]
    assert api_page.signature("f", lambda self, a, *, b=int: None) == "f(a, *, b=int)"
