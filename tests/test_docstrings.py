"""Docstrings of masks and scores by name: sections that a reader looks for, and examples that run."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import tilewise as tw
from tilewise.formula import library, scores

NAMED = {
    name: value
    for module in (library, scores)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
}


def test_public_names_are_these() -> None:
    assert {*NAMED} <= {*tw.__all__}
    assert len(NAMED) >= 16


@pytest.mark.parametrize("name", NAMED)
def test_a_docstring_has_its_sections(name: str) -> None:
    text = inspect.getdoc(NAMED[name]) or ""
    sections = ["Returns:", "Example:"]
    if inspect.signature(NAMED[name]).parameters:
        sections += ["Args:", "Raises:"]
    assert [section for section in sections if section not in text] == []
    for parameter in inspect.signature(NAMED[name]).parameters:
        assert parameter in text


@pytest.mark.parametrize("name", NAMED)
def test_an_example_runs(name: str) -> None:
    q = torch.randn(2, 100, 4, 16)
    k, v = (torch.randn(2, 100, 2, 16) for _ in range(2))
    known = {"tw": tw, "torch": torch, "q": q, "k": k, "v": v}
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(NAMED[name]) or "", known, name, None, 0)
    assert found.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)
