"""What `tilewise tune-sparse` and `tune-windows` found for the layers of a model, as a file that the model reads."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.formula.grids import sliding_tile
from tilewise.schedule.selection import Select, Sparge

FORMAT = "tilewise selections 1"
_MADE = "tilewise tune-sparse layer0.pt --out selections.json"
_WROTE = "what tune-sparse or tune-windows wrote"


def load_selections(
    path: str | PathLike[str], *, device: torch.device | str | None = None
) -> dict[str, dict[str, Any]]:
    """Read what `tilewise tune-sparse` or `tilewise tune-windows` found for each layer of a model.

    Args:
        path: a file that one of these commands wrote.
        device: of the masks' windows, which differ between heads; None is PyTorch's default.

    Returns:
        A dict from a layer's name to keyword arguments of `attention`: `select`, a `Select` with thresholds for each
        head, or `mask`, a `sliding_tile` with a window for each head, whose tokens lie in the order that the file says.

    Raises:
        InputError: there is no such file, it holds something else, or there is no such device.

    Example:
        >>> import json, pathlib, tempfile

        >>> found = {"tau": 0.9, "theta": 0.5, "lam": None, "block": 64, "far": "drop"}
        >>> path = pathlib.Path(tempfile.mkdtemp(), "selections.json")
        >>> layers = {"format": "tilewise selections 1", "layers": [{"name": "layer0", "select": found}]}
        >>> _ = path.write_text(json.dumps(layers))
        >>> o = tw.attention(q, k, v, **tw.load_selections(path)["layer0"])
    """
    try:
        device = None if device is None else torch.device(device)
    except (TypeError, RuntimeError) as error:
        hint = "where the model runs, such as 'cuda'"
        raise InputError("device", got=shown(device), expected="a torch.device or its name", hint=hint) from error
    found: dict[str, dict[str, Any]] = {}
    for number, layer in enumerate(read(path)["layers"]):
        try:
            found[layer["name"]] = _arguments(layer, device)
        except (InputError, KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
            name, got = f"{path}, layer {number}", f"{type(error).__name__}: {error}"
            raise InputError(name, got=got, expected=_WROTE, hint=_MADE) from error
    return found


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The document that such a file holds; raises InputError for any other."""
    name = str(path)
    try:
        if not Path(path).is_file():
            raise InputError(name, got="no such file", expected=_WROTE, hint=_MADE)
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (TypeError, OSError, RecursionError) as error:  # no path, no right to read, lists in lists without end
        raise InputError(name, got=f"{type(error).__name__}: {error}", expected=_WROTE, hint=_MADE) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(name, got=str(error), expected=_WROTE, hint=_MADE) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        got = f"format {shown(found.get('format'))}" if isinstance(found, dict) else type(found).__name__
        raise InputError(name, got=got, expected=f"format {FORMAT!r}", hint=_MADE)
    layers = found.get("layers")
    names = [x.get("name") if isinstance(x, dict) else None for x in layers] if isinstance(layers, list) else [None]
    if not all(isinstance(x, str) for x in names) or len(set(names)) < len(names):
        expected = "layers, a list of objects that have a name each, and no name twice"
        raise InputError(name, got=shown(layers), expected=expected, hint=_MADE)
    return found


def _arguments(layer: dict[str, Any], device: torch.device | str | None) -> dict[str, Any]:
    if "select" in layer:
        given = layer["select"]
        part = Sparge(given["tau"], given["theta"], given["lam"])
        return {"select": Select(part, block=given["block"], far=given["far"])}
    given = layer["mask"]
    if not isinstance(given["windows"], list):
        raise TypeError("windows are a list, of one for each head")
    windows = [tuple(window) for window in given["windows"]]
    more = {name: given[name] for name in ("order", "text", "text_first")}
    return {"mask": sliding_tile(given["extents"], given["tile"], windows, device=device, **more)}
