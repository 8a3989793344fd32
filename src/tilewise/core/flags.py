"""One check of arguments that are True or False. Anything but a boolean is refused: "no" is true in Python."""

from __future__ import annotations

from typing import Any

from tilewise.core.errors import InputError, shown

_BOOLEANS = ("numpy.bool", "numpy.bool_", "torch.SymBool")  # known by name: neither package is imported here


def check_flags(**flags: Any) -> None:
    """Raise InputError unless each is a boolean: Python's, NumPy's or a symbolic one of torch.compile.

    Args:
        flags: by the names of the caller's arguments.

    Raises:
        InputError: a value of another type, integers and None included.

    Example:
        check_flags(causal=causal, deterministic=deterministic)
    """
    for name, value in flags.items():
        if not isinstance(value, bool):  # all that a usual call takes
            _check_other(name, value)


def _check_other(name: str, value: Any) -> None:
    kind = type(value)
    if f"{kind.__module__}.{kind.__name__}" not in _BOOLEANS:
        hint = 'text such as "no" counts as true in Python, and so do most objects; bool(x) makes a number a boolean'
        raise InputError(name, got=shown(value), expected="True or False", hint=hint)
