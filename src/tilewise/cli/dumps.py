"""Queries, keys and values that users have saved, one layer a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tilewise.core.errors import InputError, MissingExtraError

SAVED = 'torch.save({"q": q, "k": k, "v": v}, "layer.pt")'


def load(path: Path, heads_first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v (batch, seqlen, heads, dim) of a .pt, .pth or .safetensors file, on a CPU.

    The file holds a dict with the tensors q, k and v, or a tuple or list of these three, (batch, seqlen, heads, dim)
    or, where `heads_first`, (batch, heads, seqlen, dim). Nothing in it is run.

    Raises:
        InputError: there is no such file, it is no such dump, or a tensor has another rank.
        MissingExtraError: a .safetensors file without the package safetensors.
    """
    name = str(path)
    if not path.is_file():
        raise InputError(name, got="no such file", expected="a file with q, k and v", hint=SAVED)
    if path.suffix not in (".pt", ".pth", ".safetensors"):
        raise InputError(name, got=repr(path.suffix), expected="a name ending in .pt, .pth or .safetensors", hint=SAVED)
    try:
        held = _safetensors(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except MissingExtraError:
        raise
    except Exception as error:  # whatever a broken file makes of its reader
        got = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        raise InputError(name, got=got, expected="a file of tensors alone", hint=SAVED) from error
    if isinstance(held, dict):
        missing = [key for key in "qkv" if key not in held]
        if missing:
            got = f"a dict of {', '.join(map(repr, list(held)[:8])) or 'nothing'}"
            raise InputError(name, got=got, expected="the keys q, k and v", hint=SAVED)
        held = [held[key] for key in "qkv"]
    if not isinstance(held, (tuple, list)) or len(held) != 3:
        got = f"{len(held)} things" if isinstance(held, (tuple, list)) else type(held).__name__
        raise InputError(name, got=got, expected="a dict or a tuple of q, k and v", hint=SAVED)
    for key, x in zip("qkv", held, strict=True):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            got = f"{key} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{key}, {type(x).__name__}"
            shape = "(batch, heads, seqlen, dim)" if heads_first else "(batch, seqlen, heads, dim)"
            raise InputError(name, got=got, expected=f"tensors {shape}", hint="x[None] adds a batch of one")
    q, k, v = (x.detach().transpose(1, 2) if heads_first else x.detach() for x in held)
    return q, k, v


def _safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtraError(
            str(path), got="no package safetensors", expected="it, to read this file", hint="pip install safetensors"
        ) from error
    return load_file(path)
