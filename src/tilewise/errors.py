"""The exceptions that tilewise raises: all are `TilewiseError`, and one of Python's own kinds as well."""

from tilewise.core.errors import (
    FormulaError,
    InputError,
    MissingExtraError,
    OutOfPagesError,
    TilewiseError,
    UnsupportedError,
)

__all__ = [
    "FormulaError",
    "InputError",
    "MissingExtraError",
    "OutOfPagesError",
    "TilewiseError",
    "UnsupportedError",
]
