"""Who can write into pages: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.attention.table import capability, interpreting
from tilewise.ops.kv_write.problem import Call


@dataclass(frozen=True)
class Need:
    """One requirement: its wording, and a test that returns what was found instead (None when met)."""

    says: str
    unmet: Callable[[Call], str | None]


@dataclass(frozen=True)
class Row:
    """An implementation: where its functions `write` and `copy` live, what it needs, and what a call that names none
    must be like to get it.
    """

    name: str
    module: str
    needs: tuple[Need, ...]
    summary: str
    prefers: tuple[Need, ...] = ()
    backward: None = None

    def first_unmet(self, call: Call, unasked: bool = False) -> str | None:
        """None if the row can run the call (and takes it `unasked`), else what fails and what was found."""
        wanted = [("needs", need) for need in self.needs]
        wanted += [("prefers", need) for need in self.prefers if unasked]
        found = ((verb, need, need.unmet(call)) for verb, need in wanted)
        return next((f"{verb} {need.says}; got {got}" for verb, need, got in found if got is not None), None)

    def function(self, name: str) -> Callable[..., None]:
        return _function(self.module, name)


@functools.lru_cache(maxsize=16)
def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _find_triton() -> str | None:
    try:
        return None if importlib.util.find_spec("triton") else "no package named triton"
    except (ImportError, ValueError) as error:
        return str(error)


_TRITON_MISSING = _find_triton()  # once, and without importing it


def _no_gpu(call: Call) -> str | None:
    device = call.k_pages.device
    if device.type == "cuda":
        sm = capability(device)
        return None if sm >= 80 else f"sm_{sm}"
    return None if interpreting() else device.type


def _large_page(call: Call) -> str | None:
    elements = max(pages.shape[1:].numel() for pages in (call.k_pages, call.v_pages))
    return None if elements < 2**31 - 2**11 else str(elements)


def _not_cpu(call: Call) -> str | None:
    device = call.k_pages.device.type
    return None if device == "cpu" else device


_HERE = "tilewise.ops.kv_write"

ROWS: tuple[Row, ...] = (
    Row("cpu", f"{_HERE}.cpu", (Need("tensors on cpu", _not_cpu),), "indexed assignment in PyTorch"),
    Row(
        "triton",
        f"{_HERE}.triton_kv_write",
        (
            Need("Triton installed", lambda call: _TRITON_MISSING),
            Need("an NVIDIA GPU (sm_80 or newer) or Triton's interpreter", _no_gpu),
            Need("pages of fewer than 2**31 - 2**11 elements", _large_page),
        ),
        "one launch for keys and values, a program for some columns of some tokens",
    ),
    Row(
        "reference",
        f"{_HERE}.reference",
        (),
        "one token after another: the specification",
        prefers=(Need("to be named", lambda call: "no name"),),
    ),
)


def choose(call: Call, impl: str | None) -> Row:
    """The row that runs a call: the named one, or the first that can; raises InputError or UnsupportedError."""
    if impl is None:
        for row in ROWS:
            if row.first_unmet(call, unasked=True) is None:
                return row
        reasons = "; ".join(f"{row.name} {row.first_unmet(call, unasked=True)}" for row in ROWS)
        raise UnsupportedError(
            "kv_write", got="no implementation for this call", expected=reasons, hint="impl='reference' runs anything"
        )
    for row in ROWS:
        if row.name == impl:
            unmet = row.first_unmet(call)
            if unmet is None:
                return row
            raise UnsupportedError(
                f"impl={impl!r}", got="this call", expected=f"what it can run: it {unmet}", hint="leave impl out"
            )
    names = ", ".join(row.name for row in ROWS)
    raise InputError("impl", got=repr(impl), expected=f"None or one of {names}", hint="None takes the first that can")
