"""The library's exceptions: each says what was named, what came, what was expected, and how to mend it."""

from __future__ import annotations

from typing import Any


class TilewiseError(Exception):
    """Root of every exception raised by tilewise.

    Args:
        name: what is wrong, in the caller's words (an argument, a formula, an implementation).
        got: the offending value, described.
        expected: what would have been accepted.
        hint: the next step for the caller; optional.
    """

    def __init__(self, name: str, *, got: Any, expected: str, hint: str = "") -> None:
        self.name = name
        self.got = got
        self.expected = expected
        self.hint = hint
        super().__init__(f"{name}: got {got}; expected {expected}" + (f". Hint: {hint}" if hint else ""))


class InputError(TilewiseError, ValueError):
    """An argument has the wrong rank, shape, dtype, device or value."""


class FormulaError(TilewiseError, TypeError, ValueError):
    """A mask or score function cannot be traced into a formula."""


class UnsupportedError(TilewiseError, NotImplementedError):
    """The requested implementation cannot run this problem."""


class MissingExtraError(TilewiseError, ImportError):
    """An optional package is needed; the hint names the extra that installs it."""
