"""What `tilewise tune-sparse` and `tune-windows` found for the layers of a model, as a file that the model reads."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.formula.grids import sliding_tile
from tilewise.schedule.selection import Select, Sparge

FORMAT = "tilewise selections 1"
_MADE = "tilewise tune-sparse layer0.pt --out selections.json"
_WROTE = "what tune-sparse or tune-windows wrote"


def load_selections(
    path: str | PathLike[str], *, device: torch.device | str | None = None
) -> dict[str, dict[str, Any]]:
    """What each layer gives `attention` beside q, k and v.

    Args:
        path: a file that `tilewise tune-sparse` or `tilewise tune-windows` wrote.
        device: where masks keep the windows of their heads.

    Returns:
        By the name of a layer keyword arguments: `select`, a `Select` with thresholds for each head, or `mask`, a
        `sliding_tile` with a window for each head; its tokens lie in the order that the file says.

    Raises:
        InputError: it is no such file.
    """
    return {layer["name"]: _arguments(layer, device) for layer in read(path)["layers"]}


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The document that such a file holds; raises InputError for any other."""
    name = str(path)
    if not Path(path).is_file():
        raise InputError(name, got="no such file", expected=_WROTE, hint=_MADE)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(name, got=str(error), expected=_WROTE, hint=_MADE) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        got = f"format {found.get('format')!r}" if isinstance(found, dict) else type(found).__name__
        raise InputError(name, got=got, expected=f"format {FORMAT!r}", hint=_MADE)
    return found


def _arguments(layer: dict[str, Any], device: torch.device | str | None) -> dict[str, Any]:
    if "select" in layer:
        given = layer["select"]
        part = Sparge(given["tau"], given["theta"], given["lam"])
        return {"select": Select(part, block=given["block"], far=given["far"])}
    given = layer["mask"]
    windows = [tuple(window) for window in given["windows"]]
    more = {name: given[name] for name in ("order", "text", "text_first")}
    return {"mask": sliding_tile(given["extents"], given["tile"], windows, device=device, **more)}
