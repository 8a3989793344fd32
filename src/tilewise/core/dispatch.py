"""Who runs a call: rows of implementations with what each needs, and the choice among them. Order is preference."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tilewise.core.errors import InputError, UnsupportedError, shown

C = TypeVar("C", contravariant=True)  # the call of an operation
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Need(Generic[C]):
    """One requirement: its wording, and a test that returns what was found instead (None when met)."""

    says: str
    unmet: Callable[[C], str | None]


@dataclass(frozen=True)
class Row(Generic[C]):
    """An implementation: where its functions live, what it needs, and what a call that names none must be like to get
    it.
    """

    name: str
    module: str
    needs: tuple[Need[C], ...]
    summary: str
    prefers: tuple[Need[C], ...] = ()
    forward: str = "forward"
    backward: str | None = None
    plan: str | None = None  # what several calls share, where that is worth making once

    def first_unmet(self, call: C) -> str | None:
        """None if this row can run the call, else the first need that fails and what was found."""
        return _first(self.needs, call, "needs")

    def unmet(self, call: C) -> list[str]:
        """Every need that fails, each with what was found: "no dropout (got 0.1)"; empty if the row can run it."""
        found = [(need.says, need.unmet(call)) for need in self.needs]
        return [f"{says} (got {got})" for says, got in found if got is not None]

    def deferred(self, call: C) -> str | None:
        """None if the row takes such calls unasked, else the first preference that fails and what was found."""
        return _first(self.prefers, call, "default only for")

    def function(self, name: str) -> Callable[..., Any]:
        return _function(self.module, name)


def _first(needs: tuple[Need[C], ...], call: C, verb: str) -> str | None:
    for need in needs:
        got = need.unmet(call)
        if got is not None:
            return f"{verb} {need.says}; got {got}"
    return None


@functools.lru_cache(maxsize=64)
def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def named(rows: Sequence[Row[C]], impl: str) -> Row[C]:
    """The row of this name; raises InputError."""
    row = next((row for row in rows if row.name == impl), None)
    if row is None:
        names = ", ".join(row.name for row in rows)
        raise InputError(
            "impl",
            got=shown(impl),
            expected=f"None or one of {names}",
            hint="None takes the first that can run it",
        )
    return row


def choose(rows: Sequence[Row[C]], operation: str, call: C, impl: str | None, more: str = "") -> Row[C]:
    """The row that runs a call: the named one, or the first that can and takes it unasked.

    Raises InputError for a name that no row has, and UnsupportedError where a need fails: its hint names a row that can
    run this very call, where there is one, and ends with `more`.
    """
    if impl is not None:
        row = named(rows, impl)
        if row.first_unmet(call) is not None:
            raise UnsupportedError(
                f"impl={impl!r}",
                got=f"a call of {operation} that it cannot run",
                expected=", ".join(row.unmet(call)),
                hint=_able(rows, call) + more,
            )
        return row
    for row in rows:
        if row.first_unmet(call) is None and row.deferred(call) is None:
            return row
    raise UnsupportedError(
        operation,
        got="a call that no implementation takes",
        expected="; or ".join(f"for {row.name}: {', '.join(unmet)}" for row, unmet in _nearest(rows, call)),
        hint=_able(rows, call) + more,
    )


def _able(rows: Sequence[Row[C]], call: C) -> str:
    """The hint: an implementation that can run this very call, or that there is none."""
    able = [row for row in rows if row.first_unmet(call) is None]
    if not able:
        return "change the call; no implementation can run it as it is"
    first = next((row for row in able if row.deferred(call) is None), able[0])
    return f"impl={first.name!r} can run this call"


def _nearest(rows: Sequence[Row[C]], call: C) -> list[tuple[Row[C], list[str]]]:
    """The two rows with the fewest unmet needs, not the same ones, and these needs; a row that can run the call but has
    to be named is left to the hint.
    """
    lacking = [(row, row.unmet(call)) for row in rows if row.first_unmet(call) is not None]
    found: list[tuple[Row[C], list[str]]] = []
    for row, unmet in sorted(lacking, key=lambda one: len(one[1])):
        if len(found) < 2 and unmet not in [other for _, other in found]:
            found.append((row, unmet))
    return found


# the machine ---------------------------------------------------------------------------------------------------------


def untraced(function: F) -> F:
    """Mark what torch.compile calls and takes as a constant, as torch.compiler.assume_constant_result does; calling
    that would import Dynamo, and with it Triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device: 80, 90, 100, ...; 80 stands for the interpreter."""
    return 80 if device.type != "cuda" else _capability(device.index or 0)


_CAPABILITIES: dict[int, int] = {}


@untraced
def _capability(index: int) -> int:
    if index not in _CAPABILITIES:
        major, minor = torch.cuda.get_device_capability(index)
        _CAPABILITIES[index] = 10 * major + minor
    return _CAPABILITIES[index]


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter (TRITON_INTERPRET=1), where CPU tensors are fine."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _find_triton() -> str | None:
    try:
        return None if importlib.util.find_spec("triton") else "no package named triton"
    except (ImportError, ValueError) as error:
        return str(error)


# needs of several operations -----------------------------------------------------------------------------------------

# looked up without importing it, and once: torch.compile traces through the choice of a row
_TRITON_MISSING = _find_triton()
TRITON: Need[object] = Need("Triton installed", lambda call: _TRITON_MISSING)
NAMED: Need[object] = Need("calls that name it", lambda call: "no name")


def on(kind: str, device_of: Callable[[C], torch.device]) -> Need[C]:
    """Tensors on this kind of device."""

    def unmet(call: C) -> str | None:
        found = device_of(call).type
        return None if found == kind or (found == "meta" and kind == "cpu") else found  # on meta nothing is run

    return Need(f"tensors on {kind}", unmet)


def gpu(device_of: Callable[[C], torch.device]) -> Need[C]:
    """Where portable Triton kernels run."""

    def unmet(call: C) -> str | None:
        device = device_of(call)
        if device.type == "cuda":
            sm = capability(device)
            return None if sm >= 80 else f"sm_{sm}"
        return None if interpreting() else device.type

    return Need("an NVIDIA GPU (sm_80 or newer) or Triton's interpreter", unmet)


def dtypes(dtype_of: Callable[[C], torch.dtype], *allowed: torch.dtype) -> Need[C]:
    """One of these dtypes."""

    def unmet(call: C) -> str | None:
        found = dtype_of(call)
        return None if found in allowed else str(found)

    return Need("dtype " + ", ".join(str(d).removeprefix("torch.") for d in allowed), unmet)
