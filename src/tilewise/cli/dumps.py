"""Queries, keys and values that users have saved, one layer per file, and those of the demo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilewise.cli.expression import read_mask
from tilewise.core.errors import InputError, MissingExtraError
from tilewise.core.optional import importing
from tilewise.formula import library
from tilewise.formula.formula import Mask

SAVED = 'torch.save({"q": q, "k": k, "v": v}, "layer.pt")'
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layout(str, Enum):
    """Which dimension of a dump is which."""

    bshd = "bshd"
    bhsd = "bhsd"


Files = Annotated[
    list[Path] | None,
    typer.Argument(help="A .pt or .safetensors file per layer: a dict or a tuple of q, k and v."),
]
Demo = Annotated[
    bool, typer.Option("--demo", help="Two synthetic layers, one of topics and one with outliers; no files.")
]
LayoutOf = Annotated[
    Layout, typer.Option("--layout", help="Of the tensors: (batch, seqlen, heads, dim), or heads before seqlen.")
]


@dataclass(frozen=True)
class Layer:
    """A layer's q, k and v, which `load` brings to the device; `path` is None for the demo's layers."""

    name: str
    path: Path | None
    load: Callable[[], Tensors]


def layers(
    command: str, files: list[Path] | None, demo: bool, layout: Layout, where: torch.device, *, seqlen: int = 1024
) -> list[Layer]:
    """The layers that `command` was given, or those of the demo, with `seqlen` tokens.

    Raises:
        InputError: files and --demo, or neither.
    """
    if demo == bool(files):
        hint = f"tilewise {command} layer0.pt layer1.pt, or tilewise {command} --demo"
        raise InputError("FILES", got=f"{len(files or [])} files", expected="files, or --demo without any", hint=hint)
    if not demo:
        return [Layer(str(path), path, functools.partial(_load_to, path, layout, where)) for path in files or []]
    from tilewise.demo import structured

    made = structured.layers(where, seqlen=seqlen)
    return [Layer(f"demo: {name}", None, functools.partial(_as_it_is, tensors)) for name, tensors in made.items()]


def mask_of(causal: bool, mask: str | None, demo: bool, where: torch.device) -> Mask | None:
    """The mask of the attention that is tuned; raises InputError for options that contradict each other."""
    if causal and mask is not None:
        hint = f'--mask "causal & ({mask})"'
        raise InputError("--mask", got="--causal and --mask", expected="one of them", hint=hint)
    if demo and (causal or mask is not None):
        raise InputError("--demo", got="a mask", expected="none: the demo's layers are causal", hint="leave it out")
    return library.causal if causal or demo else read_mask(mask, where)


def _as_it_is(tensors: Tensors) -> Tensors:
    return tensors


def _load_to(path: Path, layout: Layout, where: torch.device) -> Tensors:
    q, k, v = load(path, layout is Layout.bhsd)
    return q.to(where), k.to(where), v.to(where)


def load(path: Path, heads_first: bool) -> Tensors:
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
        if not x.numel():
            expected = "at least one token, head and dimension"
            raise InputError(name, got=f"{key} of shape {tuple(x.shape)}", expected=expected, hint=SAVED)
    q, k, v = (x.detach().transpose(1, 2) if heads_first else x.detach() for x in held)
    return q, k, v


def _safetensors(path: Path) -> Any:
    with importing("safetensors>=0.4", "engine", name=str(path)):
        from safetensors.torch import load_file
    return load_file(path)
