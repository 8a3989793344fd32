"""Weights from safetensors files, one tensor at a time: each parameter is filled exactly once, or nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilewise.core.errors import InputError
from tilewise.core.optional import importing

if TYPE_CHECKING:
    from tilewise.engine.models.decoder import Decoder

_INDEX = "model.safetensors.index.json"
_COMPUTED = "rotary_emb.inv_freq"  # older files have these; they follow from the config


def load_weights(decoder: Decoder, folder: str | Path) -> None:
    """Fill a decoder's weights from the `*.safetensors` files of a checkpoint's folder.

    Raises:
        InputError: a parameter that no file has, one that two have, a tensor that is no parameter, another shape, or a
            file that cannot be read; the message names the file, the tensor, and what was expected.
    """
    wanted = decoder.named()
    filled: dict[str, str] = {}
    for file, name, tensor in tensors_of(Path(folder)):
        if name.endswith(_COMPUTED) or (decoder.config.tied and name == "lm_head.weight"):
            continue
        place = wanted.get(name)
        if place is None:
            hint = "config.json and the weights are of different models"
            raise InputError(f"{file} {name}", got="a tensor", expected="no tensor of this name", hint=hint)
        if name in filled:
            raise InputError(f"{file} {name}", got=f"it, as {filled[name]}", expected="one file", hint="remove one")
        if tensor.shape != place.shape or not tensor.is_floating_point():
            got, expected = f"{tensor.dtype} {tuple(tensor.shape)}", f"floating point {tuple(place.shape)}"
            raise InputError(f"{file} {name}", got=got, expected=expected, hint="config.json gives the sizes")
        place.copy_(tensor)
        filled[name] = file
    missing = [name for name in wanted if name not in filled]
    if missing:
        got = f"no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        hint = "a file of the checkpoint may be missing"
        raise InputError(f"weights in {folder}", got=got, expected=f"{len(wanted)} tensors", hint=hint)


def random_weights(decoder: Decoder, seed: int = 0) -> None:
    """Normal weights of standard deviation 0.02, norms of 1: for tests and benchmarks."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    for name, place in decoder.named().items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        else:
            place.normal_(0.0, 0.02, generator=generator)


def tensors_of(folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(file, name, tensor) of all safetensors files of a folder, read as they come."""
    with importing("safetensors>=0.4", "engine", name="weights"):
        from safetensors import SafetensorError, safe_open
    for file in files_of(folder):
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no dictionary)
                    yield file, name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{file}", got=f"{error}", expected="a whole safetensors file", hint="fetch it again"
            ) from None


def files_of(folder: Path) -> list[str]:
    """The files that an index names, or the one without, or all `*.safetensors`."""
    index = folder / _INDEX
    if index.exists():
        try:
            named = sorted(set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError):
            expected = "an object with weight_map, a file for each tensor"
            raise InputError(_INDEX, got=f"another {index}", expected=expected, hint="fetch it again") from None
    else:
        named = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [file for file in named if not (folder / file).is_file()]
    if missing or not named:
        got = f"no {', '.join(missing)}" if missing else "no *.safetensors"
        raise InputError(f"weights in {folder}", got=got, expected="all files of the checkpoint", hint="fetch them")
    return named
