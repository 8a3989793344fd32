"""Which device an argument names."""

from __future__ import annotations

import torch

from tilewise.core.errors import InputError, shown


def checked_device(device: torch.device | str, hint: str) -> torch.device:
    """The device, if it is there.

    Args:
        device: a device, or its name.
        hint: what the caller does without one.

    Raises:
        InputError: another value, or a GPU that is not there.
    """
    try:
        if not isinstance(device, (str, torch.device)):
            raise TypeError
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError("device", got=shown(device), expected="a torch.device or its name", hint=hint) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        expected = f"one of {torch.cuda.device_count()} CUDA devices, or cpu"
        raise InputError("device", got=shown(device), expected=expected, hint="tilewise needs a CUDA build of PyTorch")
    return found
