"""Packages that an extra of tilewise installs: what is raised where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilewise.core.errors import MissingExtraError


@contextmanager
def importing(package: str, extra: str, *, name: str | None = None) -> Iterator[None]:
    """A `with` block of imports; an ImportError in it becomes the MissingExtraError that says what to install.

    Args:
        package: what is imported, as pyproject.toml requires it: "jinja2", or "transformers>=5.4".
        extra: the extra that installs it: tilewise[extra].
        name: what needs the package, for the message; None is the package.

    Raises:
        MissingExtraError: an import in the block failed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            name or package, got=str(error), expected=package, hint=f"pip install 'tilewise[{extra}]'"
        ) from error
