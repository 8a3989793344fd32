"""A decoder by name: of a checkpoint's folder, of the small model that is fetched, or with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tilewise.core.devices import checked_device
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.models.shapes import random_decoder, shape_config
from tilewise.engine.models.weights import load_weights

RANDOM = "random:"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def decoder_of(
    model: str | Path, *, dtype: str = "auto", device: torch.device | str | None = None, seed: int = 0
) -> Decoder:
    """A decoder with its weights.

    Args:
        model: a checkpoint's folder; "smollm2"; or "random:NAME", random weights of a shape in `models.shapes`.
        dtype: "float32", "float16" or "bfloat16"; "auto" is the checkpoint's on a GPU (bfloat16 where it names none),
            and float32 on a CPU.
        device: where it runs; None is a GPU if there is one.
        seed: of random weights.

    Returns:
        The decoder.

    Raises:
        InputError: a folder without what is needed, a shape that is not known, or a device that is not there.
        UnsupportedError: an architecture, a part of a config, a dtype or a kind of device that is not known.

    Example:
        >>> from tilewise.engine.models.load import decoder_of
        >>> decoder_of("random:tiny", device="cpu").config.num_layers
        4
    """
    chosen = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    where = checked_device(chosen, "None is a GPU if there is one")
    if where.type not in ("cpu", "cuda"):
        hint = "None is a GPU if there is one"
        raise UnsupportedError("device", got=shown(device), expected="cpu or cuda", hint=hint)
    if isinstance(model, str) and model.startswith(RANDOM):
        return random_decoder(model[len(RANDOM) :], dtype=_dtype(dtype, None, where), device=where, seed=seed)
    folder = folder_of(model)
    config = ModelConfig.read(folder)
    decoder = Decoder(config, dtype=_dtype(dtype, config.dtype, where), device=where)
    load_weights(decoder, folder)
    return decoder


def config_of(model: str | Path) -> ModelConfig:
    """The config of what `decoder_of` would load."""
    if isinstance(model, str) and model.startswith(RANDOM):
        return shape_config(model[len(RANDOM) :])
    return ModelConfig.read(folder_of(model))


def folder_of(model: str | Path) -> Path:
    """The folder of a checkpoint, or of "smollm2"."""
    if model == "smollm2":
        from tilewise.engine.smollm2 import folder

        return folder()
    if not isinstance(model, (str, Path)):
        raise InputError("model", got=shown(model), expected="a folder, or 'smollm2'", hint="a path is text or a Path")
    return Path(model)


def _dtype(named: str, own: torch.dtype | None, device: torch.device) -> torch.dtype:
    if named == "auto":
        return torch.float32 if device.type == "cpu" else own or torch.bfloat16
    if named not in _DTYPES:
        raise UnsupportedError(
            "dtype", got=shown(named), expected=f"auto, {', '.join(_DTYPES)}", hint="names of dtypes"
        )
    return _DTYPES[named]
