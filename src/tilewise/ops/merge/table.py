"""Who can merge states: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.attention.table import capability, interpreting
from tilewise.ops.merge.problem import Call


@dataclass(frozen=True)
class Need:
    """One requirement: its wording, and a test that returns what was found instead (None when met)."""

    says: str
    unmet: Callable[[Call], str | None]


@dataclass(frozen=True)
class Row:
    """An implementation: where it lives, what it needs, and what a call that names none must be like to get it."""

    name: str
    module: str
    needs: tuple[Need, ...]
    summary: str
    prefers: tuple[Need, ...] = ()
    forward: str = "forward"
    backward: str = "backward"

    def first_unmet(self, call: Call, unasked: bool = False) -> str | None:
        """None if the row can run the call (and takes it `unasked`), else what fails and what was found."""
        wanted = [("needs", need) for need in self.needs]
        wanted += [("prefers", need) for need in self.prefers if unasked]
        for verb, need in wanted:
            got = need.unmet(call)
            if got is not None:
                return f"{verb} {need.says}; got {got}"
        return None

    def function(self, name: str) -> Callable[..., Any]:
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
    device = call.o[0].device
    if device.type == "cuda":
        sm = capability(device)
        return None if sm >= 80 else f"sm_{sm}"
    return None if interpreting() else device.type


def _wide(call: Call) -> str | None:
    return "torch.float64" if call.dtype == torch.float64 else None


def _not_cpu(call: Call) -> str | None:
    device = call.o[0].device.type
    return None if device == "cpu" else device


_HERE = "tilewise.ops.merge"

ROWS: tuple[Row, ...] = (
    Row("cpu", f"{_HERE}.cpu", (Need("tensors on cpu", _not_cpu),), "sums state by state in PyTorch"),
    Row(
        "triton",
        f"{_HERE}.triton_merge",
        (
            Need("Triton installed", lambda call: _TRITON_MISSING),
            Need("an NVIDIA GPU (sm_80 or newer) or Triton's interpreter", _no_gpu),
            Need("dtype float16, bfloat16, float32", _wide),
        ),
        "one pass over the states, a program for some rows of any heads",
    ),
    Row(
        "reference",
        f"{_HERE}.reference",
        (),
        "float64, row by row: the specification",
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
            "merge", got="no implementation for this call", expected=reasons, hint="impl='reference' runs anything"
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
