"""What commands print: tables (boxes on a terminal, aligned columns elsewhere), JSON, errors; and their exit codes."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from tilewise.core.errors import InputError, TilewiseError

P = ParamSpec("P")
R = TypeVar("R")

FAILED, USAGE = 1, 2


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr as they are now; no colour and no boxes where they are not terminals."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print lines as they are."""
    console().print(text)


def machine(device: torch.device) -> str:
    """The device's name: of the GPU, or cpu with PyTorch's number of threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def as_text(data: Any) -> str:
    """Data as a JSON document; NaN and infinities become null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False)


def say_json(data: Any) -> None:
    """Print one JSON document; NaN and infinities become null."""
    print(as_text(data))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table: the first `left` columns aligned to the left, the others to the right."""
    out = console()
    if out.is_terminal:
        box = Table(title=title, title_justify="left", title_style="bold")
        for n, name in enumerate(columns):
            box.add_column(name, justify="left" if n < left else "right", overflow="fold")
        for row in rows:
            box.add_row(*row)
        Console(highlight=False, markup=False).print(box)
        return
    widths = [max(len(row[n]) for row in (columns, *rows)) for n in range(len(columns))]
    out.print(title)
    for row in (columns, *rows):
        cells = (
            cell.ljust(w) if n < left else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        out.print("  ".join(cells).rstrip())


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values."""
    table(title, ("", ""), rows, left=2) if console().is_terminal else _plain_pairs(title, rows)


def _plain_pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    say("\n".join([title, *(f"{name:<{width}}  {value}" for name, value in rows)]))


def check_writable(name: str, folder: Path, *, make: bool = False) -> None:
    """Raise InputError unless a file can be written into `folder`, which is made if `make` and it is not there: before
    the work whose result will be written.
    """
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        expected = f"a folder that {'is there or can be made, and' if make else 'is there and'} can be written to"
        raise InputError(name, got=f"{folder} ({error.strerror})", expected=expected, hint="name another") from error


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """A command whose library errors become one line on stderr and exit code 2."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TilewiseError as error:
            console(stderr=True).print(f"tilewise: {error}")
            raise typer.Exit(USAGE) from error

    return command
