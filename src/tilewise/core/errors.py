"""The library's exceptions: each says what was named, what came, what was expected, and how to mend it."""

from __future__ import annotations

import reprlib
import sys
from typing import Any

MOST_DIGITS = 10**100  # Python itself writes no integer of some thousand digits


def _cut(text: str, most: int) -> str:
    """Text of at most so many characters: a message with all four parts is shorter than 4 kB, whatever came."""
    return text if len(text) <= most else text[: most - 3] + "..."


class TilewiseError(Exception):
    """Base class of every error of tilewise. The message cuts long parts short; the attributes hold all of them.

    Args:
        name: what is wrong, in the caller's words (an argument, a formula, an implementation).
        got: the offending value, described.
        expected: what would have been accepted.
        hint: the next step for the caller.

    Example:
        >>> from tilewise.errors import TilewiseError

        >>> try:
        ...     tw.window(0)
        ... except TilewiseError as error:
        ...     print(f"{error.name} is {error.got}")
        window left is 0
    """

    def __init__(self, name: str, *, got: Any, expected: str, hint: str) -> None:
        # not by super().__init__, which torch.compile cannot trace: the message would be lost
        said = f"{_cut(f'{name}', 600)}: got {_cut(f'{got}', 1000)}; expected {_cut(expected, 1800)}."
        self.args = (f"{said} Hint: {_cut(hint, 500)}",)
        self.name = name
        self.got = got
        self.expected = expected
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """As another process gets it: what was got as the message has it, which any value becomes."""
        return _again, (type(self), self.name, str(self.got), self.expected, self.hint)


def _again(kind: type[TilewiseError], name: str, got: str, expected: str, hint: str) -> TilewiseError:
    return kind(name, got=got, expected=expected, hint=hint)


class InputError(TilewiseError, ValueError):
    """An argument has the wrong type, rank, shape, dtype, device or value. Also a ValueError."""


class FormulaError(TilewiseError, TypeError, ValueError):
    """A mask or score cannot be traced, or an index in it could leave its tensor. Also a TypeError and a ValueError."""


class UnsupportedError(TilewiseError, NotImplementedError):
    """The named implementation, or every one, or an adapter cannot do what was asked. Also a NotImplementedError."""


class OutOfPagesError(TilewiseError, MemoryError):
    """A KV cache has too few free pages; nothing has changed. Also a MemoryError."""


class MissingExtraError(TilewiseError, ImportError):
    """An optional package is missing; the hint names the extra that installs it. Also an ImportError."""

    name: str  # ImportError has one that may be None


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return shown(x)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: Any) -> str:
    """`repr(value)` for messages, of which containers, long text and large integers are cut short: an argument may hold
    more than can be written at all.
    """
    if isinstance(value, int):
        return repr(value) if -MOST_DIGITS < value < MOST_DIGITS else f"an integer of {value.bit_length()} bits"
    try:
        return _SHORT.repr(value) if isinstance(value, (str, bytes, list, tuple, dict, set, frozenset)) else repr(value)
    except Exception:  # of somebody's __repr__: the message is about the argument
        return f"a {type(value).__name__}"


def caller_line() -> str:
    """The user's line, for messages: the nearest frame outside this package and PyTorch."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("tilewise.", "torch.")) or module.startswith("tilewise.testing"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"
