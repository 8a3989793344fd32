"""Checks of counts, indices and lists that the KV cache is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tilewise.core.errors import InputError, shown

T = TypeVar("T")


def check_count(name: str, value: int, least: int) -> None:
    """Raise InputError unless it is an integer, and no boolean, of at least so many."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        hint = "give a count; a tensor's are tensor.tolist()"
        raise InputError(name, got=described(value), expected=f"an integer, at least {least}", hint=hint)


def check_index(name: str, value: int, end: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise InputError(name, got=described(value), expected=f"an integer from 0 to {end - 1}", hint=hint)


def described(value: object) -> str:
    return shown(value) if isinstance(value, (int, float, str)) else type(value).__name__


def listed(name: str, values: Iterable[T], what: str) -> list[T]:
    """The values as a list; raises InputError for what cannot be gone through."""
    try:
        if isinstance(values, dict):
            raise TypeError
        return list(values)
    except TypeError:
        raise InputError(
            name, got=type(values).__name__, expected=f"a list of {what}", hint="pass a single one as [x]"
        ) from None
