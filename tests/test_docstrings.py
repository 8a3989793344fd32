"""Docstrings of all public names, of what adapters export and of what the docs use of `tilewise.explain`: sections that
a reader looks for, each parameter named, examples that run.
"""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewise as tw
import tilewise.adapters
from tests.test_docs import FILES, _anchors
from tilewise.core import errors
from tools import api_page, readme

NAMED = api_page.PUBLIC
SHARED = ("tilewise.adapters.kv_cache",)  # by adapters alone


def imported() -> Iterator[tuple[str, str]]:
    """Modules of `tilewise.explain` and the names that the docs take from them."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (tilewise\.explain[\w.]*) import (.*)$", text, re.MULTILINE):
            for name in re.findall(r"\w+", names):
                inner = f"{module}.{name}"
                if inspect.ismodule(getattr(importlib.import_module(module), name)):
                    yield from ((inner, used) for used in re.findall(rf"\b{name}\.(\w+)\(", text))
                else:
                    yield module, name


def exported() -> dict[str, Any]:
    """Functions and classes beside the public ones that users import, each by its first name."""
    modules = [found.name for found in pkgutil.iter_modules(tilewise.adapters.__path__, "tilewise.adapters.")]
    modules = [name for name in modules if hasattr(importlib.import_module(name), "__all__")]
    places = [(module, name) for module in modules if module not in SHARED for name in sys.modules[module].__all__]
    places += [("tilewise.explain.draw", name) for name in importlib.import_module("tilewise.explain.draw").__all__]
    values: dict[int, tuple[str, Any]] = {}
    for module, name in (*places, *sorted({*imported()})):
        value = getattr(importlib.import_module(module), name)
        own = getattr(value, "__module__", "").startswith("tilewise.")
        if own and (inspect.isclass(value) or inspect.isroutine(value)):
            values.setdefault(id(value), (f"{module.removeprefix('tilewise.')}.{name}", value))
    return dict(values.values())


EXPORTED = exported()
PARTS = {**api_page.PARTS, **{name: api_page.sections(value) for name, value in EXPORTED.items()}}
CLASSES = {name: value for name, value in {**NAMED, **EXPORTED}.items() if inspect.isclass(value)}
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


def raises(value: Any) -> bool:
    """Whether its source (of a class: of making one) raises something, as far as that can be seen."""
    name = "__post_init__" if dataclasses.is_dataclass(value) else "__init__"
    made = [vars(value)[name]] if name in vars(value) else []
    sources = map(inspect.getsource, made if inspect.isclass(value) else [value])
    return any(re.search(r"\braise\b|\bcheck_|_check|\b_?attend\(|\b_attention\(", source) for source in sources)


def is_error_of_one_line(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, errors.TilewiseError) and value is not errors.TilewiseError


def test_names_beside_the_public_ones_are_found() -> None:
    names = ("adapters.flex.flex_attention", "adapters.flashinfer.BatchAttention", "adapters.transformers.fuse")
    assert {*names, "explain.draw.tiles", "explain.roofline.estimate", "explain.traffic.compare"} <= {*EXPORTED}
    assert not set(EXPORTED.values()) & {value for value in NAMED.values() if callable(value)}


def test_public_names_are_these() -> None:
    assert {f"tw.{name}" for name in tw.__all__ if not inspect.ismodule(getattr(tw, name))} <= {*NAMED}
    for module in (tw.kv, tw.nn, tw.quant):
        found = {getattr(module, name) for name in module.__all__ if name != "KINDS"}
        assert found <= {value for value in NAMED.values() if callable(value)}
    assert {"InputError", "FormulaError", "UnsupportedError", "OutOfPagesError", "MissingExtraError"} <= {*NAMED}
    assert len({id(value) for value in NAMED.values()}) == len(NAMED)


@pytest.mark.parametrize("name", [*NAMED, *EXPORTED])
def test_a_docstring_has_its_sections(name: str) -> None:
    value, parts = {**NAMED, **EXPORTED}[name], PARTS[name]
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
        assert "Raises" in parts or not (raises(value) if name in EXPORTED else checks)
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
        assert "Raises" in parts or not raises(value)
    assert parts[""].split("\n\n")[0].endswith(".")


@pytest.mark.parametrize("name", CLASSES)
def test_properties_say_what_they_are(name: str) -> None:
    found = api_page.methods(CLASSES[name])
    assert all(inspect.getdoc(at) for at in found.values() if isinstance(at, property))


@pytest.mark.parametrize("name", [*EXPORTED, *(x for x, value in NAMED.items() if not is_error_of_one_line(value))])
def test_an_example_runs(name: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 100, 4, 16)
    k, v = torch.randn(2, 2, 100, 2, 16)
    known = {"tw": tw, "torch": torch, "q": q, "k": k, "v": v}
    found = doctest.DocTestParser().get_doctest(PARTS[name]["Example"], known, name, None, 0)
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
